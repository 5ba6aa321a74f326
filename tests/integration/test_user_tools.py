"""A user's env and tool, both by entry point, through a real service: the call runs inside, and its
answer reaches policy and grader.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.errors import TaskError
from tests.integration.conftest import SLOW_IN_A_SINGLE_PROCESS
from tests.integration.run_checks import check_complete, rows
from tests.user_package import installed

PACKAGE = {
    "trips/__init__.py": "",
    "trips/weather.py": (
        """
        import os

        class Weather:
            description = "Weather in one city."
            properties = {"city": {"type": "string"}}
            parameters = {"type": "object", "properties": properties, "required": ["city"]}

            def __init__(self):
                self.seen = []

            def __call__(self, city):
                self.seen.append(city)
                with open("seen.txt", "w") as file:
                    file.write(f"{os.environ['USER']} saw {self.seen}")
                return f"4 degrees in {city}"
    """
    ),
    "trips/env.py": (
        """
        from prorl.envs.noop import NoopEnv
        from prorl.envs.tools import Solution, run_call
        from prorl.envs.tools import user_spec
        from prorl.types import RewardPart, SandboxSpec, Score, Stage, ToolCall

        class TripEnv(NoopEnv):
            name = "trip"

            def check(self, task):
                self.tools(task)

            def sandbox(self, task, stage):
                return SandboxSpec(tools=("bash", "weather")) if stage is Stage.RUN else None

            def tools(self, task):
                return (user_spec(task.data.get("tool", "weather")),)

            async def call(self, task, sandbox, call, timeout_s):
                return await run_call(self.tools(task), sandbox, call, timeout_s)

            async def artifact(self, task, final, sandbox):
                return await sandbox.get("seen.txt")

            async def score(self, task, artifact, sandbox, deadline):
                seen = float(artifact == b"user saw ['Oslo', 'Rome']")
                return Score(parts=(RewardPart(name="seen", value=seen),))

            def reference(self, task):
                calls = (ToolCall("weather", {"city": city}) for city in ("Oslo", "Rome"))
                return Solution(tuple(calls), "I went.")
    """
    ),
}
POINTS = {
    "prorl.tools": {"weather": "trips.weather:Weather"},
    "prorl.envs": {"trip": "trips.env:TripEnv"},
}


@SLOW_IN_A_SINGLE_PROCESS
async def test_a_users_env_and_tool_work_through_the_service(
    make_plan: Callable[..., JobPlan],
    workers: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with installed(tmp_path / "site", "trips", PACKAGE, POINTS, monkeypatch):
        tasks = [
            {"task_id": f"t/{number}", "env": "trip", "prompt": "How warm is it?"}
            for number in range(2)
        ]
        plan = make_plan(tasks, f"service.workers={workers}", policy="oracle", n=2)
        assert await run_plan(plan, json=True) == 0
        stored = check_complete(plan.directory, 4)
        assert rows(
            stored, "select sum(reward) as reward, sum(num_tool_calls) as calls from rollouts"
        ) == [{"reward": 4.0, "calls": 8}]
        tool_results = rows(
            stored, "select distinct content from messages where role = 'tool' order by 1"
        )
        assert [row["content"] for row in tool_results] == [
            "4 degrees in Oslo",
            "4 degrees in Rome",
        ]
        with pytest.raises(TaskError, match="unknown tool 'wether'"):
            make_plan([{**tasks[0], "data": {"tool": "wether"}}], policy="oracle")
