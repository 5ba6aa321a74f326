"""The objects and checks of `kill_script.py`; its process imports this once it has children or none
to come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa

from prorl.analysis.annotations import annotate
from prorl.control import Rows
from prorl.envs import get_env
from prorl.sandbox.spawn import spawned
from prorl.schema import APPENDED, TRAINED
from prorl.schema.rows import row_hashes
from prorl.stages.rescore import rescore
from prorl.storage.files.appended import MANY, AppendedTable, add_scores, read_scores
from prorl.storage.files.durable import WriteDurably
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.storage.write.convert import tables, task_rows
from prorl.storage.write.writer import RunWriter
from prorl.types import AttemptKey, FailureCode
from tests.edge_rows import only
from tests.storage.compactable_run import content, expected_files, files, run_of_many_parts
from tests.storage.control_log import FileLog
from tests.storage.run_directories import add_commit, event, new_run
from tests.storage.scored_rows import scored, task_row, terminal

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
    zero = {
        f.name: "" if pa.types.is_string(f.type) else None if f.nullable else 0 for f in TRAINED
    }
    row = {**zero, "sequence_id": step * 1024, "checkpoint": f"c{step}"}
    return pa.Table.from_pylist([row], schema=TRAINED)


def to_be_scored(root: Path) -> None:
    """Two groups with their tasks; the env takes any artifact."""
    run = new_run(root)
    by_table = tables(pa.concat_batches([scored(i, n=2) for i in range(4)]))
    rows = {name: pa.Table.from_batches([batch]) for name, batch in by_table.items()}
    task = orjson.dumps({"task_id": "t", "env": "noop", "prompt": "x"}).decode()
    rows["tasks"] = task_rows(task_row(i, "noop", task) for i in (0, 1))
    add_commit(run, rows)


ROLLOUTS = 6


def to_be_written(root: Path) -> None:
    """Six rollouts on their way, one ended without a trajectory, one group event."""
    new_run(root)
    (root / "acked").mkdir()
    log = FileLog(root / "log.json")
    log.accept(*((i, 1) for i in range(ROLLOUTS)))
    log.end(terminal(7))
    log.say(Rows(events=(event(0, 0, "decided"),)))


def written(root: Path, step: Callable[[str], None], write: WriteDurably) -> None:
    """A writer's life, to which everything that was not acked comes again."""
    log, acked = FileLog(root / "log.json", hook=step), root / "acked"

    def add(writer: RunWriter, rollout_id: int) -> None:
        code = FailureCode.BACKEND_PROTOCOL if rollout_id == 5 else FailureCode.NONE
        row, key = only(scored(rollout_id, code=code)), AttemptKey("demo", rollout_id, 1)
        writer.add(key, row, (acked / str(rollout_id)).touch)

    async def live() -> None:
        directory = RunDir(root / "demo")
        writer = RunWriter(directory, "demo", log, flush_s=0.0, flush_bytes=1 << 20, write=write)
        await writer.open(log.news())
        log.tell(writer)
        task = asyncio.create_task(writer.run())
        waiting = [i for i in range(ROLLOUTS) if not (acked / str(i)).exists()]
        for rollout_id in waiting[:3]:
            add(writer, rollout_id)
        await asyncio.sleep(0.05)
        for rollout_id in waiting[3:]:
            add(writer, rollout_id)
        writer.drain()
        await task

    asyncio.run(live())


def check_written(_: Path, roots: Roots) -> None:
    """Everything is stored once and acked, nothing is left over."""
    for _, root in roots:
        check_verified(RunDir(root / "demo"))
        stored = StoredRun(root / "demo")
        ids = stored.read("rollouts").column("rollout_id").to_pylist()
        assert sorted(ids) == [0, 1, 2, 3, 4, 7]
        assert stored.partial().column("rollout_id").to_pylist() == [5]
        assert stored.read("groups").num_rows == 1
        assert {path.name for path in (root / "acked").iterdir()} == set(map(str, range(ROLLOUTS)))
        log = FileLog(root / "log.json")
        assert (log.news().unpublished, log.state["outbox"]) == ((), [])


MAKE: dict[str, Callable[[Path], object]] = {
    "write": to_be_written,
    "compact": with_appended,
    "score": to_be_scored,
}


def rescored(root: Path, step: Callable[[str], None], write: WriteDurably) -> None:
    """A scoring of a run, unless its name is given."""
    stored = StoredRun(root / "demo")
    if AppendedTable(stored.directory, "scores").all_keys():
        return

    def counted(name: str) -> Any:
        step("grading")
        return get_env(name)

    async def graded() -> Any:
        async with spawned("local") as (host, _):
            return await rescore(stored, "again", host, counted, concurrency=1)

    rows = asyncio.run(graded())
    step("graded")
    add_scores(stored.directory, "again", rows, write)


def appended(run: RunDir) -> dict[str, list[str]]:
    """Hashes of all rows that were appended, in order."""
    digests = {}
    for table in APPENDED:
        rows = AppendedTable(run, table).read().combine_chunks()
        digests[table] = [digest for batch in rows.to_batches() for digest in row_hashes(batch)]
    return digests


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


def check_scored(original: Path, roots: Roots) -> None:
    """Nothing that was stored has changed; a scoring is there whole, or not at all."""
    before = {name: (original / "demo" / name).read_bytes() for name in all_files(original)}
    for dead, done in roots:
        for where in (dead, done):
            for name, had in before.items():
                assert (where / "demo" / name).read_bytes() == had, (where, name)
        keys = AppendedTable(RunDir(dead / "demo"), "scores").all_keys()
        assert keys in ([], ["again"]), dead
        run = RunDir(done / "demo")
        assert read_scores(run, "again").column("reward").null_count == 0, done
        assert set(all_files(done)) == {*before, "scores/0000000001.parquet"}, done
        check_verified(run)


def all_files(root: Path) -> list[str]:
    """Returns the files of the run, by name."""
    paths = (root / "demo").rglob("*")
    return [str(path.relative_to(root / "demo")) for path in paths if path.is_file()]


CHECK: dict[str, Callable[[Path, Roots], None]] = {
    "write": check_written,
    "compact": check_compacted,
    "score": check_scored,
}
"""What holds afterwards. Raises AssertionError."""
