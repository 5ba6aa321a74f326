"""The writer: every row in exactly one part or in `partial/`, acked after it is durable, whatever
dies on the way.
"""

from __future__ import annotations

import asyncio
import errno
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from prorl.control import Kind, Rows
from prorl.errors import ConflictError, StorageError
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.read.catalog import StoredRun, query
from prorl.storage.read.verify import verify
from prorl.storage.write import writer as writer_module
from prorl.storage.write.writer import RunWriter, Written
from prorl.types import AttemptKey, FailureCode, Sequence
from tests.edge_rows import only
from tests.storage.control_log import FileLog
from tests.storage.run_directories import event, new_run
from tests.storage.scored_rows import scored, sequence, task_row, terminal
from tests.waiting import until


class Bench:
    """A writer over a run directory and a log, and what was acked."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        self.log = FileLog(tmp_path / "log.json")
        self.directory = new_run(tmp_path)
        self.acked: list[AttemptKey] = []
        self.written: list[Written] = []
        settings = {
            "flush_s": 0.01,
            "flush_bytes": 1 << 20,
            "on_commit": self.written.append,
            **options,
        }
        self.writer = RunWriter(self.directory, "demo", self.log, **settings)

    def add(self, row: pa.RecordBatch) -> None:
        key = AttemptKey(
            *(row.column(name)[0].as_py() for name in ("run_id", "rollout_id", "attempt"))
        )
        self.writer.add(key, only(row), lambda: self.acked.append(key))

    @property
    def acked_rollouts(self) -> list[int]:
        return sorted(key.rollout_id for key in self.acked)

    def sql(self, text: str) -> list[Any]:
        return list(query(self.directory.root, text).to_pylist())


@asynccontextmanager
async def running(bench: Bench) -> AsyncIterator[Bench]:
    """Open, run, and at the end drain."""
    await bench.writer.open(bench.log.news())
    bench.log.tell(bench.writer)
    task = asyncio.create_task(bench.writer.run())
    try:
        yield bench
    finally:
        bench.writer.drain()
        await task


async def test_rows_become_parts_and_are_acked(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log.accept(*((i, 1) for i in range(8)))
    async with running(bench):
        for i in (5, 1, 7, 0, 3, 2, 6, 4):
            bench.add(scored(i))
    assert bench.acked_rollouts == list(range(8))
    assert verify(bench.directory.root) == []
    assert bench.sql(
        "select count(*) as n, sum(num_tokens)::int as t from rollouts where valid"
    ) == [{"n": 8, "t": 160}]
    assert StoredRun(bench.directory.root).read("sequences").column(
        "rollout_id"
    ).to_pylist() == list(range(8))
    assert bench.log.requests == [Kind.RESERVE, Kind.COMMIT, Kind.PUBLISHED]


async def test_rows_that_wait_together_are_a_single_part_and_the_timer_flushes(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path, flush_s=0.05)
    bench.log.accept(*((i, 1) for i in range(8)))
    async with running(bench):
        for i in range(4):
            bench.add(scored(i))
        await until(lambda: len(bench.acked) == 4)
        for i in range(4, 8):
            bench.add(scored(i))
        await until(lambda: len(bench.acked) == 8)
    assert [commit.commit_seq for commit in bench.directory.commits()] == [1, 2]


async def test_bytes_and_a_whole_group_flush_before_the_timer(tmp_path: Path) -> None:
    by_bytes = Bench(tmp_path / "bytes", flush_s=60, flush_bytes=1000)
    by_group = Bench(tmp_path / "group", flush_s=60, group_size=4, eager=True)
    for bench, count in ((by_bytes, 1), (by_group, 4)):
        bench.log.accept(*((i, 1) for i in range(4)))
        async with running(bench):
            for i in range(count):
                bench.add(scored(i))
            await until(lambda bench=bench, count=count: len(bench.acked) == count)  # type: ignore[misc]


async def test_groups_that_end_soon_after_each_other_share_a_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has somebody who waits for it; one that comes after a pause goes at once."""
    monkeypatch.setattr(writer_module, "SHARED_S", 2.0)
    bench = Bench(tmp_path, flush_s=60, group_size=1, eager=True)
    bench.log.accept(*((i, 1) for i in range(3)))
    async with running(bench):
        bench.add(scored(0))
        await until(lambda: len(bench.acked) == 1)
        for i in (1, 2):
            bench.add(scored(i))
            await asyncio.sleep(0.3)
        await until(lambda: len(bench.acked) == 3)
        assert len(bench.written) == 2
    assert verify(bench.directory.root) == []


