"""A process dies, freezes, fails or dawdles at each durable step: the run ends whole all the same,
and its consumer has read each group once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from pathlib import Path

import pytest

from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of, service, signals
from prorl.errors import ProrlError, UnavailableError
from prorl.linux.failpoints import FAILPOINTS, FAULTS, VARIABLE, parse
from prorl.linux.procfs import descendants
from prorl.supervisor.service import Supervisor
from prorl.types import Task
from tests.integration.run_checks import check_complete, check_no_leftovers, rows

WAVES, WAVE, N = 4, 5, 2
ONCE = {"manifest.written", "log.run"}
"""Steps that are made once in a run."""


def _submit(client: Client) -> None:
    """Ask for everything, again where the answer was lost."""
    run = {"run_id": "r", "delivery": "stream", "max_uncommitted_groups": WAVE}
    limits = {"max_attempts": 40, "max_worker_losses": 40}
    _patiently(lambda: client.create_run(**run, limits=limits))
    for wave in range(WAVES):
        numbers = range(wave * WAVE, (wave + 1) * WAVE)
        tasks = [Task(task_id=f"t{i}", env="noop", prompt=f"say {i}") for i in numbers]
        _patiently(
            lambda wave=wave, tasks=tasks: client.submit(
                "r", tasks, N, key=f"w{wave}", last=wave == WAVES - 1
            )
        )


def _patiently(call: object) -> None:
    while True:
        try:
            call()  # type: ignore[operator]
            return
        except (UnavailableError, OSError):
            time.sleep(0.2)


def _read(client: Client) -> Counter[int]:
    """Each group as often as it was taken for trained."""
    groups: Counter[int] = Counter()
    cursor = "r@0"
    while True:
        try:
            for batch in client.stream("r", cursor=cursor, groups_per_batch=1):
                groups[int(batch.group_ids[0])] += 1
                cursor = batch.cursor
                client.commit(batch)
            return groups
        except (ProrlError, OSError):
            time.sleep(0.2)


async def _finished(running: Supervisor, client: Client) -> None:
    while True:
        try:
            view = await asyncio.to_thread(client.run, "r")
            running.note_commits(int(view["commits"]))
            if view["state"] == "finished":
                return
        except (UnavailableError, OSError):
            pass  # the gateway is the one that was struck
        await asyncio.sleep(0.1)


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", FAILPOINTS)
async def test_a_fault_at_a_durable_step_loses_nothing(
    tmp_path: Path, name: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(descendants(os.getpid()))
    monkeypatch.setenv(VARIABLE, f"{name}:{fault}@{1 if name in ONCE else 2}")
    root = tmp_path / "root"
    config = ServiceConfig.model_validate({"root": root, "backends": ("scripted:random",)})
    async with signals() as stop, service(config, stop) as running:
        assert isinstance(running, Supervisor)
        client, trainer = client_of(running), client_of(running)
        async with asyncio.timeout(240), asyncio.TaskGroup() as group:
            failing = group.create_task(running.failed())
            await asyncio.to_thread(_submit, client)
            reading = group.create_task(asyncio.to_thread(_read, trainer))
            await _finished(running, client)
            groups = await reading
            failing.cancel()
        struck = running.restarts
        client.close()
        trainer.close()
    assert struck == 1 if fault in ("kill", "freeze") else struck <= 1
    check_no_leftovers(root, before)
    stored = check_complete(root / "r", WAVES * WAVE * N)
    assert rows(stored, "select count(*) as n from rollouts where status = 'completed'") == [
        {"n": WAVES * WAVE * N}
    ]
    assert groups == Counter(dict.fromkeys(range(WAVES * WAVE), 1))


@pytest.mark.parametrize("text", ["log.writen:kill", "log.written:die", "log.written:kill@x"])
def test_a_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME:FAULT"):
        parse(text)


def test_every_point_is_in_the_docs() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guarantees.md").read_text()
    assert [name for name in FAILPOINTS if f"| `{name}` |" not in text] == []
