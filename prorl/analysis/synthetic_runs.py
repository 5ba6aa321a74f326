"""Run directories of made-up rows, which replay, SQL and verify take for real ones.

They hold rows of the store's own tables, cut into commits by the store's own encoder; nothing is
fsynced. `make_run` makes one as a long run leaves it, in minutes; `write_run` has given groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from prorl.analysis.synthetic import list_column
from prorl.schema import MAX_SEGMENTS, TABLES
from prorl.schema.fields import SCHEMA_VERSION
from prorl.states import Lineage, RolloutState
from prorl.storage.files.layout import MANIFEST, Commit, RunDir
from prorl.storage.files.parts import empties, encode, part_file

GROUPS_PER_PART = 16


def make_run(where: Path, rollouts: int, commits: int, tokens: int = 64, seed: int = 0) -> RunDir:
    """A run of `rollouts` in groups of 8 with about `tokens` tokens each, in `commits` parts.

    Every group is decided, informative ones are delivered in order. Same arguments, same bytes.
    """
    run = _created(where, where.name)
    cuts = np.linspace(0, rollouts, commits + 1).astype(int).tolist()
    rng = np.random.default_rng(seed)
    delivered = 0
    for seq, (start, stop) in enumerate(pairwise(cuts), 1):
        delivered = add_commit(run, seq, range(start, stop), delivered, tokens, rng)
    return run


def add_commit(
    run: RunDir, seq: int, rollouts: range, delivered: int, tokens: int, rng: np.random.Generator
) -> int:
    """Adds these rollouts as one more commit and returns the number of groups delivered so far."""
    start, stop = rollouts.start, rollouts.stop
    tables = rollout_tables(np.arange(start, stop), tokens, rng)
    tables["groups"], delivered = _events(range(start // GROUP, stop // GROUP), delivered)
    tables["tasks"] = _tasks(range(-(-start // GROUP), -(-stop // GROUP)))
    write_commit(run, run.name, seq, tables)
    return delivered


def write_run(where: Path, groups: Iterable[pa.RecordBatch], run_id: str = "synthetic") -> Path:
    """A run in which these groups (`synthetic.group`) were kept and delivered in this order."""
    run, rest, delivered, seq = _created(where, run_id), iter(groups), 0, 0
    while batches := list(islice(rest, GROUPS_PER_PART)):
        events: list[dict[str, Any]] = []
        for batch in batches:
            members = len(np.unique(batch.column("rollout_id").to_numpy()))
            shared = {
                "group_id": batch.column("group_id")[0].as_py(),
                "kept": True,
                "reason": "informative",
                "num_members": members,
                "num_valid": members,
                "min_version": 0,
                "mean_reward": float(batch.column("reward").to_numpy().mean()),
                "event_at": NOW,
            }
            for i, (event, place) in enumerate((("decided", -1), ("delivered", delivered))):
                numbers = {"event_seq": 2 * delivered + i, "delivery_seq": place}
                events.append({**shared, **numbers, "event": event})
            delivered += 1
        tables = {
            "sequences": pa.Table.from_batches(batches),
            "rollouts": pa.concat_tables(map(_rollouts_of, batches)),
            "groups": pa.Table.from_pylist(events, TABLES["groups"]),
        }
        seq += 1
        write_commit(run, run_id, seq, tables)
    return where


def _rollouts_of(batch: pa.RecordBatch) -> pa.Table:
    """The rollouts of a group, from its sequences."""
    ids, first, inverse = np.unique(
        batch.column("rollout_id").to_numpy(), return_index=True, return_inverse=True
    )
    tokens, sampled = (
        np.bincount(inverse, np.diff(batch.column(name).offsets.to_numpy())).astype(int)
        for name in ("token_ids", "logprobs")
    )
    shared = ("group_id", "sample_index", "reward")
    columns = {
        "rollout_id": ids,
        **{name: batch.column(name).to_numpy()[first] for name in shared},
        "attempt": np.ones(len(ids), np.int32),
        "valid": np.ones(len(ids), bool),
        "status": [RolloutState.COMPLETED.value] * len(ids),
        "num_sequences": np.bincount(inverse),
        "num_tokens": tokens,
        "num_sampled": sampled,
        "num_trained": sampled,
        "committed_at": [NOW] * len(ids),
    }
    return _table("rollouts", columns)


def _created(where: Path, run_id: str) -> RunDir:
    run = RunDir(where)
    run.create(empties(run_id).items(), _write)
    manifest = {"run_id": run_id, "schema_version": SCHEMA_VERSION, "config": {"run_id": run_id}}
    _write(run.fs, run.path(MANIFEST), orjson.dumps(manifest))
    return run


def _write(fs: Any, path: str, content: Any) -> None:
    Path(path).write_bytes(memoryview(content))


def write_commit(run: RunDir, run_id: str, seq: int, tables: dict[str, pa.Table]) -> None:
    """Publish these rows as one commit more."""
    part, files = f"part-{seq:016x}", []
    for name, rows in tables.items():
        if rows.num_rows:
            content = encode(name, rows, run_id, part)
            files.append(part_file(name, part, rows, content))
            _write(run.fs, run.path(files[-1].path), content)
    commit = Commit(commit_seq=seq, part=part, files=tuple(files), run_id=run_id)
    _write(run.fs, run.commit_path(seq), commit.dumps())


def _events(groups: range, delivered: int) -> tuple[pa.Table, int]:
    """Returns two events a group (decided, delivered if informative); one in three is dropped."""
    rows: list[dict[str, Any]] = []
    for group in groups:
        kept = group % 3 != 0
        base = {
            "group_id": group,
            "kept": kept,
            "num_members": GROUP,
            "num_valid": GROUP,
            "min_version": group // STEP,
            "mean_reward": 0.25,
            "event_at": NOW,
        }
        reason = "informative" if kept else "all_equal"
        decided = {"event_seq": 2 * group, "event": "decided", "reason": reason}
        rows.append({**base, **decided, "delivery_seq": -1})
        if kept:
            delivery = {"event_seq": 2 * group + 1, "event": "delivered", "reason": ""}
            rows.append({**base, **delivery, "delivery_seq": delivered})
            delivered += 1
    return pa.Table.from_pylist(rows, TABLES["groups"]), delivered


def _tasks(groups: range) -> pa.Table:
    rows = [
        {
            "group_id": group,
            "task_id": f"task-{group % 5000}",
            "data_source": "math" if group % 2 else "code",
            "env": "math" if group % 2 else "code",
            "n": GROUP,
            "task": "{}",
            "sampling": "{}",
            "extra": "{}",
        }
        for group in groups
    ]
    return pa.Table.from_pylist(rows, TABLES["tasks"])


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
            "weight": np.ones(count),
            "parent": np.full(count, -1),
            "lineage": [Lineage.MAIN.value] * count,
            "token_ids": list_column("token_ids", token_ids, length),
            "logprobs": list_column("logprobs", logprobs.astype(np.float32), sampled),
            "span_end": list_column("span_end", ends, two),
            "span_kind": list_column("span_kind", np.tile([0, 1], count), two),
            "span_version": list_column("span_version", versions, two),
            "span_turn": list_column("span_turn", np.zeros(2 * count, int), two),
            "span_temperature": list_column("span_temperature", np.ones(2 * count), two),
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
            "failure_code": ["max_turns" if i % 50 == 0 else "" for i in ids],
            "stop_reason": ["max_turns" if i % 50 == 0 else "done" for i in ids],
            "reward": reward,
            "num_sequences": np.ones(count, np.int32),
            "num_turns": np.full(count, TURNS, np.int32),
            "num_tokens": length,
            "num_sampled": length // 2,
            "num_trained": length // 2,
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
    count, roles = len(ids), ["user", "assistant", "tool", "assistant"]
    return _table(
        "messages",
        {
            "rollout_id": np.repeat(ids, len(roles)),
            "attempt": np.ones(count * len(roles), np.int32),
            "index": np.tile(np.arange(len(roles)), count),
            "role": roles * count,
            "content": [f"{role} says {i} of many words" for i in ids for role in roles],
            "tool_calls": ["[]"] * (count * len(roles)),
            "turn": np.tile([0, 0, 0, 1], count),
        },
    )