async def test_rows_that_may_not_be_committed_go_to_partial(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log.accept(*((i, 2) for i in range(5)))
    bad = sequence(2)
    bad = Sequence(
        **{name: getattr(bad, name) for name in Sequence.__slots__}
        | {"logprobs_C": np.ones_like(bad.logprobs_C)}
    )
    async with running(bench):
        bench.add(scored(0, attempt=2))
        bench.add(scored(1, attempt=2, code=FailureCode.BACKEND_PROTOCOL, reward=None))
        bench.add(scored(2, attempt=2, sequences=(bad,)))
        bench.add(scored(3, attempt=1))
        bench.add(scored(4, attempt=2, eval_code=FailureCode.EVAL_FAILED))
    assert bench.acked_rollouts == [0, 1, 2, 3, 4]
    assert bench.log.events == [(Kind.FAILED, AttemptKey("demo", 2, 2), "invalid_row")]
    assert bench.sql("select rollout_id from rollouts") == [{"rollout_id": 0}]
    partial = StoredRun(bench.directory.root).partial().to_pylist()
    assert sorted((row["rollout_id"], row["attempt"]) for row in partial) == [
        (1, 2),
        (2, 2),
        (3, 1),
        (4, 2),
    ]
    assert len(partial[0]["sequences"][0]["token_ids"]) == 20


async def test_a_cut_file_delays_no_commit_and_stays_a_single_file(tmp_path: Path) -> None:
    """A target that is reached cuts hundreds at once: each was a file, written before the part."""
    paths: list[str] = []

    def noted(fs: Any, path: str, content: Any) -> None:
        paths.append(path)
        write_durably(fs, path, content)

    bench = Bench(tmp_path, write=noted)
    bench.log.accept(*((i, 1) for i in range(2)))
    async with running(bench):
        for i in range(20):
            bench.add(scored(i))
    assert bench.acked_rollouts == list(range(20))
    (partial,) = (at for at, path in enumerate(paths) if "/partial/" in path)
    (commit,) = (at for at, path in enumerate(paths) if "/commits/" in path)
    assert commit < partial
    stored = StoredRun(bench.directory.root)
    assert sorted(stored.partial().column("rollout_id").to_pylist()) == list(range(2, 20))
    again = Path(paths[partial]).with_name("cut-again.parquet")
    again.write_bytes(Path(paths[partial]).read_bytes())
    assert StoredRun(bench.directory.root).partial().num_rows == 18, "sent twice, read once"


async def test_failures_of_the_policy_are_committed(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log.accept((0, 1), (1, 1))
    async with running(bench):
        bench.add(scored(0, code=FailureCode.DEADLINE, reward=0.5))
        bench.add(scored(1, code=FailureCode.SANDBOX_BROKEN, reward=None))
    assert bench.sql(
        "select failure_class, failure_code, reward, valid from rollouts order by rollout_id"
    ) == [
        {"failure_class": "policy", "failure_code": "deadline", "reward": 0.5, "valid": True},
        {"failure_class": "policy", "failure_code": "sandbox_broken", "reward": 0.0, "valid": True},
    ]


async def test_a_row_that_comes_again_is_stored_once_and_acked_each_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log.accept((0, 1))
    async with running(bench):
        bench.add(scored(0))
        bench.add(scored(0))
        await until(lambda: len(bench.acked) == 2)
        bench.add(scored(0))
    assert bench.acked_rollouts == [0, 0, 0]
    assert len(bench.written) == 1
    assert verify(bench.directory.root) == []


async def test_an_attempt_superseded_between_reserve_and_commit_is_dropped(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log.accept((0, 1), (1, 1))

    def supersede(fs: Any, path: str, content: Any) -> None:
        if "sequences/part" in path and bench.log.state["attempts"]["1"] == 1:
            bench.log.accept((1, 2))
        write_durably(fs, path, content)

    bench.writer._write_file = supersede
    async with running(bench):
        bench.add(scored(0))
        bench.add(scored(1))
    assert bench.acked_rollouts == [0, 1]
    assert bench.sql("select rollout_id from rollouts") == [{"rollout_id": 0}]
    assert verify(bench.directory.root) == []


async def test_terminals_tasks_and_events_are_stored_with_the_same_commit(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.log.accept((0, 1))
    bench.log.end(terminal(1), terminal(2, status="cancelled", code="redundant"))
    events = event(0, 0, "decided"), event(1, 0, "delivered", delivery_seq=0)
    bench.log.say(Rows(tasks=(task_row(),), events=events))
    async with running(bench):
        bench.add(scored(0))
        outbox = list(bench.log.state["outbox"])
        bench.log.tell(bench.writer)
        await until(lambda: bool(bench.acked))
        bench.log.state["outbox"] = outbox
        bench.log.tell(bench.writer)
        bench.log.state["outbox"] = []
    assert len(bench.written) == 1
    assert bench.sql("select status, count(*) as n from rollouts group by 1 order by 1") == [
        {"status": "cancelled", "n": 1},
        {"status": "completed", "n": 1},
        {"status": "failed", "n": 1},
    ]
    assert bench.sql("select event, delivery_seq from groups order by event_seq") == [
        {"event": "decided", "delivery_seq": -1},
        {"event": "delivered", "delivery_seq": 0},
    ]
    assert bench.sql("select count(*) as n from tasks") == [{"n": 1}]
    assert bench.log.state["outbox"] == []


async def test_a_task_repeated_while_it_is_written_is_stored_once(
    tmp_path: Path,
) -> None:
    """A gateway that began anew tells it in one row of the outbox together with later ones."""
    loop, paths = asyncio.get_running_loop(), list[str]()

    def repeat_task(fs: Any, path: str, content: Any) -> None:
        if "/part-" in path and not paths:
            both = Rows(tasks=(task_row(), task_row(group_id=1)))
            loop.call_soon_threadsafe(bench.writer.add_rows, both)
            paths.append(path)
        write_durably(fs, path, content)

    bench = Bench(tmp_path, write=repeat_task)
    bench.log.accept((0, 1), (4, 1))
    bench.log.say(Rows(tasks=(task_row(),)))
    async with running(bench):
        bench.add(scored(0))
        await until(lambda: bool(bench.acked))
        bench.add(scored(4))
    assert paths
    assert len(bench.written) == 2
    assert bench.sql("select group_id, count(*) as n from tasks group by 1 order by 1") == [
        {"group_id": 0, "n": 1},
        {"group_id": 1, "n": 1},
    ]


async def test_a_full_disk_holds_acks_back_until_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "FULL_DISK_WAIT_S", 0.01)
    full = 5

    def fails(fs: Any, path: str, content: Any) -> None:
        nonlocal full
        if "part-" in path and full:
            full -= 1
            raise StorageError(errno.ENOSPC, "no space")
        write_durably(fs, path, content)

    bench = Bench(tmp_path, write=fails)
    bench.log.accept((0, 1))
    async with running(bench):
        bench.add(scored(0))
        await until(lambda: full == 2)
        assert bench.acked == []
    assert bench.acked_rollouts == [0]
    assert verify(bench.directory.root) == []


async def test_any_other_write_error_ends_the_writer_without_an_ack(tmp_path: Path) -> None:
    def fails(fs: Any, path: str, content: Any) -> None:
        if "part-" in path:
            raise StorageError(errno.EIO, "input/output error")
        write_durably(fs, path, content)

    bench = Bench(tmp_path, write=fails)
    bench.log.accept((0, 1))
    await bench.writer.open(bench.log.news())
    bench.add(scored(0))
    with pytest.raises(StorageError):
        await bench.writer.run()
    assert bench.acked == []
    assert Kind.COMMIT not in bench.log.requests


async def test_a_new_writer_publishes_what_is_committed_and_removes_what_is_not(
    tmp_path: Path,
) -> None:
    bench = Bench(tmp_path)
    bench.log.accept((0, 1), (1, 1))
    async with running(bench):
        bench.add(scored(0))
    Path(bench.directory.commit_path(1)).unlink()
    bench.log.unpublish(1)
    (tmp_path / "demo" / "turns" / "part-dead.parquet").write_bytes(b"half")
    (tmp_path / "demo" / "turns" / ".tmp-1-part.parquet").write_bytes(b"ha")
    (tmp_path / "demo" / "turns" / "mine.txt").write_bytes(b"not ours")
    again = Bench(tmp_path)
    again.directory = RunDir(tmp_path / "demo")
    async with running(again):
        pass
    assert [commit.commit_seq for commit in again.directory.commits()] == [1]
    assert sorted(
        path.name
        for path in (tmp_path / "demo" / "turns").iterdir()
        if not path.name.startswith("part-")
    ) == [
        "empty.parquet",
        "mine.txt",
    ]
    assert again.log.news().unpublished == ()
    (tmp_path / "demo" / "turns" / "mine.txt").unlink()
    assert verify(again.directory.root) == []


async def test_nothing_that_a_commit_on_disk_names_is_removed(tmp_path: Path) -> None:
    """Whatever the log says: an empty one is a log that was lost."""
    bench = Bench(tmp_path)
    bench.log.accept((0, 1))
    async with running(bench):
        bench.add(scored(0))
    before = sorted(path for path in (tmp_path / "demo").rglob("*"))
    assert bench.directory.sweep(()) == []
    lost = FileLog(tmp_path / "lost.json")
    writer = RunWriter(bench.directory, "demo", lost, flush_s=0.01, flush_bytes=1 << 20)
    with pytest.raises(ConflictError, match="the control log knows 0 commits"):
        await writer.open(lost.news())
    assert sorted(path for path in (tmp_path / "demo").rglob("*")) == before


@pytest.mark.parametrize(
    ("first", "stride"),
    [(3, 17), pytest.param(1, 1, marks=pytest.mark.faults)],
    ids=["some-steps", "every-step"],
)
def test_sigkill_at_every_step_loses_nothing_and_stores_nothing_twice(
    tmp_path: Path, first: int, stride: int
) -> None:
    """A real writer process is killed before or after each publish and each request; the next one
    finishes.
    """
    command = [sys.executable, "-m", "tests.storage.kill_script", "write", str(tmp_path)]
    done = subprocess.run(
        [*command, str(first), str(stride)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.split()[-2]) >= 20
