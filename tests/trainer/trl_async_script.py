"""TRL's AsyncGRPOTrainer over a feed, on a tiny model and a CPU, that shows the rows it trains."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from prorl.client.records import Feed
from prorl.trainer.adapters.trl_async import async_grpo_trainer
from tests.trainer.trl_script import words

ROWS = 8


class _Attention:
    """In the place of FlashAttention 3, whose kernel comes from a model hub and runs on a GPU."""

    @staticmethod
    def flash_attn_varlen_func(
        q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, *_: Any, softmax_scale: Any = None, **__: Any
    ) -> Any:
        out = []
        for i in range(len(cu_q) - 1):
            query, key, value = (
                x[start:stop].transpose(0, 1)[None]
                for x, start, stop in (
                    (q, cu_q[i], cu_q[i + 1]),
                    (k, cu_k[i], cu_k[i + 1]),
                    (v, cu_k[i], cu_k[i + 1]),
                )
            )
            rows, columns = query.shape[2], key.shape[2]
            mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
            attended = functional.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=softmax_scale, enable_gqa=True
            )
            out.append(attended[0].transpose(0, 1))
        return torch.cat(out)


def make(
    feed: Feed,
    model: Path,
    output: Path,
    steps: int,
    own_steps: int,
    seen: list[Any],
    *,
    rows: int = ROWS,
    temperature: float = 1.0,
) -> Any:
    """A trainer that ends at step `steps`; the rows that its loss gets are put into `seen`.

    TRL collates one batch more than it trains: the last `own_steps` are its own.
    """
    from trl.experimental.async_grpo import AsyncGRPOConfig, packing
    from trl.experimental.async_grpo import async_grpo_trainer as theirs

    theirs.get_peak_flops_per_device = lambda *_: None
    packing._flash_attn = lambda: _Attention
    packing.get_target_dtype = lambda query, module: query.dtype
    tokenizer = words(chat_template="{{ messages }}")
    config = AsyncGRPOConfig(
        output_dir=str(output),
        max_steps=steps,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=1,
        num_generations=4,
        learning_rate=1e-4,
        temperature=temperature,
        token_budget=-1,
        max_staleness=1 << 20,
        dtype="float32",
        bf16=False,
        use_cpu=True,
        report_to=[],
        save_steps=1,
    )
    trainer = async_grpo_trainer(feed, model=str(model), args=config, processing_class=tokenizer)
    make_loader, places = trainer.get_train_dataloader, iter(range(rows * own_steps))

    def loader() -> Any:
        made = make_loader()
        inner = made.base_dataloader
        collate, inner.collate_fn = inner.collate_fn, lambda examples: watched(examples, collate)
        return made

    def watched(examples: list[Any], collate: Any) -> Any:
        (batch,) = examples
        samples = [sample for row in batch for sample in row.samples]
        packed = collate(examples)
        assert int(packed["global_n_tokens"][0]) == sum(
            int(sample["completion_mask"].sum()) for sample in samples
        )
        seen.extend(sample for sample, _ in zip(samples, places, strict=False))
        return packed

    trainer.get_train_dataloader = loader
    return trainer
