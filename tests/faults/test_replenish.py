"""Groups that are dropped are replaced while the gateway is killed again and again: as many are
kept as were asked for, none is stored twice.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, in_thread
from prorl.errors import UnavailableError
from prorl.linux.procfs import descendants
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.supervisor.service import Supervisor
from prorl.types import Task
from tests.integration.checks import check_nothing_left, rows

TARGET, POOL, N, KILLS = 24, 200, 2, 8
SEVEN_OF_TEN = "select group_id, group_id % 10 < 3 as kept, 'x' as reason from rollouts group by 1"

pytestmark = [pytest.mark.faults, pytest.mark.timeout(500)]


async def test_replenished_while_the_gateway_is_killed(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))
    root = tmp_path / "root"
    config = ServiceConfig.model_validate({"root": root, "backends": ("scripted:random",)})
    async with Supervisor(config) as running:
        client = client_of(running)
        run = {"run_id": "r", "filter": SEVEN_OF_TEN, "target_groups": TARGET}
        limits = {"max_attempts": 40, "max_worker_losses": 40}
        await in_thread(lambda: client.create_run(**run, max_open_groups=8, limits=limits))
        tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"say {i}") for i in range(POOL)]
        await in_thread(lambda: client.submit("r", tasks, N, key="k", last=True))
        gateway, kills, seen = running.children["gateway"], 0, 0
        async with asyncio.timeout(400):
            while True:
                try:
                    view = await in_thread(client.run, "r")
                except (UnavailableError, OSError):
                    continue
                running.note_commits(int(view["commits"]))
                if view["state"] == "finished":
                    break
                if kills < KILLS and int(view["commits"]) > seen and gateway.beats:
                    kills, seen = kills + 1, int(view["commits"])
                    gateway.signal(signal.SIGKILL)
                await asyncio.sleep(0.1)
        assert (kills, running.restarts) == (KILLS, KILLS)
        client.close()
    check_nothing_left(root, before)
    assert verify(root / "r") == []
    stored = StoredRun(root / "r")
    decided = rows(stored, "select group_id, kept from groups where event = 'decided'")
    assert len({row["group_id"] for row in decided}) == len(decided), "decided once"
    kept = sorted(row["group_id"] for row in decided if row["kept"])
    assert all(group % 10 < 3 for group in kept)
    assert TARGET <= len(kept) <= TARGET + 8, "what was asked for, and what was open then"
    ended = rows(stored, "select count(*) as n, count(distinct rollout_id) as once from rollouts")
    assert ended == [{"n": POOL * N, "once": POOL * N}]
