"""Real tasks from submit to Parquet, in both topologies: counts, groups, ids, and nothing left
behind.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.cli.summary import summarise
from prorl.linux.procfs import descendants
from prorl.types import Json
from tests.integration.conftest import SLOW_IN_A_SINGLE_PROCESS
from tests.integration.run_checks import check_complete, check_no_leftovers, rows

Make = Callable[..., JobPlan]

INLINE = "service.workers=0"


async def _run(plan: JobPlan) -> dict[str, Json]:
    before = set(descendants(os.getpid()))
    assert await run_plan(plan, json=True) == 0
    check_no_leftovers(plan.service.root, before)
    check_complete(plan.directory, plan.num_rollouts)
    return summarise(plan.directory)


async def test_the_oracle_solves_every_task_with_real_tools(
    make_plan: Make, demo_rows: list[dict[str, Json]], workers: int
) -> None:
    plan = make_plan(demo_rows[:3] + demo_rows[-3:], f"service.workers={workers}", policy="oracle")
    summary = await _run(plan)
    assert (summary["rewarded"], summary["mean_reward"]) == (6, 1.0)
    assert summary["states"] == {"completed": 6}
    assert summary["tool_calls"] >= 6
    assert summary["sampled_tokens"] > 0


@SLOW_IN_A_SINGLE_PROCESS
async def test_groups_that_differ_are_kept_and_the_others_dropped(
    make_plan: Make, demo_rows: list[dict[str, Json]], workers: int
) -> None:
    plan = make_plan(
        demo_rows[-8:], f"service.workers={workers}", policy="flaky", run={"filter": "dapo"}
    )
    await _run(plan)
    stored = check_complete(plan.directory, 32)
    differ = rows(
        stored,
        "select group_id from rollouts group by 1 having count(distinct reward) > 1 order by 1",
    )
    kept = rows(stored, "select group_id from groups where event = 'decided' and kept order by 1")
    assert kept == differ
    assert 0 < len(kept) < 8


@SLOW_IN_A_SINGLE_PROCESS
async def test_a_failure_of_the_backend_is_tried_again_and_never_scored(
    make_plan: Make, demo_rows: list[dict[str, Json]], workers: int
) -> None:
    policy = "faulty?error=0.15&nan=0.1"
    plan = make_plan(
        demo_rows[-8:], f"service.workers={workers}", "run.limits.max_attempts=20", policy=policy
    )
    summary = await _run(plan)
    assert summary["max_attempt"] > 1
    assert {row["failure_class"] for row in summary["retried"]} == {"infra"}
    stored = check_complete(plan.directory, 8)
    assert rows(
        stored,
        "select count(*) as n from rollouts where failure_class = 'infra' and reward is not null",
    ) == [{"n": 0}]
    assert summary["rewarded"] == summary["states"]["completed"]


async def test_a_finished_run_can_be_resumed_and_adds_nothing(
    make_plan: Make, demo_rows: list[dict[str, Json]]
) -> None:
    plan = make_plan(demo_rows[-2:], INLINE, policy="oracle", name="again")
    first = await _run(plan)
    again = JobPlan.make(None, {"name": "again"}, [], root=plan.service.root, resume=True)
    second = await _run(again)
    assert (first["rollouts"], first["bytes"]) == (second["rollouts"], second["bytes"])
