"""A user's agent, renderer and backend run on RUN's loop: one that blocks, ends the process,
leaves, raises, takes all memory, forks or closes every file costs its own rollouts, in its
words, and nobody else's.

All of them at once, each in a run of its own with honest rollouts beside; then a run none of whose
rollouts RUN survives.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from prorl.cli.progress import follow
from prorl.deploy.running import client_of, service, signals
from prorl.linux import at_work
from prorl.supervisor import service as supervisor
from prorl.types import Json, Task
from tests.integration.checks import check_complete, check_nothing_left, rows
from tests.integration.services import settings
from tests.user_package import installed

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]

SINNER = """
import os, sys, time
from prorl.agents.native import NativeAgent
from prorl.backends.catalogue import open_url
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import load_tokenizer

def sin(text):
    how = text.partition("sin:")[2].partition(".")[0]
    if how == "block":
        time.sleep(600)
    if how == "exit":
        os._exit(3)
    if how == "leave":
        sys.exit("enough")
    if how == "raise":
        raise LookupError("no such city")
    if how == "eat":
        held = []
        while True:
            held.append(b"x" * (32 << 20))
            time.sleep(0.02)
    if how == "fork":
        os.fork()
    if how == "close":
        os.closerange(3, 500)

class Agent(NativeAgent):
    async def run(self, context):
        sin(context.task.prompt)
        if "gives" in context.task.prompt:
            return "nothing"
        return await super().run(context)

class Renderer(ChatMLRenderer):
    def prompt(self, messages, tools):
        sin(messages[-1].content)
        return super().prompt(messages, tools)

def make_renderer(spec):
    return Renderer(load_tokenizer(spec.model))

class Backend:
    name = "sinner:x"

    def __init__(self, context):
        self.inner = open_url("scripted:noop", context)

    async def generate(self, request):
        sin(bytes(request.prompt_ids_L[request.prompt_ids_L < 256].tolist()).decode())
        return await self.inner.generate(request)

    async def close(self):
        await self.inner.close()

def open_backend(url, context):
    return Backend(context)
"""
POINTS = {
    "prorl.agents": {"sinner": "sinner:Agent"},
    "prorl.renderers": {"sinner": "sinner:make_renderer"},
    "prorl.backends": {"sinner": "sinner:open_backend"},
}
PARTS: dict[str, dict[str, Json]] = {
    "agent": {"agent": "sinner"},
    "renderer": {"renderer": {"name": "sinner"}},
    "backend": {"backends": ["sinner:x"]},
}
SAYS = {
    "block": r"twice: service was killed by SIGKILL, silent for .*sinner/__init__.py.* in sin",
    "exit": r"twice: service exited with code 3",
    # a busy machine gives memory so slowly that it falls silent first
    "eat": r"twice: service was killed by SIGKILL, (it held [\d,]+ MiB of memory|silent for)",
    "leave": r"SystemExit: enough.*sinner/__init__.py:\d+ in sin",
    "raise": r"LookupError: no such city.*sinner/__init__.py:\d+ in sin",
    "fork": "",
    "close": r"twice: service ",
    "gives": r"agent sinner gave 'nothing', no Trajectory",
}
CASES = [(part, how) for part in PARTS for how in SAYS if how not in ("gives", "close")]
CASES = [case for case in CASES if case not in [("backend", "leave"), ("backend", "raise")]]
CASES += [("agent", how) for how in ("gives", "close")]
"""What a backend raises is that server's failure, as an answer of HTTP 500 is."""


@pytest.fixture(autouse=True)
def _sinner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(supervisor, "MOST_BYTES", 1 << 30)
    with installed(tmp_path, "sinner", {"sinner/__init__.py": SINNER}, POINTS, monkeypatch):
        yield


def _tasks(how: str, sinners: int, honest: int) -> list[Task]:
    prompts = [f"Be honest {i}." for i in range(honest)] + [
        f"sin:{how}. {i}" for i in range(sinners)
    ]
    return [Task(task_id=prompt, env="noop", prompt=prompt) for prompt in prompts]


async def test_a_users_part_that_misbehaves_costs_its_own_rollouts(
    tmp_path: Path, sandbox_kind: str
) -> None:
    root = tmp_path / "root"
    config = settings(root, sandbox_kind, "scripted:noop")
    async with signals() as stop, service(config, stop) as running:
        client = client_of(running)
        for part, how in CASES:
            run, given = f"{part}-{how}", {"run_id": f"{part}-{how}", **PARTS[part]}
            await asyncio.to_thread(client.create_run, **given)
            tasks = _tasks(how, 1, 2)
            await asyncio.to_thread(client.submit, run, tasks, 1, key="k", last=True)
        for part, how in CASES:
            await follow(client, running, f"{part}-{how}", 3, quiet=True)
        await asyncio.to_thread(client.create_run, run_id="all", agent="sinner")
        await asyncio.to_thread(client.submit, "all", _tasks("exit", 12, 0), 1, key="k", last=True)
        await follow(client, running, "all", 12, quiet=True)
    failed = "select task_id, failure_code, failure_message, attempt from rollouts"
    failed += " where status <> 'completed'"
    for part, how in CASES:
        found = rows(check_complete(root / f"{part}-{how}", 3), failed)
        print(part, how, found)
        if how == "fork":
            assert found == []
            continue
        (one,) = found
        assert one["failure_code"] == "bad_task"
        assert re.search(SAYS[how], one["failure_message"]), one
    found = rows(check_complete(root / "all", 12), failed)
    assert {one["failure_code"] for one in found} == {"bad_task"}
    assert len(found) == 12
    ended = sum("none ended well since" in one["failure_message"] for one in found)
    assert ended >= 12 - 2 * at_work.MOST_OF_RUN
    check_nothing_left(root, set())
