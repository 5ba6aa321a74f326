"""Synthetic groups of token sequences for benchmarks and tests: seeded, built with numpy only.

They are valid by `validate_sequences`. A sequence alternates context and sampled spans, as a tool
conversation does. What it says is noise: token ids are uniform, logprobs are exponential, rewards
are 0 or 1 and differ inside a group of two or more. `synthetic_runs.py` makes run directories of
them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from prorl.schema import MAX_SEGMENTS, SEQUENCES, STREAM
from prorl.types import SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticShape:
    n: int = 8
    """Rollouts of a group."""
    num_tokens: int = 64
    """The mean length of a sequence; lengths vary by a third."""
    sampled_share: float = 0.25
    num_turns: int = 3
    vocab_size: int = 300
    rewritten_share: float = 0.0
    """Rollouts with a second sequence (a harness that rewrote its history)."""
    temperature: float = 1.0


def group(group_id: int, shape: SyntheticShape, seed: int = 0) -> pa.RecordBatch:
    """All sequences of one group, in the SEQUENCES schema; equal arguments give equal rows."""
    rng = np.random.default_rng([seed, group_id])
    num_segments = 1 + (rng.random(shape.n) < shape.rewritten_share)
    samples = np.repeat(np.arange(shape.n, dtype=np.int32), num_segments)
    segments = np.concatenate([np.zeros(1, np.int32), (np.diff(samples) == 0).astype(np.int32)])
    rewards = rng.integers(0, 2, shape.n).astype(np.float32)
    rewards[:2] = [0.0, 1.0][: shape.n]
    rollouts = group_id * shape.n + samples.astype(np.int64)
    scalars = {
        "sequence_id": rollouts * MAX_SEGMENTS + segments,
        "rollout_id": rollouts,
        "group_id": np.full(len(samples), group_id, np.int64),
        "sample_index": samples,
        "attempt": np.ones(len(samples), np.int32),
        "segment": segments,
        "lineage": np.where(segments > 0, "compacted", "main"),
        "parent": segments - 1,
        "weight": (1 / num_segments[samples]).astype(np.float32),
        "reward": rewards[samples],
    }
    arrays = {name: pa.array(values) for name, values in scalars.items()}
    arrays |= _lists(len(samples), shape, rng)
    return pa.RecordBatch.from_arrays([arrays[name] for name in SEQUENCES.names], schema=SEQUENCES)


def delivered(groups: list[pa.RecordBatch], first_seq: int = 0) -> pa.RecordBatch:
    """Groups as one STREAM batch, handed out in this order."""
    seqs = np.repeat(
        np.arange(first_seq, first_seq + len(groups)), [batch.num_rows for batch in groups]
    )
    joined = pa.concat_batches(groups)
    return pa.RecordBatch.from_arrays([pa.array(seqs, pa.int64()), *joined.columns], schema=STREAM)


def _lists(num_rows: int, shape: SyntheticShape, rng: np.random.Generator) -> dict[str, pa.Array]:
    pairs = num_rows * shape.num_turns
    widths = _widths(pairs, shape, rng)
    spans = widths.reshape(num_rows, -1)
    kinds = np.tile(np.array([SpanKind.CONTEXT, SpanKind.TRAINED], np.uint8), pairs)
    per_span: dict[str, NDArray[Any]] = {
        "span_end": np.cumsum(spans, axis=1).astype(np.int32).ravel(),
        "span_kind": kinds,
        "span_version": np.where(kinds == SpanKind.CONTEXT, -1, 0).astype(np.int32),
        "span_turn": np.tile(np.repeat(np.arange(shape.num_turns, dtype=np.int32), 2), num_rows),
        "span_temperature": np.full(kinds.size, shape.temperature, np.float32),
    }
    span_counts = np.full(num_rows, spans.shape[1])
    lengths, sampled = spans.sum(1), widths[:, 1].reshape(num_rows, -1).sum(1)
    ids = rng.integers(0, shape.vocab_size, lengths.sum(), dtype=np.int32)
    logprobs = -rng.exponential(0.5, sampled.sum()).astype(np.float32)
    return {
        "token_ids": list_column("token_ids", ids, lengths),
        "logprobs": list_column("logprobs", logprobs, sampled),
        **{name: list_column(name, values, span_counts) for name, values in per_span.items()},
    }


def _widths(pairs: int, shape: SyntheticShape, rng: np.random.Generator) -> NDArray[np.int64]:
    """Tokens of each pair of spans: context, then sampled."""
    total = shape.num_tokens * rng.uniform(2 / 3, 4 / 3, pairs) / shape.num_turns
    widths = np.empty((pairs, 2), np.int64)
    widths[:, 1] = np.maximum(total * shape.sampled_share, 1)
    widths[:, 0] = np.maximum(total - widths[:, 1], 1)
    return widths


def list_column(name: str, values: NDArray[Any], lengths: NDArray[Any]) -> pa.Array:
    """A column of `sequences` from its values in a row and how many each sequence has."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    column = SEQUENCES.field(name).type
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values, column.value_type), type=column
    )
