"""`prorl bench tools`: what a tool call costs, seen from the RUN side of the socket.

It stands beside what others pay for the same. For each kind of sandbox that works here: bash
`true`, IPython direct and jupyter; outputs lost under load; worker-hours of a million rollouts.
Rows of rivals carry `ratio` = their time over ours (`bash_true_p50_ms` of the first kind).
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from prorl.bench.children import NO_RIVALS, RIVALS
from prorl.bench.meter import times_ms
from prorl.bench.report import Figure, Report, median, verdict
from prorl.protocols import Sandbox
from prorl.sandbox import kinds
from prorl.sandbox.node.probe import probe_kind
from prorl.sandbox.spawn import spawned
from prorl.tools.catalogue import CATALOGUE
from prorl.types import SandboxSpec

SPEC = SandboxSpec(tools=tuple(CATALOGUE), memory_bytes=4 << 30)
BASH_BAR_MS = 0.5
INTERPRETERS = (("ipython", "ipython_direct", 1.0), ("jupyter", "ipython_jupyter", 4.0))
"""Tool, name in its row, bar in milliseconds."""
TMUX = "the program tmux and the extra `bench`"
REX = "pip install swe-rex; in no extra of ours, since it brings bashlex, which is GPL"
DOCKER = "a Docker daemon with the image debian:bookworm-slim"


async def run(quick: bool) -> Report:
    if not quick:
        print("bench tools: about 2 minutes on two cores; --quick takes one", file=sys.stderr)
    repeats = 100 if quick else 1000
    echo, note = uds_echo(repeats), "JSON there and back between two processes"
    rows = [
        _lean(median("uds_echo_p50_ms", echo, "ms", note=f"{note}: the floor of any call")),
        Figure(name="uds_echo_p99_ms", value=_p99(echo), unit="ms"),
    ]
    order = kinds.names()
    works = {kind: await probe_kind(kind) for kind in order}
    able = [kind for kind in order if works[kind].works]
    hours, ours_ms = list[Figure](), math.nan
    for kind in able:  # lightest first: in quick runs only the first has all rows
        async with (
            spawned(kind) as (host, _),
            host.connect(await host.start("bench/1/1", "run", SPEC)) as sandbox,
        ):
            times = await _times(lambda: sandbox.call("bash", {"command": "true"}, 10.0), repeats)
            true = _with_bar(f"bash_true_p50_ms.{kind}", times, BASH_BAR_MS)
            rows += [true, Figure(name=f"bash_true_p99_ms.{kind}", value=_p99(times), unit="ms")]
            if kind == able[0] or not quick:
                rows += await _interpreters(kind, sandbox, repeats)
        ours_ms = true.value if kind == able[0] else ours_ms
        hours.append(worker_hours(kind, true.value, await _start_ms(kind, 5 if quick else 20)))
    rows += [
        _absent(f"bash_true_p50_ms.{kind}", works[kind].reason)
        for kind in order
        if kind not in able
    ]
    rows += await _reliability(able[0], 300 if quick else 10_000)
    return Report(bench="tools", rows=(*rows, *hours, *await _rivals(quick, ours_ms)))


ROLLOUTS, ACTIONS = 1_000_000, 150


def worker_hours(name: str, call_ms: float, start_ms: float) -> Figure:
    """Returns what a million rollouts wait for their substrate: no model, and commands that do
    nothing.

    >>> worker_hours("half a millisecond", 0.5, 36.0).value
    30.83
    """
    calls_h = ROLLOUTS * ACTIONS * call_ms / 3.6e6
    starts_h = ROLLOUTS * start_ms / 3.6e6
    note = (
        f"{calls_h:.0f} in calls of {call_ms:.3g} ms, {starts_h:.0f} in starts of {start_ms:.3g} ms"
    )
    value = round(calls_h + starts_h, 2)
    return Figure(name=f"worker_hours.{name}", value=value, unit="h/1M x 150", note=note)


async def _start_ms(kind: str, repeats: int) -> float:
    """Measures from the request for a cold sandbox to the answer of its first command."""
    spec, times_ms = SandboxSpec(tools=("bash",)), []
    async with spawned(kind) as (host, _):
        for number in range(repeats + 1):
            begin = time.perf_counter()
            async with host.connect(await host.start(f"cold/{number}/1", "run", spec)) as sandbox:
                await sandbox.call("bash", {"command": "true"}, 30.0)
                times_ms.append((time.perf_counter() - begin) * 1e3)
            await host.stop(sandbox.ref)
    return statistics.median(times_ms[1:])


def _absent(name: str, why: str) -> Figure:
    """A row without a value, which says why it has none."""
    return Figure(name=name, value=float("nan"), unit="ms", note=why)


async def _interpreters(kind: str, sandbox: Sandbox, repeats: int) -> list[Figure]:
    rows = []
    for tool, name, bar_ms in INTERPRETERS:
        row_name = f"{name}_p50_ms.{kind}"
        first = await sandbox.call(tool, {"code": "1+1"}, 60.0)
        if first.exit_code != 0:
            rows.append(_absent(row_name, first.output.strip()[-80:]))
            continue
        times = await _times(lambda tool=tool: sandbox.call(tool, {"code": "1+1"}, 10.0), repeats)  # type: ignore[misc]
        rows.append(_with_bar(row_name, times, bar_ms))
    return rows


async def _reliability(kind: str, count: int) -> list[Figure]:
    """Outputs that were lost or cut while both cores are loaded by something else."""
    spec, bad, draw = SandboxSpec(tools=("bash",)), 0, random.Random(7)
    with _burning():
        async with (
            spawned(kind) as (host, _),
            host.connect(await host.start("bench/1/1", "run", spec)) as sandbox,
        ):
            for number in range(count):
                size = draw.choice((1, 10, 100, 5000, 60_000))
                command = f"head -c {size} /dev/zero | tr '\\0' x; echo end{number}"
                done = await sandbox.call("bash", {"command": command}, 30.0)
                bad += done.output != "x" * size + f"end{number}\n"
    row_name, note = f"outputs_lost_or_cut.{kind}", verdict(bad, 0)
    return [Figure(name=row_name, value=bad, unit=f"of {count}", note=note)]


@contextmanager
def _burning() -> Iterator[None]:
    """Every core has something else to do."""
    spawn = multiprocessing.get_context("spawn")
    burners = [spawn.Process(target=_burn, daemon=True) for _ in os.sched_getaffinity(0)]
    for burner in burners:
        burner.start()
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.join()


def _burn() -> None:
    while True:
        pass


async def _rivals(quick: bool, ours_ms: float) -> list[Figure]:
    if not RIVALS:
        return [_absent("tmux_busy_poll_p50_ms", NO_RIVALS)]
    from configs.rivals.bench import tools as rivals

    measured = [
        ("tmux_busy_poll", rivals.tmux_busy_poll(30 if quick else 200), 5.0, TMUX),
        ("tmux_as_agents", rivals.tmux_as_agents(5 if quick else 30), 100.0, TMUX),
        ("poll_10ms_pty", rivals.poll_10ms_pty(50 if quick else 200), 40.0, ""),
        ("swe_rex_local", await rivals.swe_rex_local(5 if quick else 30), 100.0, REX),
        ("docker_exec", rivals.docker_exec(5 if quick else 30), 40.0, DOCKER),
    ]
    rows = [
        rival(f"{name}_p50_ms", took.calls_ms if took else None, bar, ours_ms, absent)
        for name, took, bar, absent in measured
    ]
    return rows + [
        worker_hours(name, statistics.median(took.calls_ms), took.start_ms)
        for name, took, _, _ in measured
        if took is not None
    ]


def rival(name: str, values: list[float] | None, bar: float, ours_ms: float, absent: str) -> Figure:
    """A rival's row; one without figures says why it has none."""
    if values is None:
        return _absent(name, f"not installed: {absent}")
    ratio = statistics.median(values) / ours_ms
    note = f"ours is {ratio:.0f}x faster; bar {bar:g}x: {'met' if ratio >= bar else 'missed'}"
    row = median(name, values, "ms", note=note)
    return row.beside("bash_true_p50_ms", ours_ms, "prorl bench tools --json", more_is_better=True)


