"""A GRPOTrainer of TRL over a feed, on a tiny model, that shows the batches it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prorl.client.records import Feed
from prorl.trainer.adapters.trl import grpo_trainer


def words(**more: Any) -> Any:
    """A tokenizer of 64 words, `t0` to `t63`."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    fast: Any = PreTrainedTokenizerFast
    table = models.WordLevel({f"t{i}": i for i in range(64)}, unk_token="t0")
    return fast(tokenizer_object=Tokenizer(table), eos_token="t1", pad_token="t0", **more)


def make(
    feed: Feed,
    model: Path,
    output: Path,
    steps: int,
    rows: int,
    seen: list[dict[str, Any]],
    **more: Any,
) -> Any:
    """A trainer whose batches are put into `seen`, as its loss gets them."""
    from trl import GRPOConfig

    config = GRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=rows,
        num_generations=rows,
        gradient_accumulation_steps=1,
        beta=0.0,
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_steps=1,
        shuffle_dataset=False,
        **more,
    )
    trainer = grpo_trainer(feed, model=str(model), processing_class=words(), args=config)
    scored = trainer._generate_and_score_completions

    def watched(inputs: list[dict[str, Any]]) -> dict[str, Any]:
        batch: dict[str, Any] = scored(inputs)
        seen.append(batch)
        return batch

    trainer._generate_and_score_completions = watched
    return trainer
