"""Synthetic groups of token sequences for benchmarks and tests: seeded, built with numpy only.

They are valid by `validate_sequences`.
A sequence alternates context and sampled spans, as a tool conversation does. What it says is noise:
token ids are uniform, logprobs are exponential, rewards are 0 or 1 and differ inside a group of two
or more. `write_run` makes a run directory of them that replay, SQL and verify take for a real one;
its groups were all kept and delivered in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson
import pyarrow as pa

from prorl.schema import GROUPS, MAX_SEGMENTS, ROLLOUTS, SEQUENCES, STREAM
from prorl.schema_fields import SCHEMA_VERSION
from prorl.storage.durable import write_durably
from prorl.storage.layout import MANIFEST, Commit, RunDir
from prorl.storage.parts import empties, encode, part_file
from prorl.types import RolloutState, SpanKind

if TYPE_CHECKING:
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the synthetic groups look like."""

    n: int = 8
    """Rollouts of a group."""
    num_tokens: int = 64
    """Of a sequence, on average; lengths vary by a third."""
    sampled_share: float = 0.25
    num_turns: int = 3
    vocab_size: int = 300
    rewritten_share: float = 0.0
    """Rollouts with a second sequence (a harness that rewrote its history)."""
    temperature: float = 1.0


def group(group_id: int, shape: Shape, seed: int = 0) -> pa.RecordBatch:
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


def _lists(num_rows: int, shape: Shape, rng: np.random.Generator) -> dict[str, pa.Array]:
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
        "token_ids": _list("token_ids", ids, lengths),
        "logprobs": _list("logprobs", logprobs, sampled),
        **{name: _list(name, values, span_counts) for name, values in per_span.items()},
    }


def _widths(pairs: int, shape: Shape, rng: np.random.Generator) -> NDArray[np.int64]:
    """Tokens of each pair of spans: context, then sampled."""
    total = shape.num_tokens * rng.uniform(2 / 3, 4 / 3, pairs) / shape.num_turns
    widths = np.empty((pairs, 2), np.int64)
    widths[:, 1] = np.maximum(total * shape.sampled_share, 1)
    widths[:, 0] = np.maximum(total - widths[:, 1], 1)
    return widths


def _list(name: str, values: NDArray[Any], lengths: NDArray[Any]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values), type=SEQUENCES.field(name).type
    )


GROUPS_PER_PART = 16

_AT = datetime(2026, 1, 1, tzinfo=UTC)


def write_run(where: Path, groups: Iterable[pa.RecordBatch], run_id: str = "synthetic") -> Path:
    """Write a run directory in which these groups were delivered in this order; returns `where`."""
    run = RunDir(where)
    run.create(empties(run_id).items())
    manifest = {"run_id": run_id, "schema_version": SCHEMA_VERSION, "config": {"run_id": run_id}}
    write_durably(run.fs, run.path(MANIFEST), orjson.dumps(manifest))
    rest, num_parts = iter(groups), 0
    while part := list(islice(rest, GROUPS_PER_PART)):
        _write_part(run, run_id, num_parts + 1, part, num_parts * GROUPS_PER_PART)
        num_parts += 1
    return where


def _write_part(
    run: RunDir, run_id: str, number: int, groups: list[pa.RecordBatch], first_seq: int
) -> None:
    part = f"part-{number:06d}"
    tables = {
        "sequences": pa.Table.from_batches(groups),
        "rollouts": pa.concat_tables(_rollouts(batch) for batch in groups),
        "groups": pa.concat_tables(_events(batch, first_seq + i) for i, batch in enumerate(groups)),
    }
    files = []
    for table, rows in tables.items():
        content = encode(table, rows, run_id, part)
        files.append(part_file(table, part, rows, content))
        write_durably(run.fs, run.path(files[-1].path), content)
    commit = Commit(commit_seq=number, part=part, files=tuple(files), run_id=run_id)
    write_durably(run.fs, run.commit_path(number), commit.dumps())


PER_ROLLOUT = ("group_id", "sample_index", "reward")
"""Columns of a sequence that all of its rollout share."""


def _rollouts(batch: pa.RecordBatch) -> pa.Table:
    ids, first, inverse = np.unique(
        batch.column("rollout_id").to_numpy(), return_index=True, return_inverse=True
    )
    tokens, sampled = (
        np.diff(batch.column(name).offsets.to_numpy()) for name in ("token_ids", "logprobs")
    )
    known = {
        "rollout_id": ids,
        **{name: batch.column(name).to_numpy()[first] for name in PER_ROLLOUT},
        "attempt": np.ones(len(ids), np.int32),
        "valid": np.ones(len(ids), bool),
        "status": [RolloutState.COMPLETED.value] * len(ids),
        "num_sequences": np.bincount(inverse),
        "num_tokens": np.bincount(inverse, tokens),
        "num_sampled": np.bincount(inverse, sampled),
        "committed_at": [_AT] * len(ids),
    }
    columns = [_column(known.get(field.name), field.type, len(ids)) for field in ROLLOUTS]
    return pa.table(columns, schema=ROLLOUTS)


def _column(values: Any, dtype: pa.DataType, length: int) -> pa.Array:
    """Known values, else as many empty ones."""
    if values is not None:
        return pa.array(values).cast(dtype)
    empty: Any = (
        ""
        if pa.types.is_string(dtype)
        else b""
        if pa.types.is_binary(dtype)
        else []
        if pa.types.is_nested(dtype)
        else 0
    )
    return pa.array([empty] * length, dtype)


def _events(batch: pa.RecordBatch, delivery_seq: int) -> pa.Table:
    group_id = batch.column("group_id")[0].as_py()
    members = len(np.unique(batch.column("rollout_id").to_numpy()))
    shared = {
        "group_id": group_id,
        "kept": True,
        "reason": "informative",
        "num_members": members,
        "num_valid": members,
        "min_version": 0,
        "mean_reward": float(batch.column("reward").to_numpy().mean()),
        "at": _AT,
    }
    events = [("decided", -1), ("delivered", delivery_seq)]
    rows = [
        {"event_seq": 2 * delivery_seq + i, "event": event, "delivery_seq": seq, **shared}
        for i, (event, seq) in enumerate(events)
    ]
    return pa.Table.from_pylist(rows, schema=GROUPS)
