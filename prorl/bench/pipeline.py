"""`prorl bench pipeline`: what the service itself costs, through three stages that do nothing (env
and policy `noop`), log on.

Rows, all over real processes: `first_lease_s` from the command line to the first rollout out of the
queue; `rollouts_per_s` and `cpu_ms_per_rollout` (supervisor, gateway, sandboxd, stages and store
together) with at least 64 rollouts in flight; `handoff_p50_ms.<edge>` from the moment a row is
offered on an edge to the moment its consumer has it, at a fifth of that rate; `rss_mb_total`, the
sum of the processes' proportional set sizes while they work. There is no rival in the same role to
start here; the bars are in the notes.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import stamina

from prorl.bench.report import Figure, Report, machine
from prorl.client.client import Client
from prorl.client.http import Http
from prorl.config import ServiceConfig
from prorl.errors import NotFoundError, UnavailableError, UserError
from prorl.flight import trace
from prorl.linux.procfs import cpu_s, descendants, pss_bytes
from prorl.supervisor.service import Supervisor
from prorl.types import Task

IN_FLIGHT = 128
POLL_S = 0.1
EDGES = ("lease", "ready", "ran", "scored")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """How many rollouts are measured, and how often."""

    repeats: int
    burst: int
    """Rollouts of one repeat at full rate."""
    paced_s: float
    starts: int


QUICK = Sizes(repeats=3, burst=400, paced_s=6.0, starts=2)
FULL = Sizes(repeats=5, burst=2000, paced_s=20.0, starts=5)


async def run(quick: bool) -> Report:
    """Measure everything; under 50 s when quick."""
    sizes = QUICK if quick else FULL
    stamina.instrumentation.set_on_retry_hooks([])
    rows = [_first_lease(sizes)]
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        async with Supervisor(_config(Path(folder) / "plain")) as service:
            client = _client(service)
            memory = await asyncio.to_thread(
                _burst, client, "warm-up", sizes.burst, watch_memory=True
            )
            bursts = [
                await _measured_burst(client, f"burst-{i}", sizes.burst)
                for i in range(sizes.repeats)
            ]
            rows += _burst_rows(bursts, sizes.burst, memory)
        rate = statistics.median(burst.rate for burst in bursts) / 5
        async with Supervisor(_config(Path(folder) / "traced", trace=True)) as service:
            rows += await _handoffs(
                _client(service), service.config.root / "trace", rate, sizes.paced_s
            )
    return Report(bench="pipeline", machine=machine(), rows=tuple(rows))


def _client(service: Supervisor) -> Client:
    return Client(http=Http(service.url, service.config.token), token=service.config.token)


def _config(root: Path, *, trace: bool = False) -> ServiceConfig:
    pool = {"slots": IN_FLIGHT}
    values = {
        "root": root,
        "backends": ("scripted:noop",),
        "init": pool,
        "run": pool,
        "eval": pool,
        "trace": trace,
    }
    return ServiceConfig.model_validate(values)


def _tasks(name: str, count: int) -> Iterator[Task]:
    return (Task(task_id=f"{name}/{i}", env="noop", prompt="do nothing") for i in range(count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Burst:
    """One repeat at full rate."""

    rate: float
    cpu_s: float


def _create(client: Client, name: str) -> None:
    client.create_run(run_id=name, max_open_groups=IN_FLIGHT)


def _wait(client: Client, name: str, *, watch_memory: bool = False) -> int:
    """Until the run is finished; the largest sum of PSS seen on the way, which costs too much to
    look at while CPU is measured.
    """
    largest = 0
    while client.run(name)["state"] != "finished":
        if watch_memory:
            largest = max(largest, sum(pss_bytes(pid) for pid in _service_pids()))
        time.sleep(POLL_S)
    return largest


def _burst(client: Client, name: str, count: int, *, watch_memory: bool = False) -> int:
    _create(client, name)
    client.submit(name, _tasks(name, count), 1, key=name, last=True)
    return _wait(client, name, watch_memory=watch_memory)


async def _measured_burst(client: Client, name: str, count: int) -> Burst:
    before_s, start = _cpu_s(), time.perf_counter()
    await asyncio.to_thread(_burst, client, name, count)
    return Burst(rate=count / (time.perf_counter() - start), cpu_s=_cpu_s() - before_s)


def _service_pids() -> list[int]:
    return [os.getpid(), *descendants(os.getpid())]


def _cpu_s() -> float:
    return sum(cpu_s(pid) for pid in _service_pids())


def _burst_rows(bursts: list[Burst], count: int, memory: int) -> list[Figure]:
    rates = tuple(burst.rate for burst in bursts)
    costs = tuple(burst.cpu_s / count * 1e3 for burst in bursts)
    total = sum(burst.cpu_s for burst in bursts)
    return [
        Figure(
            what="rollouts_per_s",
            value=statistics.median(rates),
            unit="1/s",
            repeats=rates,
            cpu_s=total,
        ),
        Figure(
            what="cpu_ms_per_rollout",
            value=statistics.median(costs),
            unit="ms",
            repeats=costs,
            cpu_s=total,
            note="bar: at most 2",
        ),
        Figure(
            what="rss_mb_total",
            value=memory / 1e6,
            unit="MB",
            note="sum of PSS, client included; bar: under 1500",
        ),
    ]


async def _handoffs(client: Client, trace_dir: Path, rate: float, length_s: float) -> list[Figure]:
    start = time.monotonic()
    await asyncio.to_thread(_paced, client, "paced", rate, length_s)
    marks = list(trace.read(trace_dir, since_s=start))
    rows = []
    for edge in EDGES:
        times = tuple(1e3 * seconds for seconds in trace.handoffs(marks, edge))
        note = (
            f"{len(times)} rows at {rate:.0f}/s; bar: at most 1" if times else "no row was traced"
        )
        middle = statistics.median(times) if times else float("nan")
        rows.append(
            Figure(
                what=f"handoff_p50_ms.{edge}",
                value=middle,
                unit="ms",
                repeats=times[:200],
                note=note,
            )
        )
    return rows


def _paced(client: Client, name: str, rate: float, length_s: float) -> None:
    """Submit one task at a time at an even rate (open loop)."""
    _create(client, name)
    count = max(20, int(rate * length_s))
    start = time.monotonic()
    for i, task in enumerate(_tasks(name, count)):
        time.sleep(max(0.0, start + i / rate - time.monotonic()))
        client.submit(name, [task], 1, key=f"{name}-{i}", last=i == count - 1)
    _wait(client, name)


def _first_lease(sizes: Sizes) -> Figure:
    times = tuple(_one_first_lease() for _ in range(sizes.starts))
    return Figure(
        what="first_lease_s",
        value=statistics.median(times),
        unit="s",
        repeats=times,
        note="`prorl run` typed to first lease; bar: 8",
    )


def _one_first_lease() -> float:
    with (
        tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder,
        _prorl_run(Path(folder)) as start,
    ):
        while not _leased(Path(folder) / "root"):
            time.sleep(0.01)
        return time.perf_counter() - start


@contextmanager
def _prorl_run(folder: Path) -> Iterator[float]:
    tasks = folder / "tasks.jsonl"
    tasks.write_text('{"task_id": "1", "env": "noop", "prompt": "do nothing"}\n')
    argv = [
        sys.executable,
        "-m",
        "prorl.cli",
        "run",
        "--tasks",
        str(tasks),
        "--policy",
        "noop",
        "--root",
        str(folder / "root"),
        "--name",
        "first",
    ]
    start = time.perf_counter()
    process = subprocess.Popen([*argv, "--quiet"], stdout=subprocess.DEVNULL)
    try:
        yield start
        process.wait(60)
    finally:
        process.kill()
        process.wait()


def _leased(root: Path) -> bool:
    try:
        service = ServiceConfig.model_validate_json((root / "service.json").read_text())
        if not service.http_port:
            return False
        run = Http(
            f"http://{service.host}:{service.http_port}", service.token, retry_s=0.01
        ).request("GET", "v1", "runs", "first")
    except (OSError, UserError, NotFoundError, UnavailableError):
        return False
    states: dict[str, int] = run["counts"]
    return sum(states.values()) > states.get("queued", 0)
