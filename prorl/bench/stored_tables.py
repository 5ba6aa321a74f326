"""Rows of every table as a long run leaves them, made up but valid."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from prorl.schema import MAX_SEGMENTS, TABLES

GROUP = 8
TURNS = 2
STEP = 32
"""Groups between two policy versions."""
Columns = dict[str, Any]
NOW = datetime(2026, 1, 1, tzinfo=UTC)


def rollout_tables(ids: np.ndarray[Any, Any], tokens: int, rng: Any) -> dict[str, pa.Table]:
    """The rows of these rollouts in every table that has some."""
    count, groups = len(ids), ids // GROUP
    length = np.maximum(8, rng.normal(tokens, tokens / 8, count).astype(int))
    reward = ((ids * 2654435761 >> 7) % 4 == 0).astype(np.float32) * (groups % 3 != 0)
    version = (groups // STEP).astype(np.int32)
    return {
        "sequences": _sequences(ids, groups, length, reward, version, rng),
        "rollouts": _rollouts(ids, groups, length, reward, version, rng),
        "turns": _turns(ids, length, version, rng),
        "messages": _messages(ids),
    }


def _table(name: str, columns: Columns) -> pa.Table:
    """Columns that are not given are zero, empty or null, whatever the schema has."""
    schema = TABLES[name]
    rows = len(next(iter(columns.values())))
    return pa.Table.from_arrays(
        [_column(columns.get(field.name), field, rows) for field in schema], schema=schema
    )


def _column(values: Any, field: pa.Field, rows: int) -> pa.Array:
    if values is not None:
        return values if isinstance(values, pa.Array) else pa.array(values, field.type)
    if field.nullable:
        return pa.nulls(rows, field.type)
    if pa.types.is_list(field.type):
        empty = pa.array([], field.type.value_type)
        offsets = pa.array(np.zeros(rows + 1, np.int32))
        return pa.ListArray.from_arrays(offsets, empty, type=field.type)
    zero: Any = b"" if pa.types.is_binary(field.type) else 0
    if pa.types.is_string(field.type):
        zero = ""
    elif pa.types.is_boolean(field.type):
        zero = False
    elif pa.types.is_timestamp(field.type):
        zero = NOW
    return pa.repeat(pa.scalar(zero, field.type), rows)


def _lists(values: Any, lengths: Any, name: str) -> pa.Array:
    dtype = TABLES["sequences"].field(name).type
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(
        pa.array(offsets), pa.array(values, dtype.value_type), type=dtype
    )


def _sequences(ids: Any, groups: Any, length: Any, reward: Any, version: Any, rng: Any) -> pa.Table:
    """Half of the tokens is context, half is sampled; ids are drawn as words are (Zipf)."""
    count, sampled = len(ids), length // 2
    token_ids = np.minimum(rng.zipf(1.3, int(length.sum())), 49_999).astype(np.int32)
    ends = np.stack([length - sampled, length], axis=1).ravel()
    two = np.full(count, 2)
    versions = np.stack([np.full(count, -1), version], axis=1).ravel()
    # A log-softmax in float32: whatever the logits are, its sum takes every bit of the mantissa.
    logprobs = -rng.exponential(0.6, int(sampled.sum()))
    return _table(
        "sequences",
        {
            "sequence_id": ids * MAX_SEGMENTS,
            "rollout_id": ids,
            "group_id": groups,
            "sample_index": ids % GROUP,
            "attempt": np.ones(count, np.int32),
            "reward": reward,
            "token_ids": _lists(token_ids, length, "token_ids"),
            "logprobs": _lists(logprobs.astype(np.float32), sampled, "logprobs"),
            "span_end": _lists(ends, two, "span_end"),
            "span_kind": _lists(np.tile([0, 1], count), two, "span_kind"),
            "span_version": _lists(versions, two, "span_version"),
            "span_turn": _lists(np.zeros(2 * count, int), two, "span_turn"),
            "span_temperature": _lists(np.ones(2 * count), two, "span_temperature"),
        },
    )


def _rollouts(ids: Any, groups: Any, length: Any, reward: Any, version: Any, rng: Any) -> pa.Table:
    count = len(ids)
    return _table(
        "rollouts",
        {
            "rollout_id": ids,
            "group_id": groups,
            "sample_index": ids % GROUP,
            "attempt": np.ones(count, np.int32),
            "rollout_key": [f"key-{i}" for i in ids],
            "task_id": [f"task-{group % 5000}" for group in groups],
            "data_source": ["math" if group % 2 else "code" for group in groups],
            "env": ["math" if group % 2 else "code" for group in groups],
            "agent": ["native"] * count,
            "status": ["completed"] * count,
            "valid": np.ones(count, bool),
            "failure_class": ["policy" if i % 50 == 0 else "" for i in ids],
            "failure_code": ["turn_limit" if i % 50 == 0 else "" for i in ids],
            "stop_reason": ["turns" if i % 50 == 0 else "done" for i in ids],
            "reward": reward,
            "num_sequences": np.ones(count, np.int32),
            "num_turns": np.full(count, TURNS, np.int32),
            "num_tokens": length,
            "num_sampled": length // 2,
            "num_tool_calls": np.full(count, TURNS - 1, np.int32),
            "min_version": version,
            "max_version": version,
            "run_s": rng.lognormal(1.0, 0.8, count),
            "llm_s": rng.lognormal(0.5, 0.8, count),
            "tool_s": rng.lognormal(-1.0, 0.8, count),
            "extra": ["{}"] * count,
            "logprob_sum": -0.6 * (length // 2),
        },
    )


def _turns(ids: Any, length: Any, version: Any, rng: Any) -> pa.Table:
    count = len(ids) * TURNS
    return _table(
        "turns",
        {
            "rollout_id": np.repeat(ids, TURNS),
            "attempt": np.ones(count, np.int32),
            "turn": np.tile(np.arange(TURNS), len(ids)),
            "prompt_tokens": np.repeat(length // 2, TURNS),
            "completion_tokens": np.repeat(length // (2 * TURNS), TURNS),
            "finish_reason": ["stop"] * count,
            "temperature": np.ones(count, np.float32),
            "policy_version": np.repeat(version, TURNS),
            "backend": ["scripted:bench"] * count,
            "llm_s": rng.lognormal(0.0, 0.5, count),
            "tool_s": rng.lognormal(-2.0, 0.5, count),
            "tool_calls": np.tile([1, 0], len(ids)),
        },
    )


def _messages(ids: Any) -> pa.Table:
    count, said = len(ids), ["user", "assistant", "tool", "assistant"]
    return _table(
        "messages",
        {
            "rollout_id": np.repeat(ids, len(said)),
            "attempt": np.ones(count * len(said), np.int32),
            "index": np.tile(np.arange(len(said)), count),
            "role": said * count,
            "content": [f"{role} says {i} of many words" for i in ids for role in said],
            "tool_calls": ["[]"] * (count * len(said)),
            "turn": np.tile([0, 0, 0, 1], count),
        },
    )
