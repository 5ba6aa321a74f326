"""TRL's GRPOTrainer over a recipe's run, with the recipes' numbers; model servers get each
checkpoint. `accelerate launch configs/recipes/train_trl.py Qwen3-4B prorl-runs math trained/math`
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig

from prorl.client import connect
from prorl.client.records import Feed
from prorl.trainer.doors.trl import grpo_trainer


class Publish(TrainerCallback):
    """Gives what TRL has saved to the model servers."""

    def __init__(self, root: str, run: str) -> None:
        self._root, self._run = root, run

    def on_save(self, args: Any, state: Any, control: Any, **_: object) -> None:
        if state.is_world_process_zero:
            path = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            with connect(self._root) as client:
                client.publish(self._run, state.global_step, path.absolute())


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    for name in ("model", "root", "run", "output"):
        asked.add_argument(name)
    asked.add_argument("--steps", type=int, default=1000)
    asked.add_argument("--groups", type=int, default=32, help="a step")
    asked.add_argument("--rows", type=int, default=8, help="in a forward pass")
    asked.add_argument("--learning-rate", type=float, default=1e-6)
    asked.add_argument("--cpu", action="store_true")
    given = asked.parse_args()
    config = GRPOConfig(
        output_dir=given.output,
        max_steps=given.steps,
        learning_rate=given.learning_rate,
        beta=1e-4,
        loss_type="dapo",
        epsilon_high=0.28,
        temperature=1.0,
        num_generations=8,
        per_device_train_batch_size=given.rows,
        gradient_accumulation_steps=given.groups * 8 // given.rows,
        gradient_checkpointing=True,
        bf16=not given.cpu,
        use_cpu=given.cpu,
        save_steps=1,
        save_total_limit=3,
        shuffle_dataset=False,
        report_to=[],
    )
    trainer = grpo_trainer(
        Feed(given.root, given.run, consumer="primary"),
        model=given.model,
        args=config,
        processing_class=AutoTokenizer.from_pretrained(given.model),
        callbacks=[Publish(given.root, given.run)],
    )
    found = sorted(Path(given.output).glob("checkpoint-*"))
    trainer.train(resume_from_checkpoint=bool(found))


if __name__ == "__main__":
    main()
