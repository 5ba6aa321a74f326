"""What `kill_script.py` makes, asks for and checks; its process imports this once it has children
or none to come.
"""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from prorl.control import TaskRow
from prorl.envs import get_env
from prorl.rows import row_hashes
from prorl.sandbox.spawn import spawned
from prorl.schema import APPENDED, TRAINED
from prorl.service.log_schema import LOG_VERSION
from prorl.stages.rescore import rescore
from prorl.storage.annotations import annotate
from prorl.storage.appended import MANY, AppendedTable
from prorl.storage.catalog import StoredRun
from prorl.storage.convert import tables, task_rows
from prorl.storage.durable import WriteDurably
from prorl.storage.layout import RunDir
from prorl.storage.scores import SCORES, add_scores, read_scores, score_names
from prorl.storage.upgrade import nothing
from prorl.storage.verify import verify
from tests.storage.compacting import content, expected_files, files, run_of_many_parts
from tests.storage.directory import add_commit, new_run
from tests.storage.older import old_content, old_root
from tests.storage.rows import scored

Roots = Iterable[tuple[Path, Path]]
"""(as it was when it was killed, as a second one left it)."""


def with_appended(root: Path) -> None:
    """Many parts, more annotations than are left unmerged, a few rows of lineage."""
    run = run_of_many_parts(root)
    stored = StoredRun(run.where)
    for i in range(MANY + 2):
        annotate(stored, [{"rollout_id": i % 24, "label": f"l{i}"}], author="me")
    lineage = AppendedTable(run, "trained")
    for step in range(3):
        lineage.append(trained(step), f"checkpoint-{step}")


def trained(step: int) -> Any:
    """One sequence of one checkpoint."""
    rows = {"sequence_id": pa.array([step * 1024]), "checkpoint": pa.array([f"c{step}"])}
    return pa.Table.from_arrays(
        [rows.get(f.name, nothing(f, 1)).cast(f.type) for f in TRAINED], schema=TRAINED
    )


def to_be_scored(root: Path) -> None:
    """Two groups with their tasks; the env takes any artefact."""
    run = new_run(root)
    found = tables(pa.concat_batches([scored(i, n=2) for i in range(4)]))
    rows = {name: pa.Table.from_batches([batch]) for name, batch in found.items()}
    task = orjson.dumps({"task_id": "t", "env": "noop", "prompt": "x"}).decode()
    named = {"task_id": "t", "data_source": "", "env": "noop"}
    rows["tasks"] = task_rows(
        TaskRow(**named, group_id=i, n=2, task=task, sampling="{}", extra="{}") for i in (0, 1)
    )
    add_commit(run, rows)


MAKE: dict[str, Callable[[Path], object]] = {
    "compact": with_appended,
    "upgrade": old_root,
    "score": to_be_scored,
}


def rescored(root: Path, step: Callable[[str], None], write: WriteDurably) -> None:
    """A scoring of a run, unless its name is given."""
    stored = StoredRun(root / "demo")
    if "again" in score_names(stored.directory):
        return

    def counted(name: str) -> Any:
        step("grading")
        return get_env(name)

    async def graded() -> Any:
        async with spawned("local") as (host, _):
            return await rescore(stored, "again", host, counted, concurrency=1)

    rows = asyncio.run(graded())
    step("graded")
    add_scores(stored.directory, "again", rows, {"by": "test"}, write)


def appended(run: RunDir) -> dict[str, list[str]]:
    """Hashes of all rows that were appended, in order."""
    found = {}
    for table in APPENDED:
        rows = AppendedTable(run, table).read().combine_chunks()
        found[table] = [digest for batch in rows.to_batches() for digest in row_hashes(batch)]
    return found


def check_compacted(original: Path, roots: Roots) -> None:
    """The same rows when it was killed, and the same rows and no other file in the end."""
    before = RunDir(original / "demo")
    rows, more = content(before), appended(before)
    for dead, done in roots:
        assert content(RunDir(dead / "demo")) == rows, dead
        assert appended(RunDir(dead / "demo")) == more, dead
        run = RunDir(done / "demo")
        assert (content(run), appended(run)) == (rows, more), done
        pieces = [f"{t}/{p}" for t in APPENDED for p in AppendedTable(run, t).pieces()]
        assert files(run) == sorted([*expected_files(run), *pieces]), done
        check_verified(run)


def check_verified(run: RunDir) -> None:
    """Whole by its own words."""
    findings = [str(finding) for finding in verify(run.root)]
    assert findings == [], findings


def check_upgraded(original: Path, roots: Roots) -> None:
    """The same, and a log that is of before or of today, and of today in the end."""
    rows = old_content(RunDir(original / "r"))
    for dead, done in roots:
        assert old_content(RunDir(dead / "r")) == rows, dead
        assert log_of(dead) in (2, LOG_VERSION), dead
        run = RunDir(done / "r")
        assert old_content(run) == rows, done
        assert log_of(done) == LOG_VERSION, done
        assert files(run) == sorted([*expected_files(run), "partial/3-9.parquet"]), done
        assert [path.name for path in Path(run.root).glob(".*")] == [], done
        check_verified(run)
        assert StoredRun(run.root).partial().num_rows == 1


def log_of(root: Path) -> int:
    """The version that a log says it has; each statement of its shape works."""
    # A copy: opening the log would finish what the killed one began.
    copy = root.with_name(f"{root.name}-log")
    copy.mkdir()
    for path in root.glob("control.db*"):
        shutil.copy(path, copy)
    with sqlite3.connect(copy / "control.db") as log:
        ((version,),) = log.execute("SELECT value FROM meta WHERE key = 'version'").fetchall()
        if int(version) == LOG_VERSION:
            log.execute("SELECT counters FROM runs").fetchall()
        assert log.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
    log.close()
    return int(version)


def check_scored(original: Path, roots: Roots) -> None:
    """Nothing that was stored has changed; a scoring is there whole, or not at all."""
    before = {name: (original / "demo" / name).read_bytes() for name in all_files(original)}
    for dead, done in roots:
        for where in (dead, done):
            for name, had in before.items():
                assert (where / "demo" / name).read_bytes() == had, (where, name)
        found = score_names(RunDir(dead / "demo"))
        assert found in ([], ["again"]), dead
        run = RunDir(done / "demo")
        assert read_scores(run, "again").column("reward").null_count == 0, done
        assert set(all_files(done)) == {*before, f"{SCORES}/again.parquet"}, done
        check_verified(run)


def all_files(root: Path) -> list[str]:
    """Of the run, by name."""
    found = (root / "demo").rglob("*")
    return [str(path.relative_to(root / "demo")) for path in found if path.is_file()]


CHECK: dict[str, Callable[[Path, Roots], None]] = {
    "compact": check_compacted,
    "upgrade": check_upgraded,
    "score": check_scored,
}
"""What holds afterwards. Raises AssertionError."""
