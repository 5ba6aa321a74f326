"""A user's agent or renderer that blocks, ends its process, leaves, raises, takes all memory,
forks, closes every descriptor or kills what it descends from costs its own rollout, in its own
words, and never the service.

All of them at once, each in a run of its own with honest rollouts beside.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.cli.progress import follow
from prorl.deploy.running import client_of, service, signals
from prorl.types import Json, Task
from tests.integration.run_checks import check_complete, check_no_leftovers, rows
from tests.integration.services import settings
from tests.user_package import installed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

SINNER = """
import os, signal, sys, time
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import load_tokenizer

def sin(text):
    how = text.partition("sin:")[2].partition(".")[0]
    if how == "block":
        time.sleep(600)
    if how == "spin":
        while True:
            pass
    if how == "exit":
        os._exit(3)
    if how == "leave":
        sys.exit("enough")
    if how == "raise":
        raise LookupError("no such city")
    if how == "eat":
        held = []
        while True:
            held.append(bytearray(64 << 20))
    if how == "fork":
        os.fork()
    if how == "close":
        os.closerange(3, 500)
    if how == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
    if how == "kill all":
        os.kill(-1, signal.SIGKILL)

class Agent:
    async def run(self, attempt):
        sin(attempt.task.prompt)
        if "gives" in attempt.task.prompt:
            return 5
        return (await attempt.solve()).content

class Renderer(ChatMLRenderer):
    def prompt(self, messages, tools):
        sin(messages[-1].content)
        return super().prompt(messages, tools)

def make_renderer(spec):
    return Renderer(load_tokenizer(spec.model))
"""
POINTS = {
    "prorl.agents": {"sinner": "sinner:Agent"},
    "prorl.renderers": {"sinner": "sinner:make_renderer"},
}
PARTS: dict[str, dict[str, Json]] = {
    "agent": {"agent": "sinner"},
    "renderer": {"renderer": {"name": "sinner"}},
}
PLACE = r"sinner/__init__.py:\d+ in sin"
SAYS = {
    "block": rf"took longer than \d+ s \(.*{PLACE}",
    # a busy machine gives it so little of a processor that the attempt's time is over first
    "spin": rf"processor time \(.*{PLACE}|took longer than \d+ s \(.*{PLACE}|after its time",
    "exit": r"ended its process \(exit code 3\)",
    "eat": r"MemoryError",
    "leave": rf"SystemExit: enough.*{PLACE}",
    "raise": rf"LookupError: no such city.*{PLACE}",
    "fork": "",
    "close": r"ended its process",
    "kill": rf"PermissionError.*{PLACE}",
    "kill all": rf"PermissionError.*{PLACE}",
    "gives": r"agent 'sinner' gave 5",
}
CASES = [(part, how) for part in PARTS for how in SAYS if (part, how) != ("renderer", "gives")]


@pytest.fixture(autouse=True)
def _sinner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with installed(tmp_path, "sinner", {"sinner/__init__.py": SINNER}, POINTS, monkeypatch):
        yield


def _tasks(how: str) -> list[Task]:
    prompts = ["Be honest 0.", "Be honest 1.", f"sin:{how}."]
    return [Task(task_id=prompt, env="noop", prompt=prompt) for prompt in prompts]


async def test_a_users_part_that_misbehaves_costs_its_own_rollout_and_never_the_service(
    tmp_path: Path, sandbox_kind: str
) -> None:
    root = tmp_path / "root"
    config = settings(root, sandbox_kind, "scripted:noop")
    async with signals() as stop, service(config, stop) as running:
        client = client_of(running)
        for part, how in CASES:
            run = f"{part}-{how}".replace(" ", "-")
            run_fields = {"run_id": run, "limits": {"run_s": 10.0}, **PARTS[part]}
            await asyncio.to_thread(client.create_run, **run_fields)
            await asyncio.to_thread(client.submit, run, _tasks(how), 1, key="k", last=True)
        for part, how in CASES:
            run = f"{part}-{how}".replace(" ", "-")
            await follow(client, running, run, 3, quiet=True)
        assert running.restarts == 0
    failed = "select task_id, failure_code, failure_message, attempt from rollouts"
    failed += " where status <> 'completed'"
    for part, how in CASES:
        failures = rows(check_complete(root / f"{part}-{how}".replace(" ", "-"), 3), failed)
        print(part, how, failures)
        if how == "fork":
            assert failures == []
            continue
        (failure,) = failures
        assert (failure["failure_code"], failure["attempt"]) == ("bad_task", 1)
        assert re.search(SAYS[how], failure["failure_message"]), failure
    check_no_leftovers(root, set())
