"""`prorl bench pipeline`: what the service itself costs, through three stages that do nothing.

Env and policy are `noop`, the log is on.

Rows, all over real processes: `first_lease_s` from the command line to the first rollout out of the
queue; `rollouts_per_s` and `cpu_ms_per_rollout` (supervisor, gateway, sandboxd, stages and store
together) with at least 64 rollouts in flight; `handoff_p50_ms.<edge>` from the moment a row is
offered on an edge to the moment its consumer has it, at a fifth of that rate; `rss_mb_total`, the
sum of the processes' proportional set sizes while they work; `accept_p99_ms`, how long a submission
waits until it is on disk, at 200 a second over HTTP, beside what nobody can beat: a bare
`fdatasync` after appending 4 KiB, at the same rate on the same disk. The bars are in the notes.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp
import stamina

from prorl.bench.meter import pss_mb, tree
from prorl.bench.report import Figure, Report, median, verdict
from prorl.client.client import Client, connect
from prorl.config import ServiceConfig
from prorl.deploy.running import client_of
from prorl.errors import NotFoundError, UnavailableError, UserError
from prorl.flight import trace
from prorl.linux import procfs
from prorl.supervisor.service import Supervisor
from prorl.types import Task

IN_FLIGHT = 128
POLL_S = 0.1
ACCEPT_HZ = 200.0
EDGES = ("lease", "ready", "ran", "scored")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSizes:
    repeats: int
    burst: int
    """Rollouts of one repeat at full rate."""
    paced_s: float
    starts: int
    accept_s: float


QUICK = PipelineSizes(repeats=3, burst=400, paced_s=6.0, starts=2, accept_s=3.0)
FULL = PipelineSizes(repeats=5, burst=2000, paced_s=20.0, starts=5, accept_s=15.0)


async def run(quick: bool) -> Report:
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
    rows.append(await _accepted(sizes.accept_s))
    return Report(bench="pipeline", rows=tuple(rows))


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
    while not has_finished(client, name):
        look()
        time.sleep(POLL_S)


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
        Figure(name="rss_mb_total", value=megabytes, unit="MB", note=note),
    ]


async def _handoffs(client: Client, trace_dir: Path, rate: float, length_s: float) -> list[Figure]:
    start = time.monotonic()
    await asyncio.to_thread(_paced, client, "paced", rate, length_s)
    marks = list(trace.read(trace_dir, since_s=start))
    return [_handoff(edge, trace.handoffs(marks, edge), rate) for edge in EDGES]


def _handoff(edge: str, seconds: Iterable[float], rate: float) -> Figure:
    times = tuple(1e3 * duration_s for duration_s in seconds)
    name = f"handoff_p50_ms.{edge}"
    if not times:
        return Figure(name=name, value=float("nan"), unit="ms", note="no row was traced")
    note = f"{len(times)} rows at {rate:.0f}/s; bar: at most 1"
    return replace(median(name, times, "ms", note=note), repeats=times[:200])


def _paced(client: Client, name: str, rate: float, length_s: float) -> None:
    """Submit one task at a time at an even rate (open loop)."""
    _create(client, name)
    count = max(20, int(rate * length_s))
    start = time.monotonic()
    for i, task in enumerate(_tasks(name, count)):
        time.sleep(max(0.0, start + i / rate - time.monotonic()))
        client.submit(name, [task], 1, key=f"{name}-{i}", last=i == count - 1)
    while not has_finished(client, name):
        time.sleep(POLL_S)


def first_lease(starts: int) -> Figure:
    times = [_first_lease() for _ in range(starts)]
    return median("first_lease_s", times, "s", note="`prorl run` typed to first lease; bar: 8")


def _first_lease() -> float:
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        tasks, root = Path(folder) / "tasks.jsonl", Path(folder) / "root"
        tasks.write_text('{"task_id": "1", "env": "noop", "prompt": "do nothing"}\n')
        options = ["--tasks", str(tasks), "--policy", "noop", "--name", "first", "--quiet"]
        argv = [sys.executable, "-m", "prorl.cli", "run", *options, "--root", str(root)]
        start = time.perf_counter()
        process = subprocess.Popen(argv, stdout=subprocess.DEVNULL)
        try:
            while not _leased(root):
                if process.poll():
                    raise UnavailableError(f"`prorl run` ended with {process.returncode}")
                time.sleep(0.01)
            took_s = time.perf_counter() - start
            process.wait(60)
            return took_s
        finally:
            process.kill()
            process.wait()


def _leased(root: Path) -> bool:
    try:
        with connect(root, retry_s=0.01) as client:
            states: dict[str, int] = client.run("first")["counts"]
    except (OSError, UserError, NotFoundError, UnavailableError):
        return False
    return sum(states.values()) > states.get("queued", 0)


def cpu_s() -> float:
    """CPU seconds so far of this process and all that live below it."""
    return sum(procfs.cpu_s(pid) for pid in tree(os.getpid()))


def has_finished(client: Client, run_id: str) -> bool:
    """Returns whether a run is finished. Raises UnavailableError for one that ended otherwise."""
    view = client.run(run_id)
    if view["state"] not in ("proving", "open", "finished"):
        raise UnavailableError(f"run {run_id} is {view['state']}: {view['stalled']}")
    return bool(view["state"] == "finished")


async def _accepted(length_s: float) -> Figure:
    """The row of `accept`: a gateway without workers, so that nothing but the log is at work."""
    with tempfile.TemporaryDirectory(prefix="prorl-accept-", dir=Path.cwd()) as folder:  # no tmpfs
        handle = os.open(Path(folder) / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

        async def append(index: int) -> None:
            os.write(handle, b"\0" * 4096)
            os.fdatasync(handle)

        bare_ms = await _at_rate(length_s, append)
        os.close(handle)
        config = _config(Path(folder) / "root").model_dump() | {"workers": "nodes"}
        async with Supervisor(ServiceConfig.model_validate(config)) as service:
            client_of(service).create_run(run_id="accept")
            headers = {"authorization": f"Bearer {service.config.token}"}
            async with aiohttp.ClientSession(headers=headers) as session:
                url = f"{service.url}/v1/runs/accept/groups"

                async def submit(index: int) -> None:
                    task = {"task_id": f"t{index}", "env": "noop", "prompt": "six times seven?"}
                    body = {"groups": [{"task": task, "n": 8, "key": str(index)}]}
                    async with session.post(url, json=body) as answer:
                        assert answer.status == 202, await answer.text()

                await _at_rate(0.5, lambda index: submit(-1 - index))
                began_s = cpu_s()
                accepted_ms = await _at_rate(length_s, submit)
                spent_s = cpu_s() - began_s
    ours, bare = (statistics.quantiles(times, n=100)[98] for times in (accepted_ms, bare_ms))
    bar = 3 * bare + 5.0
    row = Figure(
        name="accept_p99_ms",
        value=ours,
        unit="ms",
        repeats=tuple(round(value, 3) for value in accepted_ms),
        cpu_s=spent_s,
        note=f"{verdict(ours, bar)}: 3 x bare + 5 ms; p50 {statistics.median(accepted_ms):.2f}",
    )
    return row.beside("bare fdatasync p99", bare, "append 4 KiB, os.fdatasync, at 200/s")


async def _at_rate(length_s: float, work: Callable[[int], Awaitable[None]]) -> list[float]:
    """Start `work` at `ACCEPT_HZ`, whatever earlier ones do; milliseconds of each."""
    times_ms: list[float] = []
    begin = time.perf_counter() + 0.05

    async def measure(index: int) -> None:
        await asyncio.sleep(begin + index / ACCEPT_HZ - time.perf_counter())
        started = time.perf_counter()
        await work(index)
        times_ms.append((time.perf_counter() - started) * 1e3)

    async with asyncio.TaskGroup() as group:
        for index in range(int(length_s * ACCEPT_HZ)):
            group.create_task(measure(index))
    return times_ms
