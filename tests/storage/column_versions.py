"""Stored runs as another prorl would have written them: with a column less, or one more."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from prorl.schema import TABLES
from prorl.storage.files.layout import EMPTY, RunDir
from prorl.storage.files.parts import COLUMNS_DIGEST, columns_digest

OLDER = {"rollouts": "logprob_sum"}
"""By table, an optional column that the golden root is written without."""

YOUNGER = "of_tomorrow"
"""A column that no prorl of today knows."""

Rewrite = Callable[[str, pa.Table], pa.Table]


def without_older(table: str, rows: pa.Table) -> pa.Table:
    return rows.drop_columns([OLDER[table]]) if table in OLDER else rows


def with_younger(table: str, rows: pa.Table) -> pa.Table:
    values = pa.array([f"{table} {i}" for i in range(rows.num_rows)], pa.utf8())
    return rows.append_column(YOUNGER, values)


def rewrite(run: RunDir, change: Rewrite) -> None:
    """Write each file of a run again, and the commits that name them."""
    for table in TABLES:
        path = Path(run.path(table, EMPTY))
        if path.exists():
            _rewrite(path, table, change)
    for commit in run.commits():
        files = []
        for file in commit.files:
            path = Path(run.path(file.path))
            content = _rewrite(path, file.table, change)
            digest = hashlib.sha256(content).hexdigest()
            files.append(replace(file, bytes=len(content), sha256=digest))
        path = Path(run.commit_path(commit.commit_seq, commit.first_seq, commit.again))
        path.write_bytes(replace(commit, files=tuple(files)).dumps())


def _rewrite(path: Path, table: str, change: Rewrite) -> bytes:
    rows = change(table, pq.read_table(path, partitioning=None))
    about = {
        **(rows.schema.metadata or {}),
        COLUMNS_DIGEST: columns_digest(rows.schema).encode(),
    }
    rows = rows.replace_schema_metadata(about)
    pq.write_table(rows, path, write_page_checksum=True, row_group_size=max(1, rows.num_rows))
    return path.read_bytes()
