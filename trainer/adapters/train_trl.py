"""TRL's GRPOTrainer over a run, a whole script to copy: the recipes' numbers as its defaults, model
servers get each checkpoint, SIGTERM ends it after the step in hand, and started again it goes on.

    accelerate launch -m prorl.trainer.adapters.train_trl Qwen3-4B prorl-runs math trained/math

On several GPUs accelerate starts a process for each: the first takes the rows and deals them, and a
step has `--groups` groups however many there are.

`--steps` is an upper bound: a run that ends earlier, after its epochs or as a replay, ends the
training after a last step with the groups that are left. A replay (`grpc://HOST:PORT` as ROOT, its
token in PRORL_TOKEN) takes no weights, so none are published.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from prorl.client import connect
from prorl.client.records import Feed
from prorl.errors import ProrlError, UserError
from prorl.linux.calls import die_with_parent
from prorl.pluralize import pluralize
from prorl.trainer.adapters.trl import STATE, grpo_trainer, is_replay, most_groups
from prorl.trainer.learner import expected_of
from prorl.trainer.untie import untie


class Serve(TrainerCallback):
    """Gives what TRL has saved to the model servers, and heeds who asks the training to end."""

    def __init__(self, feed: Feed) -> None:
        self._feed, self._stop_requested = feed, False
        signal.signal(signal.SIGTERM, self._stop)

    def _stop(self, *_: object) -> None:
        self._stop_requested = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: object) -> None:
        stop = torch.tensor([self._stop_requested], dtype=torch.int32, device=args.device)
        if args.world_size > 1:  # all end after the same step, or the others wait for ever
            torch.distributed.all_reduce(stop, torch.distributed.ReduceOp.MAX)
        control.should_training_stop |= bool(stop.item())

    def on_save(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.is_world_process_zero and not is_replay(self._feed):
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            model = parts.get("model")
            expected = _expected(args, model)
            if model is not None and model.config.tie_word_embeddings:
                path = _untied(path)
            with connect(self._feed.url) as client:
                client.publish(
                    self._feed.run, state.global_step, path.absolute(), expected=expected
                )

    def on_train_begin(self, args: Any, state: Any, control: Any, **parts: Any) -> None:
        if state.global_step:  # it may have been killed before they had it
            self.on_save(args, state, control, **parts)


def _untied(checkpoint: Path) -> Path:
    """A copy of a checkpoint's weights as a vLLM loads them rightly; that of the one before stays,
    since servers may still read it.
    """
    copies = checkpoint.parent / "untied"
    copy = copies / checkpoint.name
    if not copy.exists():
        untie(checkpoint, copy)
    for old in sorted(copies.iterdir(), key=lambda path: path.stat().st_mtime_ns)[:-2]:
        shutil.rmtree(old)
    return copy


def _expected(args: Any, model: Any) -> dict[str, Any] | None:
    """Returns what servers must say with the model's weights; None where its parameters are spread
    over processes, of which this one alone cannot ask it.
    """
    if model is None or args.fsdp or args.deepspeed:
        print("weights  not verified: this process alone cannot ask the model", flush=True)
        return None
    is_training = model.training
    model.eval()
    try:
        return expected_of(model)
    finally:
        model.train(is_training)


POSITIONAL = {
    "model": "directory of the weights to begin with, as the model servers have them",
    "root": "folder of the service (--root of `prorl serve`), or grpc://HOST:PORT of a replay",
    "run": "name of a run with delivery=stream",
    "output": "folder for checkpoints; what lies there is gone on with",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name, meaning in POSITIONAL.items():
        parser.add_argument(name, help=meaning)
    parser.add_argument("--steps", type=int, default=1000, help="at most; fewer where the run ends")
    parser.add_argument("--groups", type=int, default=32, help="a step")
    parser.add_argument("-n", type=int, default=8, help="rollouts a group, as the run has them")
    parser.add_argument("--rows", type=int, default=8, help="in a forward pass")
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--beta", type=float, default=1e-4, help="of the KL penalty")
    parser.add_argument("--temperature", type=float, default=1.0, help="of the run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--die-with-parent", action="store_true")
    args = parser.parse_args()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.groups * args.n % (args.rows * ranks):
        parser.error(
            f"--rows {args.rows} on {ranks} processes do not divide {args.groups} groups of"
            f" {args.n}"
        )
    if args.die_with_parent:
        die_with_parent(signal.SIGKILL)
    # What a kill cut off has no place in the feed: that is written last.
    whole = [path.parent for path in Path(args.output).glob(f"checkpoint-*/{STATE}")]
    newest = max(whole, key=lambda path: int(path.name[11:]), default=None)
    done = int(newest.name[11:]) if newest else 0
    feed = Feed(args.root, args.run, consumer="primary")
    try:
        expected = planned(feed, args.steps, args.groups)
    except ProrlError as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if is_first := os.environ.get("RANK", "0") == "0":
        print(f"steps    {expected}; {done} are done", flush=True)
    if done >= args.steps:
        return
    config = GRPOConfig(
        output_dir=args.output,
        max_steps=args.steps,
        learning_rate=args.learning_rate,
        beta=args.beta,
        loss_type="dapo",
        epsilon_high=0.28,
        temperature=args.temperature,
        num_generations=args.n,
        per_device_train_batch_size=args.rows,
        gradient_accumulation_steps=args.groups * args.n // (args.rows * ranks),
        gradient_checkpointing=not args.cpu,
        bf16=not args.cpu,
        use_cpu=args.cpu,
        seed=args.seed,
        logging_steps=1,
        save_steps=1,
        save_total_limit=3,
        shuffle_dataset=False,
        report_to=[],
    )
    trainer = grpo_trainer(
        feed,
        model=args.model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(args.model),
        callbacks=[Serve(feed)],
    )
    try:
        trainer.train(resume_from_checkpoint=str(newest) if newest else None)
    except UserError as error:
        if is_first:
            print(error, file=sys.stderr)
        raise SystemExit(2) from None
    if is_first:
        print(
            f"trained  {pluralize(trainer.state.global_step, 'step')} of run {args.run}", flush=True
        )


def planned(feed: Feed, most: int, groups: int) -> str:
    """Returns how many steps to expect. Raises ProrlError."""
    total = most_groups(feed)
    if total is None:
        return f"at most {most} (--steps): run {feed.run} takes groups yet"
    whole = -(-total // groups)
    exact = "" if is_replay(feed) else "at most "
    return (
        f"{exact}{min(most, whole)}: {exact}{pluralize(total, 'group')}, {groups} a step, with"
        f" --steps {most}; more where rollouts have several sequences"
    )


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)  # pyarrow.flight may wait for ever for its threads when the interpreter ends
