"""`prorl bench recovery`: how long a service needs after a fault until it works again.

It is measured over real processes; values are medians of `TRIALS`. Rows: from a RUN worker's
SIGKILL, and from its SIGSTOP, to the next lease of a rollout that it held; from the gateway's
SIGKILL with ten thousand open rollouts to its next lease; from a trainer that connects anew to its
first row. The policy is a script, no sandbox is used: what is measured is the service.
"""

from __future__ import annotations

import asyncio
import os
import signal
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import stamina

from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.client.client import Client
from prorl.client.http import Http
from prorl.config import ServiceConfig
from prorl.errors import NotFoundError, UnavailableError
from prorl.supervisor.service import Supervisor
from prorl.types import Json, Task

TRIALS, QUICK_TRIALS = 20, 3
SLOTS = 8
OPEN, QUICK_OPEN = 10_000, 1_000
POLL_S = 0.005
LONG_S = 3600
STEP_S = 0.2
LIMITS = {"max_attempts": 100, "max_worker_losses": 1000, "run_s": LONG_S}

Get = Callable[..., Awaitable[dict[str, Json]]]


async def run(quick: bool) -> Report:
    """Measure all four recoveries."""
    stamina.instrumentation.set_on_retry_hooks([])
    trials, open_ = (QUICK_TRIALS, QUICK_OPEN) if quick else (TRIALS, OPEN)
    async with _service(f"scripted:noop?delay_s={LONG_S}") as service:
        get, client = _getter(service), _client(service)
        await asyncio.to_thread(_submit, client, "held", SLOTS)
        killed = await _strikes(service, get, signal.SIGKILL, trials)
        frozen = await _strikes(service, get, signal.SIGSTOP, trials)
    async with _service(f"scripted:noop?delay_s={STEP_S}") as service:
        get, client = _getter(service), _client(service)
        await asyncio.to_thread(_submit, client, "many", open_ + open_ // 2, stream=True)
        reconnected = [await asyncio.to_thread(_first_row, service) for _ in range(trials)]
        restarted = [await _gateway(service, get, i) for i in range(trials)]
    rows = (
        _figure("worker_killed_to_lease_s", killed, "bar: 1"),
        _figure("worker_frozen_to_lease_s", frozen, "bar: 10"),
        _figure("gateway_killed_to_lease_s", restarted, f"{open_:,} open rollouts; bar: 5"),
        _figure("trainer_to_first_row_s", reconnected, "bar: 1"),
    )
    return Report(bench="recovery", machine=machine(), rows=rows)


def _figure(what: str, seconds: list[float], note: str) -> Figure:
    middle = statistics.median(seconds)
    return Figure(what=what, value=middle, unit="s", repeats=tuple(seconds), note=note)


@asynccontextmanager
async def _service(policy: str) -> AsyncIterator[Supervisor]:
    pool = {"slots": SLOTS}
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        values = {"root": Path(folder), "backends": (policy,)}
        values |= {"init": pool, "run": pool, "eval": pool}
        async with Supervisor(ServiceConfig.model_validate(values)) as service:
            yield service


def _client(service: Supervisor) -> Client:
    return Client(http=Http(service.url, service.config.token), token=service.config.token)


def _getter(service: Supervisor) -> Get:
    """GET by path, again and again while the gateway is away."""
    http = Http(service.url, service.config.token, retry_s=POLL_S)

    async def get(*path: str) -> dict[str, Json]:
        while True:
            try:
                return await asyncio.to_thread(http.request, "GET", "v1", *path)
            except (UnavailableError, NotFoundError):
                await asyncio.sleep(POLL_S)

    return get


def _tasks(count: int) -> Iterator[Task]:
    return (Task(task_id=str(i), env="noop", prompt="do nothing") for i in range(count))


def _submit(client: Client, name: str, count: int, *, stream: bool = False) -> None:
    client.create_run(
        run_id=name,
        limits=LIMITS,
        filter="none",
        delivery="stream" if stream else "store",
        max_unacked_groups=2 * count,
    )
    client.submit(name, _tasks(count), 1, key=name)


async def _until(
    get: Get, path: tuple[str, ...], holds: Callable[[dict[str, Json]], bool]
) -> dict[str, Json]:
    while not holds(found := await get(*path)):
        await asyncio.sleep(POLL_S)
    return found


async def _strikes(
    service: Supervisor, get: Get, number: signal.Signals, trials: int
) -> list[float]:
    """Seconds from each blow at the RUN worker to the next lease of what it held."""
    taken: list[float] = []
    for _ in range(trials):
        path = ("runs", "held", "rollouts", "0")
        before = await _until(get, path, lambda seen: seen["state"] == "running")
        taken.append(await _strike(get, path, before["attempt"], number))
        service.note_commits(len(taken) + 1000 * number)  # no crash loop: we did it
    return taken


async def _strike(get: Get, path: tuple[str, ...], attempt: int, number: signal.Signals) -> float:
    workers = (await get("status"))["workers"]
    pid = next(worker["pid"] for worker in workers if worker["role"] == "run")
    began = time.monotonic()
    os.kill(pid, number)
    await _until(get, path, lambda seen: bool(seen["attempt"] > attempt))
    return time.monotonic() - began


async def _gateway(service: Supervisor, get: Get, trial: int) -> float:
    """Seconds from the gateway's death to the first lease that its next life grants."""
    path = ("runs", "many")
    pid = service.children["gateway"].pid
    began = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    first = (await get(*path))["counts"]["queued"]
    await _until(get, path, lambda seen: seen["counts"]["queued"] < first)
    taken = time.monotonic() - began
    service.note_commits(trial + 1)
    return taken


def _first_row(service: Supervisor) -> float:
    """Seconds from a new connection of a trainer to its first group."""
    began = time.monotonic()
    with _client(service) as client:
        next(iter(client.stream("many", consumer="bench", max_groups=1)))
        return time.monotonic() - began
