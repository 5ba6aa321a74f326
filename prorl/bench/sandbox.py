"""`prorl bench sandbox`: what a sandbox costs to start, keep and stop, for each kind that works here.

`cold_start` is from `host.start` to the answer of bash `true`; its bar is the raw launch of the kind plus a bare Python inside plus
25 ms, all three measured in this run. CPU is that of sandboxd and everything below it, from /proc, lives that have ended included.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from prorl.bench.report import Report, Row, machine, median
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.kinds.apptainer import make_support
from prorl.sandbox.probe import probe_one
from prorl.sandbox.settings import KINDS
from prorl.sandbox.spawn import spawned
from prorl.types import SandboxSpec

SPEC = SandboxSpec(tools=("bash",))
START_OVER_MS, WARM_BAR_MS, STOP_BAR_MS, CPU_BAR_MS, DRIFT_BAR = 25.0, 5.0, 50.0, 15.0, 1.25
TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
RAW = {
    "pyns": "unshare --user --map-root-user --mount --pid --fork --net --ipc --uts --mount-proc /bin/true",
    "bwrap": "bwrap --unshare-all --die-with-parent --ro-bind / / --proc /proc --dev /dev /bin/true",
    "apptainer": "apptainer -s exec --userns --containall --cleanenv --no-home --net --network none --bind /usr:/usr:ro {image} /bin/true",
    "local": "/bin/true",
}
"""The kind's own launcher with the same walls around `true`."""


async def run(quick: bool) -> Report:
    """All rows; `quick` ends within 50 s on two cores."""
    rows: list[Row] = []
    for kind in KINDS:
        found = await probe_one(kind)
        if found.works:
            rows += await _kind(kind, quick)
        else:
            rows.append(Row(what=f"cold_start_p50_ms.{kind}", value=float("nan"), unit="ms", note=found.reason))
    return Report(bench="sandbox", machine=machine(), rows=tuple(rows))


async def _kind(kind: str, quick: bool) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        make_support(folder)
        return await _measure(kind, quick, RAW[kind].format(image=f"{folder}/skeleton"))


async def _measure(kind: str, quick: bool, command: str) -> list[Row]:
    lives = 10 if quick else 50
    raw_launch = partial(subprocess.run, command.split(), stdout=subprocess.DEVNULL, check=True)
    raw = statistics.median([_timed_ms(raw_launch) for _ in range(lives)])
    rows = [Row(what=f"raw_launch_p50_ms.{kind}", value=raw, unit="ms", note=RAW[kind])]
    async with spawned(kind) as (host, pid):
        bare = await _bare_python(host, lives)
        rows.append(median(f"bare_python_p50_ms.{kind}", bare, "ms"))
        bar_ms = raw + statistics.median(bare) + START_OVER_MS
        colds, stops, cpu_s = await _lives(host, pid, lives)
        rows.append(_barred(f"cold_start_p50_ms.{kind}", colds, bar_ms))
        rows.append(_barred(f"stop_p50_ms.{kind}", stops, STOP_BAR_MS))
        per_life = cpu_s * 1e3 / lives
        note = f"bar {CPU_BAR_MS:g}: {'met' if per_life <= CPU_BAR_MS else 'missed'}" if kind == "pyns" else ""
        rows.append(Row(what=f"cpu_ms_per_life.{kind}", value=per_life, unit="ms", cpu_s=cpu_s, note=note))
        for parallel in (8,) if quick else (32, 64):
            rows.append(await _parallel(host, kind, parallel))
        rows += await _flat(host, pid, kind, raw_launch, 30 if quick else 1000)
        if kind != "apptainer" or not quick:
            rows.append(await _idle(host, pid, kind, 20 if quick else 200))
    async with spawned(kind, warm=2) as (host, _):
        rows.append(_barred(f"warm_start_p50_ms.{kind}", await _warm(host, lives), WARM_BAR_MS))
    return rows


async def _bare_python(host: UnixSandboxHost, count: int) -> list[float]:
    ref = await host.start("bench/0/1", "run", SPEC)
    async with host.connect(ref) as sandbox:
        found = []
        for _ in range(count + 1):
            begin = time.perf_counter()
            await sandbox.exec(["python3", "-I", "-S", "-c", "pass"], 20.0)
            found.append((time.perf_counter() - begin) * 1e3)
    await host.stop(ref)
    return found[1:]


