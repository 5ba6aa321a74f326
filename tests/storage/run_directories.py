"""Run directories for tests, written with the store's own functions but without a service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import orjson
import pyarrow as pa

from prorl.control import GroupEventRow, Terminal
from prorl.schema.fields import SCHEMA_VERSION
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import MANIFEST, Commit, RunDir
from prorl.storage.files.parts import empties, encode, part_file
from prorl.storage.write.convert import event_rows, tables, terminal_rows


def new_run(root: Path, run_id: str = "demo", **manifest: object) -> RunDir:
    """An empty run directory with its manifest."""
    run = RunDir(root / run_id)
    run.create(empties(run_id).items())
    (root / run_id / MANIFEST).write_bytes(
        orjson.dumps({"run_id": run_id, "schema_version": SCHEMA_VERSION, **manifest})
    )
    return run


def add_commit(run: RunDir, tables_: Mapping[str, pa.Table]) -> Commit:
    """Write one part and publish it; as the writer does, a table without rows has no file."""
    seq = max((commit.commit_seq for commit in run.commits()), default=0) + 1
    part, files = f"part-{seq:04d}", []
    for name, rows in tables_.items():
        if not rows.num_rows:
            continue
        content = encode(name, rows, run.name, part)
        files.append(part_file(name, part, rows, content))
        write_durably(run.fs, run.path(files[-1].path), content)
    commit = Commit(commit_seq=seq, part=part, files=tuple(files), run_id=run.name)
    write_durably(run.fs, run.commit_path(seq), commit.dumps())
    return commit


def add_rows(run: RunDir, rows: Sequence[pa.RecordBatch]) -> Commit:
    """A commit of SCORED rows."""
    by_table = tables(pa.concat_batches(list(rows)))
    return add_commit(
        run, {name: pa.Table.from_batches([batch]) for name, batch in by_table.items()}
    )


def add_terminals(run: RunDir, *terminals: Terminal) -> Commit:
    """A commit of rows of rollouts without a trajectory."""
    return add_commit(run, {"rollouts": terminal_rows(terminals)})


def event(
    event_seq: int, group_id: int, kind: str, *, kept: bool = True, delivery_seq: int = -1
) -> GroupEventRow:
    """A GROUPS row as the gateway sends it."""
    return GroupEventRow(
        event_seq=event_seq,
        group_id=group_id,
        event=kind,
        kept=kept,
        reason="",
        delivery_seq=delivery_seq,
        num_members=4,
        num_valid=4,
        min_version=0,
        mean_reward=0.5,
        event_at=1_767_323_045_000_000,
    )


def add_events(run: RunDir, *events: GroupEventRow) -> Commit:
    """A commit of group events."""
    return add_commit(run, {"groups": event_rows(events)})