async def _times(work: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    await work()
    times_ms = []
    for _ in range(repeats):
        begin = time.perf_counter()
        await work()
        times_ms.append((time.perf_counter() - begin) * 1e3)
    return times_ms


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _with_bar(name: str, values: list[float], bar_ms: float) -> Figure:
    return _lean(median(name, values, "ms", note=verdict(statistics.median(values), bar_ms)))


def _lean(row: Figure) -> Figure:
    """Keep at most 200 raw values in the report."""
    return replace(row, repeats=row.repeats[:: max(1, len(row.repeats) // 200)])


ECHO = """
import socket, sys
s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); s.listen(1); print("ready", flush=True)
c, _ = s.accept()
while (data := c.recv(65536)): c.sendall(data)
"""
CALL = json.dumps(
    {"id": 1, "op": "call", "tool": "bash", "arguments": {"command": "true"}, "timeout_s": 5}
).encode()


def uds_echo(repeats: int) -> list[float]:
    """JSON there and back over a Unix socket between two processes: the floor of any tool call."""
    with tempfile.TemporaryDirectory() as folder:
        server = subprocess.Popen(
            [sys.executable, "-c", ECHO, f"{folder}/s"], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        server.stdout.readline()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"{folder}/s")

            def once() -> None:
                client.sendall(CALL)
                json.loads(client.recv(65536))

            times = times_ms(once, repeats)
        server.wait()
        server.stdout.close()
    return times
