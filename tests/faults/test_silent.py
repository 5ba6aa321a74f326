"""A worker that says nothing is passed by long before it is ended: its work goes to others at once,
and nobody is charged.

The supervisor of these tests ends the silent after ten minutes: what ends before was passed on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import pytest

from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, in_thread
from prorl.linux.procfs import descendants
from prorl.supervisor.service import Supervisor
from prorl.types import Task
from tests.integration.checks import check_complete, check_nothing_left, rows

COUNT = 24

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.mark.parametrize("role", ["init", "run", "eval"])
async def test_what_a_silent_worker_has_not_taken_goes_to_others(tmp_path: Path, role: str) -> None:
    before = set(descendants(os.getpid()))
    pool = {"slots": 4, "workers": 2}
    values = {"root": tmp_path / "root", "backends": ("scripted:random?delay_s=0.05",)}
    config = ServiceConfig.model_validate({**values, "init": pool, "run": pool, "eval": pool})
    async with Supervisor(config, silence_s=600.0) as running:
        client = client_of(running)
        await in_thread(lambda: client.create_run(run_id="r"))
        await _all_there(client)
        frozen = running.children[f"{role}-0"]
        frozen.signal(signal.SIGSTOP)
        tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"say {i}") for i in range(COUNT)]
        await in_thread(lambda: client.submit("r", tasks, 1, key="k", last=True))
        async with asyncio.timeout(200):
            while (await in_thread(client.run, "r"))["state"] != "finished":
                await asyncio.sleep(0.1)
        frozen.signal(signal.SIGCONT)
        assert running.restarts == 0
        client.close()
    check_nothing_left(tmp_path / "root", before)
    stored = check_complete(tmp_path / "root" / "r", COUNT)
    found = rows(stored, "select status, failure_code, attempt from rollouts")
    assert Counter((row["status"], row["failure_code"]) for row in found) == {
        ("completed", ""): COUNT
    }
    again = sum(row["attempt"] > 1 for row in found)
    assert again if role != "eval" else not again, "the frozen one was given work"
    with closing(sqlite3.connect(tmp_path / "root" / "control.db")) as log:
        losses = log.execute("SELECT sum(worker_losses) FROM rollouts").fetchone()
    assert losses == (0,), "it did not die: nobody is charged"


async def _all_there(client: object) -> None:
    while True:
        status = await in_thread(client.status)  # type: ignore[attr-defined]
        if [bool(worker["stats"]) for worker in status["workers"]] == [True] * 7:
            return
        await asyncio.sleep(0.1)
