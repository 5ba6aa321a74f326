"""`/metrics` against what happened, and the dashboard against `/metrics`."""

from __future__ import annotations

import json
import re
from pathlib import Path

import aiohttp
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from prorl.cli.commands.status import remarks, step_words
from prorl.control import CommitCursor, Failed, Started, Stats
from prorl.service.core.observed import StepUtilization
from prorl.service.shapes import StepShares
from tests.service.running_gateway import TOKEN, GatewayHarness, group, handout, running_gateway

CONFIGS = Path(__file__).parents[2] / "configs"


async def scrape(w: GatewayHarness) -> dict[str, Metric]:
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(w.served.http + "/metrics") as answer,
    ):
        assert answer.status == 200
        text = await answer.text()
    return {family.name: family for family in text_string_to_metric_families(text)}


def value(families: dict[str, Metric], sample: str, **labels: str) -> float:
    """The one sample of that name that has these labels."""
    values = [
        entry.value
        for family in families.values()
        for entry in family.samples
        if entry.name == sample and labels.items() <= entry.labels.items()
    ]
    assert len(values) == 1, (sample, labels, values)
    return values[0]


async def test_counts_failures_and_phases_are_what_happened(tmp_path: Path) -> None:
    async with (
        running_gateway(tmp_path) as w,
        w.worker("store") as store,
        w.worker("init") as init,
        w.worker("run") as run,
        w.worker("eval") as grade,
    ):
        await w.run(target_groups=100)
        await w.submit(group(n=2))
        bad, good = await init.take(2)
        run.say(Failed(message="gone"), bad, "sandbox_start")
        for worker in (run, grade):
            worker.say(Started(), good)
            await w.until(lambda view: view["counts"]["running"] == 1)
        (again,) = await init.take(1)
        await store.commit("r", "p1", [good], reward=0.5)
        seen = await scrape(w)
        assert again.rollout_id == bad.rollout_id
        assert value(seen, "prorl_rollouts", run="r", state="completed") == 1
        assert value(seen, "prorl_rollouts", run="r", state="leased") == 1
        assert value(seen, "prorl_failures_total", failure_code="sandbox_start") == 1
        assert value(seen, "prorl_run_summed_reward", run="r") == 0.5
        assert value(seen, "prorl_backend_up", backend="scripted:oracle") == 1
        assert value(seen, "prorl_workers", stage="eval") == 1
        counts = {
            phase: value(seen, "prorl_rollout_phase_seconds_count", phase=phase)
            for phase in ("queue", "init", "run", "eval", "store")
        }
        assert counts == {"queue": 3, "init": 2, "run": 1, "eval": 1, "store": 1}
        assert value(seen, "prorl_in_flight_rollouts", worker="init-0") == 1


async def test_a_finished_run_leaves_no_series(tmp_path: Path) -> None:
    async with running_gateway(tmp_path) as w, w.worker("store"):
        await w.run()
        assert value(await scrape(w), "prorl_run_policy_version", run="r") == 0
        await w.http("DELETE", "/v1/runs/r")
        await w.until(lambda view: view["state"] in ("finished", "cancelled"))
        assert not any(
            "r" in s.labels.values() for f in (await scrape(w)).values() for s in f.samples
        )


async def test_the_dashboard_asks_for_nothing_that_is_not_there(tmp_path: Path) -> None:
    dashboard = json.loads((CONFIGS / "grafana.json").read_text())
    metric_names = {
        name
        for panel in dashboard["panels"]
        for target in panel.get("targets", ())
        for name in re.findall(r"\bprorl_\w+", target["expr"])
    }
    async with running_gateway(tmp_path) as w:
        seen = await scrape(w)
    kinds = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    there = {name + end for name, family in seen.items() for end in kinds.get(family.type, ("",))}
    assert len(metric_names) > 15
    assert metric_names <= there, metric_names - there


async def test_the_steps_of_a_trainer_say_what_to_scale(tmp_path: Path) -> None:
    """The second step's group comes while the trainer waits; one of its rollouts ends early."""
    async with (
        running_gateway(tmp_path) as w,
        w.worker("store") as store,
        w.worker("init") as init,
        w.worker("run") as run,
    ):
        await w.run(delivery="stream")
        run.stats = Stats(slots=4)
        for step in range(2):
            await w.submit(group(n=3, key=f"{step}"))
            keys = await init.take(3)
            for key in keys:
                run.say(Started(), key)
            await w.until(lambda view: view["counts"]["running"] == 3)
            await w.http("DELETE", f"/v1/runs/r/rollouts/{keys[0].rollout_id}")
            await store.commit("r", f"p{step}", keys[1:])
            await store.decide("r", step)
            await store.ask(handout([(step, 0)]), "r")
            await store.ask(CommitCursor(consumer="primary", seq=step + 1), "r")
        steps = (await w.view())["steps"]
        assert steps["steps"] == 1, "what came before the first commit is nobody's step"
        assert 0 < steps["trainer_wait_share"] <= 1
        assert 0 < steps["wasted_share"] < 1
        seen = await scrape(w)
        assert value(seen, "prorl_run_steps_total", run="r") == 1
        waited = value(seen, "prorl_run_trainer_wait_seconds_total", run="r")
        assert 0 < waited <= value(seen, "prorl_run_step_seconds_total", run="r")


def test_where_the_time_of_steps_went() -> None:
    effort = StepUtilization()
    effort.handed.extend([1.0, 1.0])
    effort.committed(2, now=10.0, busy_s=100.0, slots=4)
    for seconds, good in ((6.0, True), (2.0, False), (2.0, True)):
        effort.ended(seconds, good)
    effort.waste(1)
    effort.handed.extend([9.0, 13.0, 99.0])
    effort.committed(2, now=20.0, busy_s=130.0, slots=4)
    assert effort.recent == effort.total == (1, 10.0, 3.0, 40.0, 30.0, 10.0, 7.0)
    effort.committed(1, now=100.0, busy_s=0.0, slots=4)
    assert effort.recent[:5] == (2, 90.0, 82.0, 360.0, 30.0), "RUN began anew: nothing is known"
    effort.committed(5, now=101.0, busy_s=0.0, slots=4)
    assert effort.recent.steps == 2, "they were handed out before the gateway started"


@pytest.mark.parametrize(
    ("waited", "idle", "advice"),
    [
        (0.2, 0.0, "To feed the trainer, add model servers or slots"),
        (0.2, 0.5, "To feed the trainer, raise max_open_groups or max_staleness"),
        (0.07, 0.0, "The trainer is fed well"),
        (0.01, None, "Fewer model servers or slots would do"),
    ],
)
def test_status_says_what_to_scale(waited: float, idle: float | None, advice: str) -> None:
    steps = StepShares(steps=3, trainer_wait_share=waited, idle_slot_share=idle, wasted_share=0.5)
    assert step_words(steps).endswith(advice)


@pytest.mark.parametrize(("state", "num_remarks"), [("open", 1), ("finished", 0)])
def test_status_advises_only_on_a_run_that_is_open(state: str, num_remarks: int) -> None:
    steps = StepShares(steps=2, trainer_wait_share=0.0, idle_slot_share=1.0, wasted_share=0.0)
    run = {"run_id": "r", "state": state, "stalled": "", "idle": "", "uncommitted_groups": 0}
    answer = {"bottleneck": "", "backends": [], "warnings": []}
    rows = [{**run, "failures": {}, "steps": steps}]
    assert len(list(remarks({**answer, "runs": rows}))) == num_remarks
