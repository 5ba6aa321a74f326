"""`prorl bench pipeline`: what the service itself costs, through three stages that do nothing.

Env and policy are `noop`, the log is on.

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
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import stamina

from prorl.bench.first_lease import first_lease
from prorl.bench.machine import machine
from prorl.bench.meter import pss_mb
from prorl.bench.report import Figure, Report, median
from prorl.bench.served import client_of, cpu_s, wait_finished
from prorl.client.client import Client
from prorl.config import ServiceConfig
from prorl.flight import trace
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
    rows = [first_lease(sizes.starts)]
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        async with Supervisor(_config(Path(folder) / "plain")) as service:
            client, count = client_of(service), sizes.burst
            memory = await asyncio.to_thread(_warm_up, client, count)
            bursts = [
                await _measured_burst(client, f"burst-{i}", count) for i in range(sizes.repeats)
            ]
            rows += _burst_rows(bursts, count, memory)
        rate = statistics.median(burst.rate for burst in bursts) / 5
        async with Supervisor(_config(Path(folder) / "traced", trace=True)) as service:
            trace_dir = service.config.root / "trace"
            rows += await _handoffs(client_of(service), trace_dir, rate, sizes.paced_s)
    return Report(bench="pipeline", machine=machine(), rows=tuple(rows))


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


def _warm_up(client: Client, count: int) -> float:
    """A burst that is not measured; the largest memory seen on the way, in MiB.

    To look at it costs too much while CPU is measured.
    """
    seen = [0.0]
    _burst(client, "warm-up", count, look=lambda: seen.append(pss_mb(os.getpid())))
    return max(seen)


def _burst(client: Client, name: str, count: int, look: Callable[[], None] = lambda: None) -> None:
    _create(client, name)
    client.submit(name, _tasks(name, count), 1, key=name, last=True)
    wait_finished(client, name, POLL_S, look)


async def _measured_burst(client: Client, name: str, count: int) -> Burst:
    before_s, start = cpu_s(), time.perf_counter()
    await asyncio.to_thread(_burst, client, name, count)
    return Burst(rate=count / (time.perf_counter() - start), cpu_s=cpu_s() - before_s)


def _burst_rows(bursts: list[Burst], count: int, memory_mib: float) -> list[Figure]:
    rates = [burst.rate for burst in bursts]
    costs = [burst.cpu_s / count * 1e3 for burst in bursts]
    total = sum(burst.cpu_s for burst in bursts)
    megabytes, note = memory_mib * (1 << 20) / 1e6, "sum of PSS, client included; bar: under 1500"
    return [
        median("rollouts_per_s", rates, "1/s", cpu_s=total),
        median("cpu_ms_per_rollout", costs, "ms", cpu_s=total, note="bar: at most 2"),
        Figure(what="rss_mb_total", value=megabytes, unit="MB", note=note),
    ]


async def _handoffs(client: Client, trace_dir: Path, rate: float, length_s: float) -> list[Figure]:
    start = time.monotonic()
    await asyncio.to_thread(_paced, client, "paced", rate, length_s)
    marks = list(trace.read(trace_dir, since_s=start))
    return [_handoff(edge, trace.handoffs(marks, edge), rate) for edge in EDGES]


def _handoff(edge: str, seconds: Iterable[float], rate: float) -> Figure:
    times = tuple(1e3 * one for one in seconds)
    what = f"handoff_p50_ms.{edge}"
    if not times:
        return Figure(what=what, value=float("nan"), unit="ms", note="no row was traced")
    note = f"{len(times)} rows at {rate:.0f}/s; bar: at most 1"
    return replace(median(what, times, "ms", note=note), repeats=times[:200])


def _paced(client: Client, name: str, rate: float, length_s: float) -> None:
    """Submit one task at a time at an even rate (open loop)."""
    _create(client, name)
    count = max(20, int(rate * length_s))
    start = time.monotonic()
    for i, task in enumerate(_tasks(name, count)):
        time.sleep(max(0.0, start + i / rate - time.monotonic()))
        client.submit(name, [task], 1, key=f"{name}-{i}", last=i == count - 1)
    wait_finished(client, name, POLL_S)
