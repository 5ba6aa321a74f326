"""Groups that are dropped are replaced while the gateway is killed again and again: as many are
kept as were asked for, none is stored twice; one group at a time, they are those of a run that
nobody disturbed, in its order, whoever is killed.

PRORL_KILLS is how often, of the gateway and of RUN by chance where the runs are compared.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path

import pytest

from prorl.config import ServiceConfig
from prorl.deploy.running import client_of
from prorl.errors import UnavailableError
from prorl.linux.procfs import descendants
from prorl.storage.read.catalog import StoredRun
from prorl.storage.read.verify import verify
from prorl.supervisor.service import Supervisor
from prorl.types import Task
from tests.integration.run_checks import check_no_leftovers, rows

TARGET, POOL, N = 24, 200, 2
KILLS = int(os.environ.get("PRORL_KILLS", "8"))
SEVEN_OF_TEN = "select group_id, group_id % 10 < 3 as kept, 'x' as reason from rollouts group by 1"
DIFFERENT = (
    "select group_id, min(num_sampled) <> max(num_sampled) as kept, 'x' as reason from rollouts"
    " group by 1"
)
"""What was said decides; a script says it again in any life."""

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


async def replenished(
    root: Path,
    filter_sql: str,
    *,
    victims: tuple[str, ...],
    policy: str,
    open_groups: int,
    workers: int = 0,
) -> list[int]:
    """The groups that were kept, in order; with victims, KILLS of these are killed meanwhile."""
    before = set(descendants(os.getpid()))
    fields = {"root": root, "backends": (policy,), "workers": workers}
    config = ServiceConfig.model_validate(fields)
    chance, most = random.Random(0), KILLS if victims else 0
    async with Supervisor(config) as running:
        client = client_of(running)
        run = {"run_id": "r", "filter": filter_sql, "target_groups": TARGET}
        limits = {"max_attempts": 40, "max_worker_losses": 40}
        await asyncio.to_thread(
            client.create_run, **run, max_open_groups=open_groups, limits=limits
        )
        tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"say {i}") for i in range(POOL)]
        await asyncio.to_thread(client.submit, "r", tasks, N, key="k", last=True)
        kills, seen = 0, 0
        async with asyncio.timeout(400):
            while True:
                try:
                    view = await asyncio.to_thread(client.run, "r")
                except (UnavailableError, OSError):
                    continue
                running.note_commits(int(view["commits"]))
                if view["state"] == "finished":
                    break
                if kills < most and int(view["commits"]) > seen:
                    victim = running.children[chance.choice(victims)]
                    if victim.beats:
                        kills, seen = kills + 1, int(view["commits"])
                        victim.signal(signal.SIGKILL)
                await asyncio.sleep(chance.uniform(0.0, 0.2))
        assert (kills, running.restarts) == (most, most)
        client.close()
    check_no_leftovers(root, before)
    assert verify(root / "r") == []
    stored = StoredRun(root / "r")
    decided = rows(
        stored, "select group_id, kept from groups where event = 'decided' order by event_seq"
    )
    assert len({row["group_id"] for row in decided}) == len(decided), "decided once"
    ended = rows(stored, "select count(*) as n, count(distinct rollout_id) as once from rollouts")
    assert ended == [{"n": POOL * N, "once": POOL * N}]
    return [row["group_id"] for row in decided if row["kept"]]


async def test_replenished_while_the_gateway_is_killed(tmp_path: Path) -> None:
    kept = await replenished(
        tmp_path / "root",
        SEVEN_OF_TEN,
        victims=("service",),
        policy="scripted:random",
        open_groups=8,
    )
    assert all(group % 10 < 3 for group in kept)
    assert TARGET <= len(kept) <= TARGET + 8, "what was asked for, and what was open then"


async def test_whoever_is_killed_the_same_groups_are_kept_in_the_same_order(tmp_path: Path) -> None:
    kept = [
        await replenished(
            tmp_path / name,
            DIFFERENT,
            victims=victims,
            policy="scripted:flaky?delay_s=0.2",
            open_groups=1,
            workers=workers,
        )
        for name, victims, workers in (
            ("calm", (), 0),
            ("together", ("service",), 0),
            ("workers", ("service", "worker-0"), 1),
        )
    ]
    assert kept[0] == kept[1] == kept[2]
    assert len(kept[0]) == TARGET < kept[0][-1], "some were dropped and replaced"
