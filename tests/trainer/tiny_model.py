"""A tiny random Qwen3-shaped model on disk, and stored runs that it can train on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from prorl.analysis.synthetic import SyntheticShape, delivered, group
from prorl.client import PackedBatch
from prorl.client.advantages import mean_std

VOCAB = 64
SHAPE = SyntheticShape(n=4, num_tokens=24, num_turns=2, vocab_size=VOCAB, rewritten_share=0.2)


def save_model(
    where: Path, seed: int = 0, *, vocab_size: int = VOCAB, max_tokens: int = 512
) -> Path:
    """Grouped-query attention, tied embeddings, two layers; returns `where`."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=max_tokens,
        tie_word_embeddings=True,
    )
    model: Any = Qwen3ForCausalLM(config)
    model.save_pretrained(where)
    (where / "tokenizer.json").write_text("{}")
    return where


def batch_of(num_groups: int, shape: SyntheticShape = SHAPE, seed: int = 0) -> PackedBatch:
    batch = PackedBatch(delivered([group(i, shape, seed) for i in range(num_groups)]), "demo")
    return batch.with_advantages(mean_std(batch))
