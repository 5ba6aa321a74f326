"""Run directories as a long run leaves them, made in minutes.

They hold rows of the store's own tables, cut into many commits by the store's own encoder. Nothing
is fsynced.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa

from prorl.bench.stored_tables import GROUP, NOW, STEP, rollout_tables
from prorl.schema import TABLES
from prorl.schema_fields import SCHEMA_VERSION
from prorl.storage.commit_files import Commit
from prorl.storage.layout import MANIFEST, RunDir
from prorl.storage.parts import empties, encode, part_file


def make_run(where: Path, rollouts: int, commits: int, tokens: int = 64, seed: int = 0) -> RunDir:
    """A run of `rollouts` in groups of 8 with about `tokens` tokens each, in `commits` parts.

    Every group is decided, informative ones are delivered in order. Same arguments, same bytes.
    """
    run = RunDir(where)
    run.create(empties(run.name).items(), _write)
    manifest = {"run_id": run.name, "schema_version": SCHEMA_VERSION, "config": {}}
    Path(run.path(MANIFEST)).write_bytes(orjson.dumps(manifest))
    cuts = np.linspace(0, rollouts, commits + 1).astype(int).tolist()
    rng = np.random.default_rng(seed)
    delivered = 0
    for seq, (start, stop) in enumerate(pairwise(cuts), 1):
        delivered = add_commit(run, seq, range(start, stop), delivered, tokens, rng)
    return run


def add_commit(
    run: RunDir, seq: int, rollouts: range, delivered: int, tokens: int, rng: np.random.Generator
) -> int:
    """These rollouts as one more commit; how many groups are delivered now."""
    start, stop = rollouts.start, rollouts.stop
    tables = rollout_tables(np.arange(start, stop), tokens, rng)
    tables["groups"], delivered = _events(range(start // GROUP, stop // GROUP), delivered)
    tables["tasks"] = _tasks(range(-(-start // GROUP), -(-stop // GROUP)))
    _commit(run, seq, tables)
    return delivered


def _write(fs: Any, path: str, content: Any) -> None:
    Path(path).write_bytes(memoryview(content))


def _commit(run: RunDir, seq: int, tables: dict[str, pa.Table]) -> None:
    part, files = f"part-{seq:016x}", []
    for name, rows in tables.items():
        if rows.num_rows:
            content = encode(name, rows, run.name, part)
            files.append(part_file(name, part, rows, content))
            _write(run.fs, run.path(files[-1].path), content)
    commit = Commit(commit_seq=seq, part=part, files=tuple(files), run_id=run.name)
    _write(run.fs, run.commit_path(seq), commit.dumps())


def _events(groups: range, delivered: int) -> tuple[pa.Table, int]:
    """Decided, and delivered if informative: two events a group, one in three is dropped."""
    rows = list(_event_rows(groups, delivered))
    delivered += sum(row["event"] == "delivered" for row in rows)
    return pa.Table.from_pylist(rows, TABLES["groups"]), delivered


def _event_rows(groups: range, delivered: int) -> Iterator[dict[str, Any]]:
    for group in groups:
        kept = group % 3 != 0
        base = {
            "group_id": group,
            "kept": kept,
            "num_members": GROUP,
            "num_valid": GROUP,
            "min_version": group // STEP,
            "mean_reward": 0.25,
            "at": NOW,
        }
        reason = "informative" if kept else "all_equal"
        decided = {"event_seq": 2 * group, "event": "decided", "reason": reason}
        yield {**base, **decided, "delivery_seq": -1}
        if kept:
            given = {"event_seq": 2 * group + 1, "event": "delivered", "reason": ""}
            yield {**base, **given, "delivery_seq": delivered}
            delivered += 1


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
