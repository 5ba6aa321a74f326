"""A disk that says no for a while: the log waits, says so, and answers what is only asked."""

from __future__ import annotations

import asyncio
import resource
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from prorl.errors import DiskRefusedError, StorageError
from prorl.service import gateway
from prorl.service.log.log import ControlLog
from prorl.types import Json
from tests.service.running_gateway import GatewayHarness, group, running_gateway


@contextmanager
def refused(root: Path) -> Iterator[None]:
    """No file may grow beyond what the log's has: a write fails as it does over a quota."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (root / "control.db-wal").stat().st_size
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


async def offered(w: GatewayHarness, task: str) -> tuple[int, Json]:
    groups = [group(task).model_dump(mode="json")]
    return await w.http("POST", "/v1/runs/r/groups", {"groups": groups})


async def test_while_the_disk_says_no_nothing_is_accepted_and_status_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "DISK_AGAIN_S", 0.05)
    async with running_gateway(tmp_path) as w, w.worker("init") as init:
        await w.run()
        with refused(w.config.root):
            assert [(await offered(w, task))[0] for task in ("a", "b")] == [507, 507]
            _, status = await w.http("GET", "/v1/status")
            assert "nothing is accepted: control log" in status["warnings"][0]
            assert (await w.http("GET", "/v1/runs/r"))[0] == 200
            assert init.inlet is not None
            assert init.inlet.in_hand == 0, "a lease that is not in the log is not given"
        assert (await offered(w, "c"))[0] == 202
        await init.take(3)
        _, status = await w.http("GET", "/v1/status")
        assert status["warnings"] == []
    async with running_gateway(tmp_path) as w:
        assert sum((await w.view())["counts"].values()) == 3, "each once, after a restart too"


async def test_a_log_that_the_disk_refused_goes_on(tmp_path: Path) -> None:
    log = ControlLog(tmp_path / "control.db")
    insert = "INSERT INTO backends VALUES (?, 'ready', 0)"
    await log.write([(insert, [("before",)])])
    with refused(tmp_path), pytest.raises(DiskRefusedError):
        await log.write([(insert, [("refused" * 9000,)])])
    await log.write([(insert, [("after",)])])
    assert log.read("SELECT name FROM backends") == [("after",), ("before",)]
    with pytest.raises(StorageError):
        await log.write([("INSERT INTO nowhere VALUES (1)", [()])])
    with pytest.raises(StorageError):
        await log.write([(insert, [("never",)])])
    await asyncio.to_thread(log.close)
    with closing(sqlite3.connect(tmp_path / "control.db")) as stored:
        assert len(stored.execute("SELECT * FROM backends").fetchall()) == 2
