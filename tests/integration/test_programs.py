"""Programs and guests through the real service."""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
from collections.abc import Callable

from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.cli.summary import lines, summarise
from tests.agents.test_desk import PULL, free_port
from tests.agents.test_guest import ASK, GRADE
from tests.agents.test_program import LOOP
from tests.integration.checks import check_complete, rows

Make = Callable[..., JobPlan]


async def test_a_program_and_a_guest_play_beside_each_other(make_plan: Make, topology: str) -> None:
    """The env `guest` brings its own agent, whatever the run's is."""
    plays = {"task_id": "noop/1", "env": "noop", "prompt": "Say anything."}
    data = {"argv": [sys.executable, "-c", ASK + GRADE], "answer": "42"}
    asks = {"task_id": "guest/1", "env": "guest", "prompt": "?", "data": data}
    data = {"guest": "lake", "answer": "42"}
    comes = {"task_id": "guest/2", "env": "guest", "prompt": "?", "data": data}
    port = free_port()
    plan = make_plan(
        [plays, asks, comes],
        f"service.topology={topology}",
        f"service.guests={port}",
        f"run.agent=command: python3 -c {shlex.quote(LOOP)}",
        policy="noop",
        n=2,
    )
    (plan.directory.parent / "token").parent.mkdir(exist_ok=True)
    (plan.directory.parent / "token").write_text("owner")
    words = (f"http://127.0.0.1:{port}", "lake", "2", "--", sys.executable, "-c", ASK + GRADE)
    puller = await asyncio.create_subprocess_exec(
        sys.executable, str(PULL), *words, env={**os.environ, "PRORL_TOKEN": "owner"}
    )
    try:
        assert await run_plan(plan, json=True) == 0
    finally:
        puller.terminate()
        await puller.wait()
    stored = check_complete(plan.directory, 6)
    assert rows(
        stored,
        "select task_id, status, attempt, reward, rendered from rollouts group by all order by 1",
    ) == [
        {"task_id": "guest/1", "status": "completed", "attempt": 1, "reward": 0.0, "rendered": 1},
        {"task_id": "guest/2", "status": "completed", "attempt": 1, "reward": 0.0, "rendered": 1},
        {"task_id": "noop/1", "status": "completed", "attempt": 1, "reward": 1.0, "rendered": 1},
    ]
    assert any(line.startswith("  door      0 of 6") for line in lines(summarise(plan.directory)))
