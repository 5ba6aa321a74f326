"""How long a submission waits until it is on disk: `accept_p99_ms` at 200 requests a second.

Over real HTTP.
The rival is what nobody can beat: a bare `fdatasync` after appending 4 KiB, at the same rate on the
same disk in the same run. The bar is 3 times its p99 plus 5 ms. The gateway runs in a process of
its own, as in a service.
"""

from __future__ import annotations

import asyncio
import os
import resource
import secrets
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import orjson

from prorl.bench.children import disk, line_of, python
from prorl.bench.machine import machine
from prorl.bench.report import Figure, Report
from prorl.config import ServiceConfig
from prorl.errors import UnavailableError
from prorl.types import Json

RATE_HZ = 200.0
PAGE = b"\0" * 4096

RIVAL_COMMAND = "append 4 KiB, os.fdatasync, at 200/s"


async def run(quick: bool) -> Report:
    """Measure; `quick` takes about ten seconds."""
    seconds = 4.0 if quick else 15.0
    with tempfile.TemporaryDirectory(prefix="prorl-accept-", dir=disk()) as folder:
        bare = await _bare(Path(folder) / "bare", seconds)
        accepted, cpu_s = await _accept(Path(folder), seconds)
    row = _row(accepted, bare, cpu_s)
    return Report(bench="accept", machine=machine(), rows=(row,))


def _row(accepted: list[float], bare: list[float], cpu_s: float) -> Figure:
    ours, rival = _p99(accepted), _p99(bare)
    bar = 3 * rival + 5.0
    middles = f"p50 {statistics.median(accepted):.2f} ms (bare {statistics.median(bare):.2f})"
    row = Figure(
        what="accept_p99_ms",
        value=ours,
        unit="ms",
        repeats=tuple(round(value, 3) for value in accepted),
        cpu_s=cpu_s,
        note=f"{'' if ours <= bar else 'missed: '}{middles}; bar 3 x bare + 5 ms = {bar:.2f}",
    )
    return row.beside("bare fdatasync p99", rival, RIVAL_COMMAND)


def _p99(values: list[float]) -> float:
    return statistics.quantiles(values, n=100)[98]


async def _paced(count: int, work: Callable[[int], Awaitable[None]]) -> list[float]:
    """Start `work` at the rate, whatever earlier ones do; milliseconds from its planned start."""
    taken: list[float] = []
    begin = time.perf_counter() + 0.05

    async def one(index: int) -> None:
        planned = begin + index / RATE_HZ
        await asyncio.sleep(planned - time.perf_counter())
        started = time.perf_counter()
        await work(index)
        taken.append((time.perf_counter() - started) * 1e3)

    async with asyncio.TaskGroup() as group:
        for index in range(count):
            group.create_task(one(index))
    return taken


async def _bare(path: Path, seconds: float) -> list[float]:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    async def append(index: int) -> None:
        os.write(handle, PAGE)
        os.fdatasync(handle)

    try:
        return await _paced(int(seconds * RATE_HZ), append)
    finally:
        os.close(handle)


async def _accept(folder: Path, seconds: float) -> tuple[list[float], float]:
    token = secrets.token_urlsafe(16)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    async with (
        _gateway(folder, token) as url,
        aiohttp.ClientSession(headers={"authorization": f"Bearer {token}"}) as session,
    ):
        await _post(session, f"{url}/v1/runs", {"run_id": "accept"}, 201)

        async def submit(index: int) -> None:
            body = {"groups": [{"task": _task(index), "n": 8, "key": str(index)}]}
            await _post(session, f"{url}/v1/runs/accept/groups", body, 202)

        await _paced(int(RATE_HZ / 2), lambda index: submit(-1 - index))
        taken = await _paced(int(seconds * RATE_HZ), submit)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return taken, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _task(index: int) -> dict[str, Json]:
    return {
        "task_id": f"t{index}",
        "env": "noop",
        "prompt": "What is six times seven?",
        "data": {"answer": "42"},
    }


async def _post(session: aiohttp.ClientSession, url: str, body: object, expected: int) -> None:
    async with session.post(
        url, data=orjson.dumps(body), headers={"content-type": "application/json"}
    ) as answer:
        if answer.status != expected:
            raise UnavailableError(f"{url}: HTTP {answer.status} {await answer.text()}")
        await answer.read()


@asynccontextmanager
async def _gateway(folder: Path, token: str) -> AsyncIterator[str]:
    """A gateway process on a root of its own."""
    with tempfile.TemporaryDirectory(prefix="prorl-") as sockets:
        config = ServiceConfig(
            root=folder / "root", socket_dir=Path(sockets), token=token, backends=("scripted:noop",)
        )
        path = folder / "service.json"
        path.write_text(config.model_dump_json())
        path.chmod(0o600)
        async with python("-m", "prorl.service", "--config", str(path), quiet=True) as process:
            line = await line_of(process)
            if not line.startswith(b"ready "):
                raise UnavailableError(
                    "the gateway did not start: run `python -m prorl.service --config ...` to"
                    " see why"
                )
            yield str(orjson.loads(line[6:])["http"])
