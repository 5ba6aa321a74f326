"""A fourth operator between RUN and EVAL is one file (`tests/stages/critic.py`) and one row."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prorl.config import ServiceConfig
from prorl.deploy.running import client_of
from prorl.graph import GRAPH, StageRow
from prorl.supervisor.specs import child_specs
from prorl.types import Task
from tests.in_process_service import in_process
from tests.integration.run_checks import check_complete, rows
from tests.stages.critic import Critic

COUNT = 12


@pytest.mark.parametrize("own_processes", [0, 1], ids=["chained", "apart"])
async def test_a_fourth_operator_needs_a_single_file_and_a_single_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_processes: int
) -> None:
    """A part of the chain, or a process of its own on the same host."""
    init, run, last = GRAPH.rows
    critic = StageRow("critic", "ran", "tests.stages.critic:Critic")
    monkeypatch.setattr(Critic, "num_turns", 0)
    monkeypatch.setattr(GRAPH, "rows", (init, run, critic, last))
    fields = {"root": tmp_path / "root", "workers": 0}
    fields["pools"] = {"critic": {"slots": 3, "own_processes": own_processes}}
    config = ServiceConfig.model_validate({**fields, "backends": ("scripted:oracle",)})
    own = [spec.name for spec in child_specs(config, "") if spec.name == "critic-0"]
    assert len(own) == own_processes
    tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"say {i}") for i in range(COUNT)]
    async with in_process(config) as running:
        client = client_of(running)
        await asyncio.to_thread(client.create_run, run_id="r")
        await asyncio.to_thread(client.submit, "r", tasks, 1, key="k", last=True)
        async with asyncio.timeout(60):
            while (await asyncio.to_thread(client.run, "r"))["state"] != "finished":
                await asyncio.sleep(0.1)
        status = await asyncio.to_thread(client.status)
        assert status["stages"]["critic"]["slots"] == 3
        assert status["stages"]["critic"]["done"] == COUNT
        in_memory = sorted((e["edge"], e["worker"], e["in_memory"]) for e in status["edges"])
        of_critic = "critic-0" if own_processes else "service"
        assert in_memory == sorted(
            [
                ("lease", "service", True),
                ("ready", "service", True),
                ("ran", of_critic, not own_processes),
                ("ran", "service", not own_processes),
                ("scored", "store-0", True),
            ]
        )
        client.close()
    stored = check_complete(tmp_path / "root" / "r", COUNT)
    totals = rows(stored, "select sum(num_turns)::int as turns, max(attempt) as most from rollouts")
    assert totals == [{"turns": Critic.num_turns, "most": 1}]
