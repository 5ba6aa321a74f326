"""A backup that was made while a service works goes on elsewhere, as docs/upgrade.md says."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from prorl.deploy.running import Stop, client_of, service
from prorl.storage.keep.backup import back_up
from prorl.types import Task
from tests.integration.run_checks import check_complete
from tests.integration.services import settings, view
from tests.waiting import until

NUM_GROUPS = 60
FAST = {"flush_s": 0.1}


def num_commits(root: Path) -> int:
    return len(list((root / "r" / "commits").glob("0*.json")))


@pytest.mark.parametrize("is_slow", [False, True])
async def test_a_backup_of_a_working_service_goes_on_elsewhere(
    tmp_path: Path, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`is_slow`: the service commits more between the copy of the log and that of the run."""
    root, copy = tmp_path / "root", tmp_path / "elsewhere"
    tasks = [
        Task(task_id=f"t{i}", env="noop", prompt="?", data={"reward": i % 2})
        for i in range(NUM_GROUPS)
    ]
    config = settings(root, "local", "scripted:oracle?delay_s=0.05", workers=0, store=FAST)
    async with service(config, Stop()) as running:
        client = client_of(running)
        await asyncio.to_thread(client.create_run, run_id="r")
        await asyncio.to_thread(client.submit, "r", tasks, n=2, key="all", last=True)
        await until(lambda: num_commits(root) >= 2)
        if is_slow:

            def list_later(folder: Path) -> list[str]:
                asyncio.run(until(lambda: num_commits(root) > num_before + 2))
                return ["r"]

            num_before = num_commits(root)
            monkeypatch.setattr("prorl.storage.keep.backup.list_runs", list_later)
        ((run, copied_commits),) = await asyncio.to_thread(lambda: list(back_up(root, copy)))
        with closing(sqlite3.connect(copy / "control.db")) as log:
            assert log.execute("select state from runs").fetchall() == [("open",)]
    assert (run, num_commits(copy)) == ("r", copied_commits)
    config = settings(copy, "local", "scripted:oracle", workers=0, store=FAST)
    async with service(config, Stop()) as running:
        client = client_of(running)
        async with asyncio.timeout(100):
            while (await view(client))["state"] != "finished":
                await asyncio.sleep(0.1)
    check_complete(copy / "r", 2 * NUM_GROUPS)