async def _life(host: UnixSandboxHost) -> tuple[float, float]:
    """One sandbox: milliseconds to its first answer, and to its end."""
    begin = time.perf_counter()
    ref = await host.start("bench/1/1", "run", SPEC)
    async with host.connect(ref) as sandbox:
        await sandbox.call("bash", {"command": "true"}, 20.0)
    first = time.perf_counter()
    await host.stop(ref)
    return (first - begin) * 1e3, (time.perf_counter() - first) * 1e3


async def _lives(host: UnixSandboxHost, pid: int, count: int) -> tuple[list[float], list[float], float]:
    await _life(host)
    before = _cpu_s(pid)
    found = [await _life(host) for _ in range(count)]
    return [cold for cold, _ in found], [stop for _, stop in found], _cpu_s(pid) - before


async def _warm(host: UnixSandboxHost, count: int) -> list[float]:
    await _life(host)
    found = []
    for _ in range(count):
        while (await host.status())["warm"] < 1:
            await asyncio.sleep(0.02)
        await asyncio.sleep(0.05)  # its shell starts behind its `ok`
        found.append((await _life(host))[0])
    return found


async def _parallel(host: UnixSandboxHost, kind: str, count: int) -> Row:
    begin = time.perf_counter()
    refs = await asyncio.gather(*(host.start(f"bench/{number}/1", "run", SPEC) for number in range(count)))
    rate = count / (time.perf_counter() - begin)
    await asyncio.gather(*(host.stop(ref) for ref in refs))
    return Row(what=f"parallel_starts_per_s_{count}.{kind}", value=rate, unit="1/s")


async def _flat(host: UnixSandboxHost, pid: int, kind: str, raw: Callable[[], object], lives: int) -> list[Row]:
    """Processes, mounts, sockets and descriptors before and after many lives; the last tenth's time against the first's."""
    ref = await host.start("bench/0/1", "run", SPEC)
    await host.stop(ref)
    sockets = os.path.dirname(ref.socket_path)
    before = _counts(pid, sockets)
    ours: list[float] = []
    raws: list[float] = []
    for _ in range(lives):
        ours.append((await _life(host))[0])
        raws.append(_timed_ms(raw))
    after = _counts(pid, sockets)
    tenth = max(1, lives // 10)
    drift = (statistics.median(ours[-tenth:]) / statistics.median(raws[-tenth:])) / (
        statistics.median(ours[:tenth]) / statistics.median(raws[:tenth])
    )
    grown = {name: after[name] - before[name] for name in before if after[name] != before[name]}
    note = f"after {lives} lives: {grown or 'exactly flat'}"
    return [
        Row(what=f"leftovers.{kind}", value=float(sum(map(abs, grown.values()))), unit="", note=note),
        Row(what=f"drift.{kind}", value=drift, unit="x", note=f"bar {DRIFT_BAR}: {'met' if drift <= DRIFT_BAR else 'missed'}"),
    ]


async def _idle(host: UnixSandboxHost, pid: int, kind: str, count: int) -> Row:
    before = sum(map(_pss_mb, _tree(pid)))
    refs = await asyncio.gather(*(host.start(f"bench/{number}/1", "run", SPEC) for number in range(count)))
    after = sum(map(_pss_mb, _tree(pid)))
    await asyncio.gather(*(host.stop(ref) for ref in refs))
    return Row(what=f"idle_{count}_pss_mb.{kind}", value=after - before, unit="MB", note=f"{(after - before) / count:.2f} each")


def _timed_ms(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return (time.perf_counter() - begin) * 1e3


def _barred(what: str, values: list[float], bar: float) -> Row:
    middle = statistics.median(values)
    return median(what, values, "ms", note=f"bar {bar:.3g}: {'met' if middle <= bar else 'missed'}")


def _tree(root: int) -> list[int]:
    """A process and all its descendants."""
    found, pending = [root], [root]
    while pending:
        parent = pending.pop()
        try:
            children = [int(word) for word in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
        except OSError:
            continue
        found += children
        pending += children
    return found


def _cpu_s(root: int) -> float:
    """CPU seconds of a process, its descendants and their children that have ended."""
    total = 0.0
    for pid in _tree(root):
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(field) for field in fields[11:15]) * TICK_S
    return total


def _pss_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def _counts(pid: int, sockets: str) -> dict[str, int]:
    """What must not grow."""
    tree = _tree(pid)
    return {
        "processes": len(tree),
        "descriptors": sum(len(os.listdir(f"/proc/{each}/fd")) for each in tree),
        "mounts": len(Path("/proc/self/mounts").read_text().splitlines()),
        "sockets": sum(sockets in line for line in Path("/proc/net/unix").read_text().splitlines()),
    }
