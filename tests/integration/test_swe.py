"""SWE tasks through the real service: the reference resolves them, nothing does not, and siblings
share one setup.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import orjson
import pytest

from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.types import Json
from tests.integration.conftest import SLOW_IN_A_SINGLE_PROCESS
from tests.integration.run_checks import check_complete, rows

Make = Callable[..., JobPlan]
TASKS = Path(__file__).parents[1] / "envs" / "swe_tasks.jsonl"


def _rows() -> list[dict[str, Json]]:
    return [orjson.loads(line) for line in TASKS.read_text().splitlines()]


@SLOW_IN_A_SINGLE_PROCESS
async def test_the_reference_resolves_every_task(make_plan: Make, workers: int) -> None:
    plan = make_plan(_rows(), f"service.workers={workers}", policy="oracle")
    assert await run_plan(plan, json=True) == 0
    stored = check_complete(plan.directory, 2)
    assert rows(
        stored,
        "select count(*) as n, sum(reward) as reward from rollouts where status = 'completed'",
    ) == [{"n": 2, "reward": 2.0}]


async def test_an_idle_policy_earns_nothing_and_a_bad_task_ends_after_its_first_attempt(
    make_plan: Make,
) -> None:
    calc, lru = _rows()
    bad = {**lru, "instance_id": "bad-setup", "setup": "echo no compiler >&2; exit 3"}
    late = {
        **lru,
        "instance_id": "bad-tests",
        "test_patch": str(lru["test_patch"]).replace("test_lru.py", "lru.py"),
    }
    plan = make_plan([calc, bad, late], "service.workers=0", policy="oracle")
    await run_plan(plan, json=True)
    stored = check_complete(plan.directory, 3)
    assert rows(
        stored, "select task_id, status, failure_code, attempt, reward from rollouts order by 1"
    ) == [
        {
            "task_id": "bad-setup",
            "status": "failed",
            "failure_code": "bad_task",
            "attempt": 1,
            "reward": None,
        },
        {
            "task_id": "bad-tests",
            "status": "failed",
            "failure_code": "bad_task",
            "attempt": 1,
            "reward": None,
        },
        {
            "task_id": "calc-1",
            "status": "completed",
            "failure_code": "",
            "attempt": 1,
            "reward": 1.0,
        },
    ]
    nothing = make_plan([calc, lru], "service.workers=0", policy="noop")
    await run_plan(nothing, json=True)
    assert rows(
        check_complete(nothing.directory, 2), "select sum(reward) as reward from rollouts"
    ) == [{"reward": 0.0}]


@pytest.mark.parametrize(
    ("workers", "snapshot_bytes", "num_setups"),
    [(1, 1 << 30, 1), pytest.param(0, 0, 4, marks=pytest.mark.slow)],
)
async def test_siblings_share_a_single_setup(
    make_plan: Make, workers: int, snapshot_bytes: int, num_setups: int
) -> None:
    """The setup makes an id that the tests print in EVAL: as many ids as setups whose workspace was
    scored.
    """
    calc = _rows()[0]
    task = {
        **calc,
        "setup": f"sleep 0.5; {calc['setup']}",
        "test_command": f"cat calc/build.py; {calc['test_command']}",
    }
    sets = (f"service.workers={workers}", f"service.sandbox.snapshot_bytes={snapshot_bytes}")
    plan = make_plan([task], *sets, policy="oracle", n=4)
    assert await run_plan(plan, json=True) == 0
    stored = check_complete(plan.directory, 4)
    logs = [
        row["content"] for row in rows(stored, "select content from messages where role = 'grader'")
    ]
    assert len(logs) == 4
    assert len({re.findall(r"BUILD = '([0-9a-f-]+)'", log)[0] for log in logs}) == num_setups
    assert rows(stored, "select sum(reward) as reward from rollouts") == [{"reward": 4.0}]
