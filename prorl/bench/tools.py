"""`prorl bench tools`: what a tool call costs, seen from the RUN side of the socket, beside what others pay for the same.

For each kind of sandbox that works here: bash `true`, bash `/bin/true`, IPython direct and jupyter, a file edit; alone, beside 31 idle
sandboxes, and with 32 busy ones. Rows of rivals carry `ratio` = their time over ours (`bash_true_p50_ms` of the first kind).
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import statistics
import time
from collections.abc import Awaitable, Callable

from prorl.bench import tool_rivals
from prorl.bench.report import Report, Row, machine, median
from prorl.protocols import Sandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.probe import probe_one
from prorl.sandbox.settings import KINDS
from prorl.sandbox.spawn import spawned
from prorl.types import SandboxSpec

SPEC = SandboxSpec(tools=("bash", "python", "files", "ipython", "jupyter"), memory_bytes=4 << 30)
BASH_BAR_MS, FORK_BAR_MS, DIRECT_BAR_MS, JUPYTER_BAR_MS, EDIT_BAR_MS = 0.5, 0.5, 1.0, 4.0, 1.0
IDLE = 31


async def run(quick: bool) -> Report:
    """All rows; `quick` ends within 50 s on two cores."""
    repeats = 100 if quick else 1000
    floor = statistics.median(tool_rivals.fork_exec(repeats))
    rows = [median("uds_echo_p50_ms", tool_rivals.uds_echo(repeats), "ms"), Row(what="fork_exec_p50_ms", value=floor, unit="ms")]
    kinds = [kind for kind in ("pyns", "bwrap", "apptainer", "local") if (await probe_one(kind)).works]
    for kind in KINDS:
        if kind not in kinds:
            rows.append(Row(what=f"bash_true_p50_ms.{kind}", value=float("nan"), unit="ms", note="does not work here"))
    for kind in kinds:
        rows += await _kind(kind, repeats, quick and kind != kinds[0], floor)
    rows += await _reliability(kinds[0], 300 if quick else 10_000)
    ours = next(row for row in rows if row.what == f"bash_true_p50_ms.{kinds[0]}").value
    return Report(bench="tools", machine=machine(), rows=(*rows, *_rivals(quick, ours)))


async def _kind(kind: str, repeats: int, only_first: bool, floor_ms: float) -> list[Row]:
    rows = []
    async with spawned(kind) as (host, _):
        ref = await host.start("bench/1/1", "run", SPEC)
        async with host.connect(ref) as sandbox:
            true = await _times(lambda: sandbox.call("bash", {"command": "true"}, 10.0), repeats)
            rows.append(_with_bar(f"bash_true_p50_ms.{kind}", true, BASH_BAR_MS))
            rows.append(Row(what=f"bash_true_p99_ms.{kind}", value=_p99(true), unit="ms"))
            if only_first:
                return rows
            forked = await _times(lambda: sandbox.call("bash", {"command": "/bin/true"}, 10.0), repeats)
            rows.append(_with_bar(f"bash_bin_true_p50_ms.{kind}", forked, floor_ms + FORK_BAR_MS))
            rows += await _interpreters(kind, sandbox, repeats)
            rows.append(_with_bar(f"file_edit_p50_ms.{kind}", await _edits(sandbox, repeats), EDIT_BAR_MS))
            rows += await _crowd(kind, host, sandbox, repeats)
    return rows


async def _interpreters(kind: str, sandbox: Sandbox, repeats: int) -> list[Row]:
    rows = []
    for tool, what, bar_ms in (("ipython", "ipython_direct", DIRECT_BAR_MS), ("jupyter", "ipython_jupyter", JUPYTER_BAR_MS)):
        first = await sandbox.call(tool, {"code": "1+1"}, 60.0)
        if first.exit_code != 0:
            rows.append(Row(what=f"{what}_p50_ms.{kind}", value=float("nan"), unit="ms", note=first.output.strip()[-80:]))
            continue
        found = await _times(lambda tool=tool: sandbox.call(tool, {"code": "1+1"}, 10.0), repeats)  # type: ignore[misc]
        rows.append(_with_bar(f"{what}_p50_ms.{kind}", found, bar_ms))
    return rows


async def _edits(sandbox: Sandbox, repeats: int) -> list[float]:
    await sandbox.call("files", {"command": "create", "path": "f", "file_text": "line\n" * 500 + "a\n"}, 5.0)
    words = ["a", "b"]

    async def edit() -> object:
        words.reverse()
        arguments = {"command": "str_replace", "path": "f", "old_str": f"{words[1]}\n", "new_str": f"{words[0]}\n"}
        done = await sandbox.call("files", {**arguments, "old_str": f"\n{words[1]}\n", "new_str": f"\n{words[0]}\n"}, 5.0)
        assert done.exit_code == 0, done.output
        return done

    return await _times(edit, repeats - repeats % 2)


async def _crowd(kind: str, host: UnixSandboxHost, sandbox: Sandbox, repeats: int) -> list[Row]:
    spec = SandboxSpec(tools=("bash",))
    refs = await asyncio.gather(*(host.start(f"bench/{number}/1", "run", spec) for number in range(2, IDLE + 2)))
    beside = await _times(lambda: sandbox.call("bash", {"command": "true"}, 10.0), repeats)
    rows = [_with_bar(f"bash_true_beside_31_idle_p50_ms.{kind}", beside, BASH_BAR_MS)]

    async def work(number: int) -> list[float]:
        async with host.connect(refs[number]) as other:
            return await _times(lambda: other.call("bash", {"command": "true"}, 10.0), max(10, repeats // 10))

    found = await asyncio.gather(*(work(number) for number in range(IDLE)))
    rows.append(median(f"bash_true_32_busy_p50_ms.{kind}", [value for values in found for value in values], "ms", note="no bar"))
    await asyncio.gather(*(host.stop(ref) for ref in refs))
    return [_lean(row) for row in rows]


async def _reliability(kind: str, count: int) -> list[Row]:
    """Outputs that were lost or cut while both cores are loaded by something else."""
    burners = [multiprocessing.get_context("spawn").Process(target=_burn, daemon=True) for _ in range(2)]
    for burner in burners:
        burner.start()
    bad = 0
    draw = random.Random(7)
    try:
        async with (
            spawned(kind) as (host, _),
            host.connect(await host.start("bench/1/1", "run", SandboxSpec(tools=("bash",)))) as sandbox,
        ):
            for number in range(count):
                size = draw.choice((1, 10, 100, 5000, 60_000))
                command = f"head -c {size} /dev/zero | tr '\\0' x; echo end{number}"
                done = await sandbox.call("bash", {"command": command}, 30.0)
                bad += done.output != "x" * size + f"end{number}\n"
    finally:
        for burner in burners:
            burner.kill()
            burner.join()
    return [Row(what=f"outputs_lost_or_cut.{kind}", value=bad, unit=f"of {count}", note=_verdict(bad, 0))]


def _burn() -> None:
    while True:
        pass


def _rivals(quick: bool, ours_ms: float) -> list[Row]:
    command = "prorl bench tools --json"
    found = [
        ("tmux_busy_poll_p50_ms", tool_rivals.tmux_busy_poll(30 if quick else 200), 5.0),
        ("tmux_as_agents_p50_ms", tool_rivals.tmux_as_agents(5 if quick else 30), 200.0),
        ("poll_10ms_pty_p50_ms", tool_rivals.poll_10ms_pty(50 if quick else 200), 40.0),
        ("swe_rex_local_p50_ms", None, 0.0),
    ]
    rows = []
    for what, values, bar in found:
        if values is None:
            rows.append(Row(what=what, value=float("nan"), unit="ms", note="not installed (extra `bench`, and tmux)"))
            continue
        value = statistics.median(values)
        ratio = value / ours_ms
        note = f"ours is {ratio:.0f}x faster; bar {bar:g}x: {'met' if ratio >= bar else 'missed'}"
        rows.append(Row(what=what, value=value, unit="ms", repeats=tuple(values), rival="bash_true_p50_ms", rival_value=ours_ms,
                        rival_command=command, ratio=ratio, note=note))  # fmt: skip
    return rows


async def _times(work: Callable[[], Awaitable[object]], repeats: int) -> list[float]:
    await work()
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        await work()
        found.append((time.perf_counter() - begin) * 1e3)
    return found


def _p99(values: list[float]) -> float:
    return sorted(values)[int(len(values) * 0.99)]


def _with_bar(what: str, values: list[float], bar_ms: float) -> Row:
    return _lean(median(what, values, "ms", note=_verdict(statistics.median(values), bar_ms)))


def _verdict(value: float, bar: float) -> str:
    return f"bar {bar:.3g}: {'met' if value <= bar else 'missed'}"


def _lean(row: Row) -> Row:
    """Keep at most 200 raw values in the report."""
    step = max(1, len(row.repeats) // 200)
    return Row(what=row.what, value=row.value, unit=row.unit, repeats=row.repeats[::step], note=row.note)
