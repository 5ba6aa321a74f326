"""TRL's GRPOTrainer learns from a run instead of generating.

    feed = Feed("ROOT", "mine", consumer="trl")
    trainer = grpo_trainer(feed, model=..., args=GRPOConfig(...), processing_class=tokenizer)
    trainer.train(resume_from_checkpoint=...)

Its `rollout_func` gives back rows of the stream: ids, the sampler's logprobs and `env_mask`, which
keeps tool output out of the loss (under any other name TRL trains it). Two things are put into
TRL's batch where it has its own: advantages, which it would normalise by position in blocks of
`num_generations`, so that a group with a missing member shifts all behind it; and the sampler's
logprobs as those of the old policy, without which the ratio is to itself.

The cursor lies in TRL's checkpoints (`prorl.json`) and is committed when one is on disk, so that a
killed training that is resumed takes each group once. Groups are asked for whole; rows that do not
fill a generation batch wait for the next, and the last batch of a run is filled up with copies that
train nothing, so that every group trains. Where no row is left, `train()` returns. Of several
processes (`accelerate launch`) the first takes the rows of all and deals them.

A rollout of several sequences counts once: TRL's token means (`dapo`, `bnpo`, `cispo`, `vespo`) do
that by themselves, and where it divides by sequences (`grpo`, `sapo`, `dr_grpo`, `luspo`)
advantages are scaled so that it divides by rollouts. Its KL penalty (`beta`) is not scaled: under
`grpo` and `sapo` that one counts sequences. Rows that were not sampled at `GRPOConfig.temperature`
are refused.

For TRL 1.16 (`rollout_func` is experimental there); its weights go to the model servers by
`client.publish` from a callback of yours, or by its own vLLM client.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import orjson

from prorl.client import connect
from prorl.client.records import Feed, Record
from prorl.errors import NotFoundError, ProrlError, UserError
from prorl.trainer.adapters import check_temperature, check_version, metrics_callback

STATE = "prorl.json"

PER_SEQUENCE = {"grpo": True, "sapo": True, "dr_grpo": False, "luspo": False}
"""TRL's losses that divide by the number of sequences: whether each sequence's tokens are averaged
first. The others divide by tokens.
"""


def row_of(record: Record) -> dict[str, Any]:
    """One entry of `rollout_func`'s columns: the prompt ends where the first token was sampled, and
    what follows the last token that trains is left out, since it trains nothing.
    """
    trained = record.mask.nonzero()[0]
    stop = int(trained[-1]) + 1 if len(trained) else len(record.ids)
    completion = slice(record.first, max(stop, record.first + 1))
    return {
        "prompt_ids": record.ids[: record.first].tolist(),
        "completion_ids": record.ids[completion].tolist(),
        "logprobs": record.logprobs[completion].tolist(),
        "env_mask": record.mask[completion].astype(int).tolist(),
        "prorl_reward": record.reward,
        "prorl_advantage": record.advantage,
        "prorl_weight": record.weight,
    }


def _idle(row: dict[str, Any]) -> dict[str, Any]:
    """A copy that fills a batch: none of its tokens trains, and it counts as no rollout."""
    idle = {name: value for name, value in row.items() if name != "prorl_cursor"}
    idle |= {"env_mask": [0] * len(row["env_mask"]), "prorl_advantage": 0.0, "prorl_weight": 0.0}
    return idle


def scaled(rows: list[dict[str, Any]], loss_type: str) -> list[dict[str, Any]]:
    """The rows of one batch, with advantages under which a rollout counts once: policy losses are
    linear in them. A sequence of a rollout of three has a third of it in a mean of sequences, and a
    mean over rollouts is so many times larger as there are more sequences than rollouts.
    """
    if loss_type in PER_SEQUENCE:
        rollouts = sum(row["prorl_weight"] for row in rows)
        more = len(rows) / rollouts if rollouts else 1.0
        for row in rows:
            share = row["prorl_weight"] if PER_SEQUENCE[loss_type] else 1.0
            row["prorl_advantage"] *= share * more
    return rows


def deal(accelerator: Any, take: Callable[[int], list[Any]], count: int) -> list[Any]:
    """`count` rows for each process, of one `take` in the first; its error is raised in all."""
    ranks = accelerator.num_processes
    if ranks == 1:
        return take(count)
    from torch.distributed import scatter_object_list

    dealt: list[Any] | None = None
    if accelerator.process_index == 0:
        try:
            rows = take(count * ranks)
            dealt = [rows[rank * count :][:count] for rank in range(ranks)]
        except ProrlError as error:
            dealt = [error] * ranks
    received: list[Any] = [None]
    scatter_object_list(received, dealt, src=0)
    if isinstance(received[0], ProrlError):
        raise received[0]
    return list(received[0])


class EndOfRunError(UserError):
    """A run has ended and all of its rows were taken."""


def most_groups(feed: Feed) -> int | None:
    """Returns how many groups a run can deliver in all; None while that is open. A filter keeps
    fewer. Raises UserError for a run that delivers none.
    """
    with connect(feed.url) as client:
        if is_replay(feed):
            status = client.status()
            runs = {run["run"]: run for run in status["runs"]}
            if feed.run not in runs:
                raise NotFoundError(f"no run {feed.run!r} in the replay: {', '.join(runs)}")
            return int(runs[feed.run]["delivered"])
        run = client.run(feed.run)
    config, counts = run["config"], run["groups"]
    submitted = sum(counts.values()) - counts["pool"]  # which are counted by their state, too
    if config["delivery"] != "stream":
        raise UserError(f"run {feed.run!r} has delivery {config['delivery']!r}", "`stream`")
    if run["state"] != "open":
        return int(counts["kept"])
    bounds = [config["target_groups"]] if config["target_groups"] else []
    if run["last"]:
        bounds.append(run["tasks"] * config["epochs"] if config["epochs"] else submitted)
    return min(bounds, default=None)


def is_replay(feed: Feed) -> bool:
    """Returns whether the feed reads a replay, which takes no weights."""
    return feed.url.startswith("grpc")


class FeedRows:
    """Rows of a feed for a trainer that asks for a number of them, not for groups."""

    def __init__(self, feed: Feed, temperature: float = 1.0) -> None:
        self._feed, self._temperature = feed, temperature
        self._groups: Iterator[list[Record]] | None = None
        self._remaining: list[dict[str, Any]] = []
        self.cursor = feed.cursor
        """After the last group all of whose rows were taken."""
        self.waited_s = 0.0
        """For groups, since it was made."""

    def take(self, count: int) -> list[dict[str, Any]]:
        """The next rows. The last ones of a run are followed by copies that train nothing. Raises
        EndOfRunError when none is left, UserError for rows of another temperature.
        """
        if self._groups is None:
            self._groups = iter(self._feed)
        while len(self._remaining) < count:
            began = time.monotonic()
            group = next(self._groups, None)
            self.waited_s += time.monotonic() - began
            if group is None:
                if not self._remaining:
                    raise EndOfRunError(
                        f"run {self._feed.run} has ended: all of its rows were taken"
                    )
                self._remaining += [_idle(self._remaining[-1])] * (count - len(self._remaining))
                break
            check_temperature(group, self._temperature, "GRPOConfig.temperature")
            rows = [row_of(record) for record in group]
            rows[-1]["prorl_cursor"] = self._feed.cursor
            self._remaining += rows
        batch, self._remaining = self._remaining[:count], self._remaining[count:]
        for row in batch:
            self.cursor = row.pop("prorl_cursor", self.cursor)
        return batch

    def restore(self, cursor: str | None) -> None:
        """Begin again behind a checkpoint's cursor."""
        self._feed.cursor = self.cursor = cursor
        self._groups, self._remaining = None, []


