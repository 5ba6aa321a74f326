"""Helpers for tests of whole services: their settings, model servers as processes, and a run that
is fed while something strikes it.
"""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

from prorl.cli.progress import follow
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.errors import UnavailableError
from prorl.supervisor.service import Supervisor
from prorl.supervisor.specs import free_url
from prorl.types import Json, Task

T = TypeVar("T")


def settings(root: Path, kind: str, *backends: str, **more: Json) -> ServiceConfig:
    """A service on a root with sandboxes of a kind."""
    fields = {"root": root, "backends": backends, "sandbox": {"kind": kind}, **more}
    return ServiceConfig.model_validate(fields)


def slots(count: int) -> dict[str, Json]:
    """Settings of so many slots in each stage."""
    return {stage: {"slots": count} for stage in ("init", "run", "eval")}


APART: dict[str, Json] = {
    "workers": 1,
    "eval": {"own_processes": 1},
    "store": {"own_process": True},
}
"""Gateway, the chain, EVAL and the store are a process each, joined by sockets."""


class Listening:
    """A module as a process that says `ready`, on a port that it keeps over its lives."""

    def __init__(self, *words: str) -> None:
        self.url = free_url()
        self._words = [word.format(port=self.url.rpartition(":")[2]) for word in words]
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        root = Path(__file__).parents[2]
        self._process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *self._words), stdout=asyncio.subprocess.PIPE, cwd=root
        )
        assert self._process.stdout is not None
        assert (await self._process.stdout.readline()).startswith(b"ready")

    def strike(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        if self._process is not None and self._process.returncode is None:
            self.strike(signal.SIGKILL)
            await self._process.wait()


async def view(client: Client) -> dict[str, Json]:
    """The run, if the gateway is there."""
    try:
        return await asyncio.to_thread(client.run, "r")
    except UnavailableError:
        return {"counts": {}, "commits": -1}


async def _queued(client: Client) -> int:
    return int((await view(client))["counts"].get("queued", 1 << 20))


async def struck(
    running: Supervisor,
    client: Client,
    strikes: Coroutine[Any, Any, T],
    tasks: Callable[[int, int], list[Task]],
    wave: int,
    at_least: int = 0,
) -> tuple[int, T]:
    """Submit waves of tasks (by the first one's number and how many) while strikes are to come, and
    see the run to its end. How many rollouts, and what the strikes gave.
    """
    total = 0
    async with asyncio.TaskGroup() as group:
        finished = group.create_task(follow(client, running, "r", 0, quiet=True))
        striking = group.create_task(strikes)
        last = False
        while not last:
            while not striking.done() and await _queued(client) >= wave:
                await asyncio.sleep(0.1)
            last = striking.done() and total + wave >= at_least
            batch, key = tasks(total, wave), f"w{total}"
            await asyncio.to_thread(client.submit, "r", batch, 1, key=key, last=last)
            total += wave
        await asyncio.wait_for(asyncio.shield(finished), 240)
    return total, striking.result()
