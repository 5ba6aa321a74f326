"""Run directories of synthetic groups, which replay, SQL and verify take for real ones.

Their groups were all kept and delivered in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from prorl.schema import GROUPS, ROLLOUTS
from prorl.schema_fields import SCHEMA_VERSION
from prorl.storage.commit_files import Commit
from prorl.storage.durable import write_durably
from prorl.storage.layout import MANIFEST, RunDir
from prorl.storage.parts import empties, encode, part_file
from prorl.types import RolloutState

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