def grpo_trainer(
    feed: Feed, *, num_rows: int = 1 << 20, callbacks: Sequence[Any] = (), **arguments: Any
) -> Any:
    """A `trl.GRPOTrainer` over the feed; `arguments` are TRL's own, without a dataset and rewards.
    `callbacks` come after the one that keeps the cursor: a checkpoint is whole when they see it.

    `num_rows` only bounds TRL's counting of epochs: what trains comes from the feed.
    """
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_utils import TrainOutput
    from trl import GRPOTrainer

    check_version("trl")
    rows = FeedRows(feed, arguments["args"].temperature)

    def rollout_func(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        def take(count: int) -> list[dict[str, Any]]:
            return scaled(rows.take(count), trainer.loss_type)

        dealt = deal(trainer.accelerator, take, len(prompts))
        return {name: [row[name] for row in dealt] for name in dealt[0]}

    def reward(prorl_reward: list[float], **_: object) -> list[float]:
        return prorl_reward

    class Trainer(GRPOTrainer):  # type: ignore[misc]
        """TRL's, with the advantages and old logprobs of the rows, until the run has ended."""

        def train(self, *arguments: Any, **named: Any) -> Any:
            try:
                return super().train(*arguments, **named)
            except EndOfRunError:
                saved = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
                if self.state.global_step and not saved.exists():
                    self._save_checkpoint(self.model, None)
                    self.callback_handler.on_save(self.args, self.state, self.control)
                self.callback_handler.on_train_end(self.args, self.state, self.control)
                return TrainOutput(self.state.global_step, 0.0, {})

        def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
            output: dict[str, Any] = super()._generate_and_score_completions(inputs)
            advantages = [row["prorl_advantage"] for row in inputs]
            output["advantages"] = torch.tensor(advantages, device=self.accelerator.device)
            output["old_per_token_logps"] = output["sampling_per_token_logps"]
            return output

    class CursorCallback(TrainerCallback):
        """Keeps the feed's place in TRL's checkpoints, in the process that takes the rows."""

        def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if not state.is_world_process_zero:
                return
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            (folder / STATE).write_bytes(orjson.dumps({"cursor": rows.cursor}))
            feed.commit(rows.cursor)

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: object) -> None:
            if state.global_step and state.is_world_process_zero:
                folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
                rows.restore(orjson.loads((folder / STATE).read_bytes())["cursor"])
                feed.commit(rows.cursor)  # it may have been killed before it had said so

    return Trainer(
        reward_funcs=reward,
        rollout_func=rollout_func,
        train_dataset=Dataset.from_dict({"prompt": [""] * num_rows}),
        callbacks=[CursorCallback(), metrics_callback(feed, lambda: rows.waited_s), *callbacks],
        **arguments,
    )
