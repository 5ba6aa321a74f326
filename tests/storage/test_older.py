"""Files from before a column was: read, queried, compacted, and whole afterwards."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from prorl.errors import SchemaError
from prorl.storage.files.commit_files import Commit
from prorl.storage.files.layout import RunDir
from prorl.storage.files.parts import conform, part_file
from prorl.storage.keep.compact import compact
from prorl.storage.read.catalog import StoredRun
from tests.storage.compacting import content, replayed, run_of_many_parts


def rewrite(run: RunDir, change: Callable[[str, pa.Table], pa.Table]) -> None:
    """Write every part again, changed, and the commits that name them."""
    for commit in run.commits():
        files = []
        for file in commit.files:
            path = Path(run.path(file.path))
            rows = change(file.table, pq.read_table(path))
            pq.write_table(rows, path, write_page_checksum=True)
            content = pa.py_buffer(path.read_bytes())
            files.append(part_file(file.table, path.stem, rows, content))
        older = Commit(
            commit_seq=commit.commit_seq, part=commit.part, files=tuple(files), run_id=run.name
        )
        Path(run.commit_path(commit.commit_seq)).write_bytes(older.dumps())


def test_a_column_that_cannot_be_made_up_is_missed(tmp_path: Path) -> None:
    rows = StoredRun(run_of_many_parts(tmp_path).root).read("rollouts")
    with pytest.raises(SchemaError, match="num_turns"):
        conform(rows.drop_columns(["num_turns"]), "rollouts", "demo")


def test_an_optional_column_of_a_later_prorl_is_left_alone(tmp_path: Path) -> None:
    """Of the same schema version: SQL and replay do without it, nothing here writes it away."""

    def later(table: str, rows: pa.Table) -> pa.Table:
        if table != "rollouts":
            return rows
        return rows.append_column("later", pa.array([7] * rows.num_rows, pa.int32()))

    run = run_of_many_parts(tmp_path)
    before, order = content(run), replayed(run)
    rewrite(run, later)
    assert (content(run), replayed(run)) == (before, order)
    with pytest.raises(SchemaError, match="a part of rollouts differs in later"):
        compact(run)
    assert (content(run), replayed(run)) == (before, order)
