"""`prorl bench sandbox`: what a sandbox costs to start, keep and stop.

It is measured for each kind that works here. `cold_start` is from `host.start` to the answer of
bash `true`; its bar is the raw launch of the kind plus a bare Python inside plus 25 ms, all three
measured in turn. `drift` compares the last tenth of many start-stop cycles with the first, each
against raw launches in between. CPU is that of sandboxd and everything below it (`meter.py`). The
full run, 1,000 cycles of each kind, takes about 6 minutes on two cores.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from prorl.bench.meter import CpuMeter, counts, cpu_meter, pss_mb
from prorl.bench.report import Figure, Report, median, verdict
from prorl.protocols import Sandbox
from prorl.sandbox import kinds
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.node.probe import probe_kind
from prorl.sandbox.spawn import spawned
from prorl.types import SandboxSpec

SPEC = SandboxSpec(tools=("bash",))
START_OVER_MS, WARM_BAR_MS, STOP_BAR_MS, CPU_BAR_MS, DRIFT_BAR = 25.0, 5.0, 50.0, 15.0, 1.25
SETTLE_S = 5.0


class SandboxSizes(NamedTuple):
    cycles: int
    many_cycles: int
    idle: int


QUICK = SandboxSizes(cycles=15, many_cycles=30, idle=50)
FULL = SandboxSizes(cycles=50, many_cycles=1000, idle=200)


class SandboxTimes(NamedTuple):
    cold_ms: float
    stop_ms: float


async def run(quick: bool) -> Report:
    if not quick:
        print("bench sandbox: about 6 minutes on two cores; --quick takes one", file=sys.stderr)
    rows: list[Figure] = []
    for kind in kinds.names():
        probe = await probe_kind(kind)
        if probe.works:
            rows += await _kind(kind, QUICK if quick else FULL)
        else:
            rows.append(
                Figure(
                    name=f"cold_start_p50_ms.{kind}",
                    value=float("nan"),
                    unit="ms",
                    note=probe.reason,
                )
            )
    return Report(bench="sandbox", rows=tuple(rows))


async def _kind(kind: str, sizes: SandboxSizes) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        about = kinds.load(kind)
        about.install(folder)
        command = about.bare.format(folder=folder).split()
        raw = partial(subprocess.run, command, stdout=subprocess.DEVNULL, check=True)
        with cpu_meter() as meter:
            async with spawned(kind) as (host, pid):
                meter.watch(pid)
                rows = await _cold(host, kind, raw, sizes.cycles)
                rows.append(await _cpu(host, kind, meter, sizes.cycles))
                rows += await _flat(host, pid, kind, raw, sizes.many_cycles)
                rows.append(await _idle(host, pid, kind, sizes.idle))
        async with spawned(kind, warm=2) as (host, _):
            rows.append(await _warm(host, kind, sizes.cycles))
    return rows


async def _cold(
    host: UnixSandboxHost, kind: str, raw: Callable[[], object], count: int
) -> list[Figure]:
    raws, bares, cycles = [], [], []
    ref = await host.start("bench/0/1", "run", SPEC)
    async with host.connect(ref) as sandbox:
        await _bare_python_ms(sandbox)
        await _start_and_stop(host)
        for _ in range(count):
            raws.append(_timed_ms(raw))
            bares.append(await _bare_python_ms(sandbox))
            cycles.append(await _start_and_stop(host))
    await host.stop(ref)
    bar_ms = statistics.median(raws) + statistics.median(bares) + START_OVER_MS
    return [
        median(f"raw_launch_p50_ms.{kind}", raws, "ms", note=kinds.load(kind).bare),
        median(f"bare_python_p50_ms.{kind}", bares, "ms"),
        _barred(f"cold_start_p50_ms.{kind}", [times.cold_ms for times in cycles], bar_ms),
        _barred(f"stop_p50_ms.{kind}", [times.stop_ms for times in cycles], STOP_BAR_MS),
    ]


async def _bare_python_ms(sandbox: Sandbox) -> float:
    begin = time.perf_counter()
    await sandbox.exec(["python3", "-I", "-S", "-c", "pass"], 20.0)
    return (time.perf_counter() - begin) * 1e3


async def _start_and_stop(host: UnixSandboxHost) -> SandboxTimes:
    begin = time.perf_counter()
    ref = await host.start("bench/1/1", "run", SPEC)
    async with host.connect(ref) as sandbox:
        await sandbox.call("bash", {"command": "true"}, 20.0)
    first = time.perf_counter()
    await host.stop(ref)
    return SandboxTimes((first - begin) * 1e3, (time.perf_counter() - first) * 1e3)


async def _cpu(host: UnixSandboxHost, kind: str, meter: CpuMeter, count: int) -> Figure:
    before_s = meter.cpu_s()
    for _ in range(count):
        await _start_and_stop(host)
    used_s = meter.cpu_s() - before_s
    value = used_s * 1e3 / count
    note = f"by {meter.source}" + (
        f"; {verdict(value, CPU_BAR_MS)}" if kind == kinds.lightest() else ""
    )
    return Figure(name=f"cpu_ms_per_life.{kind}", value=value, unit="ms", cpu_s=used_s, note=note)


async def _warm(host: UnixSandboxHost, kind: str, count: int) -> Figure:
    await _start_and_stop(host)
    times_ms = []
    for _ in range(count):
        while (await host.status())["warm"] < 1:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)  # its shell starts behind its `ok`
        times_ms.append((await _start_and_stop(host)).cold_ms)
    return _barred(f"warm_start_p50_ms.{kind}", times_ms, WARM_BAR_MS)


async def _flat(
    host: UnixSandboxHost, pid: int, kind: str, raw: Callable[[], object], cycles: int
) -> list[Figure]:
    """All that can be counted before and after many cycles; the last tenth's time by the
    first's.
    """
    ref = await host.start("bench/0/1", "run", SPEC)
    await host.stop(ref)
    count = partial(counts, pid, Path(ref.socket_path).parent, _root_of(pid))
    before = await _settled(count)
    ours, raws = [], []
    for _ in range(cycles):
        ours.append((await _start_and_stop(host)).cold_ms)
        raws.append(_timed_ms(raw))
    after = await _settled(count)
    tenth = max(1, cycles // 10)
    last, first = (
        statistics.median(ours[part]) / statistics.median(raws[part])
        for part in (slice(-tenth, None), slice(tenth))
    )
    drift, note = last / first, verdict(last / first, DRIFT_BAR)
    return [
        _leftovers(kind, before, after, cycles),
        Figure(name=f"drift.{kind}", value=drift, unit="x", note=note),
    ]


def _leftovers(kind: str, before: dict[str, int], after: dict[str, int], cycles: int) -> Figure:
    grown = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    note = f"after {cycles} cycles: {grown or 'exactly flat'} ({', '.join(before)})"
    value = float(sum(map(abs, grown.values())))
    return Figure(name=f"leftovers.{kind}", value=value, unit="", note=note)


async def _settled(count: Callable[[], dict[str, int]]) -> dict[str, int]:
    """The counts when they no longer change.

    A thread of sandboxd empties the trash after a sandbox has ended.
    """
    until = time.monotonic() + SETTLE_S
    counts = count()
    while True:
        await asyncio.sleep(0.2)
        again = count()
        if again == counts or time.monotonic() > until:
            return again
        counts = again


async def _idle(host: UnixSandboxHost, pid: int, kind: str, count: int) -> Figure:
    before_mb = pss_mb(pid)
    refs = await asyncio.gather(
        *(host.start(f"bench/{number}/1", "run", SPEC) for number in range(count))
    )
    await asyncio.sleep(1.0)  # their shells start behind their `ok`
    added_mb = pss_mb(pid) - before_mb
    await asyncio.gather(*(host.stop(ref) for ref in refs))
    return Figure(
        name=f"idle_{count}_pss_mb.{kind}",
        value=added_mb,
        unit="MB",
        note=f"{added_mb / count:.2f} each",
    )


def _root_of(pid: int) -> Path:
    argument = Path(f"/proc/{pid}/cmdline").read_text().rstrip("\0").rpartition("\0")[2]
    return Path(json.loads(argument)["root"])


def _timed_ms(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def _barred(name: str, values: list[float], bar: float) -> Figure:
    return median(name, values, "ms", note=verdict(statistics.median(values), bar))
