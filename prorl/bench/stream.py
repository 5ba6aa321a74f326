"""`prorl bench stream`: a run's trajectories from the store's Flight endpoint into tensors.

They stand beside a raw socket and the usual formats. 512 trajectories of 16k tokens, a quarter of
them sampled, are written as a run directory and served by the replay's own endpoint. Each path has
a consumer process of its own (so that memory peaks do not mix); a process with all rivals'
producers has the same trajectories in memory in each rival's own form. Rounds go around all paths,
so that a busy neighbour meets all of them; medians are reported, and every round's checksum must be
equal. Bars stand in the notes. Nothing here is a test.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from prorl.bench.children import NO_RIVALS, RIVALS, Answering
from prorl.bench.report import Figure, Report, median
from prorl.bench.stored import write_run
from prorl.bench.synthetic import Shape, group
from prorl.types import Json

PATHS = {"received": (15, 7), "tensors": (15, 7), "mapped": (15, 7), "first_batch": (30, 15)}
"""Each with its rounds, in full and quick."""
RIVAL_PATHS = {
    "socket": (15, 7),
    "json_lists": (3, 1),
    "pickled_lists": (3, 1),
    "dataproto": (7, 3),
}
RUN = "bench"
TRAJECTORIES, SHORT = 512, 64
SHAPE = Shape(n=8, num_tokens=16384, sampled_share=0.25, num_turns=14, vocab_size=150_000)
COMMAND = "python -m prorl.bench.stream_paths"


async def run(quick: bool) -> Report:
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        dirs = await asyncio.to_thread(make_runs, Path(folder))
        found = await measure(dirs, quick)
    checksums = {
        name: (rounds.num_tokens, rounds.checksum)
        for name, rounds in found.items()
        if name != "first_batch"
    }
    assert len(set(checksums.values())) == 1, f"the paths disagree: {checksums}"
    return Report(bench="stream", rows=tuple(rows(found)))


def make_runs(folder: Path) -> list[Path]:
    groups = [group(i, SHAPE) for i in range(TRAJECTORIES // SHAPE.n)]
    long = write_run(folder / RUN, groups, RUN)
    short = write_run(folder / f"{RUN}-short", groups[: SHORT // SHAPE.n], f"{RUN}-short")
    return [long, short]


async def measure(dirs: list[Path], quick: bool) -> dict[str, Rounds]:
    """Start every process, then go around the paths."""
    paths = PATHS | (RIVAL_PATHS if RIVALS else {})
    found = {name: Rounds() for name in paths}
    async with AsyncExitStack() as stack:

        async def child(module: str, *arguments: str) -> Answering:
            made = Answering("-m", f"prorl.bench.{module}", *arguments)
            return await stack.enter_async_context(made)

        server = await child("stream_server", *map(str, dirs))
        location, port = str(server.ready["location"]), 0
        if RIVALS:
            port = (await child("rivals.stream", str(dirs[0]))).ready["port"]
        consumers = {}
        for name in paths:
            consumers[name] = await child("stream_paths", name, location, str(port), RUN)
            await consumers[name].ask()
        for number in range(max(map(max, paths.values()))):
            for name, rounds in paths.items():
                if number < rounds[quick]:
                    found[name].add(await consumers[name].ask())
    return found


@dataclass(slots=True)
class Rounds:
    """What a path's consumer said in its rounds, the warm-up left out."""

    seconds: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_mib: float = 0.0
    num_tokens: int = 0
    checksum: int = 0
    more: list[dict[str, float]] = field(default_factory=list)

    def add(self, said: dict[str, Json]) -> None:
        self.seconds.append(said["seconds"])
        self.cpu_s.append(said["cpu_s"])
        self.more.append(said["more"])
        self.peak_mib = said["peak_mib"]
        self.num_tokens = said["num_tokens"]
        self.checksum = said["checksum"]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)


def rows(found: dict[str, Rounds]) -> list[Figure]:
    received, tensors, mapped = found["received"], found["tensors"], found["mapped"]
    wire = [more["wire_bytes"] / received.num_tokens for more in received.more]
    bar = 4 + 4 * SHAPE.sampled_share + 0.25
    note = f"bar {bar:g}; TCP bytes as the kernel counts them"
    figures = [median("bytes_per_token", wire, "B/token", note=note)]
    if "socket" in found:
        size, raw = found["socket"].more[-1]["bytes"], found["socket"].median_s
        for name, ours, note in (
            ("received", received, "bar 0.7; batches in memory"),
            ("tensors", tensors, "bar 0.5; into tensors, every byte read"),
        ):
            row = _speed(f"{name}_vs_socket", ours, size, note)
            rival = size / raw / 1e9
            command = f"{COMMAND} socket"
            figures.append(row.beside("raw socket", rival, command, more_is_better=True))
        for name, least in (("json_lists", 50), ("pickled_lists", 30), ("dataproto", 10)):
            row = _time(f"vs_{name}", tensors, f"bar {least}")
            figures.append(row.beside(name, found[name].median_s * 1e3, f"{COMMAND} {name}"))
    else:
        figures += [_time(f"{name}_ms", found[name], NO_RIVALS) for name in ("received", "tensors")]

    first = found["first_batch"]
    short_ms = statistics.median(more["short_s"] for more in first.more) * 1e3
    note = f"bar 1.5 times that at {SHORT}: {first.median_s * 1e3 / short_ms:.2f}"
    row = _time("same_host_first_batch_ms", first, note)
    figures.append(row.beside(f"{SHORT} trajectories", short_ms, f"{COMMAND} first_batch"))

    size = mapped.more[-1]["bytes"]
    memcpy = size / statistics.median(more["memcpy_s"] for more in mapped.more) / 1e9
    note = "bar 0.4; mapped anew each round, every byte read"
    row = _speed("same_host_read_vs_memcpy", mapped, size, note)
    figures.append(row.beside("memcpy, warm", memcpy, f"{COMMAND} mapped", more_is_better=True))

    note = "growth of the consumer's resident size over all rounds"
    return figures + [
        Figure(what=f"peak_memory_{name}", value=one.peak_mib, unit="MiB", note=note)
        for name, one in found.items()
        if name != "first_batch"
    ]


def _speed(what: str, ours: Rounds, size: float, note: str) -> Figure:
    return Figure(
        what=what,
        value=size / ours.median_s / 1e9,
        unit="GB/s",
        repeats=tuple(size / s / 1e9 for s in ours.seconds),
        cpu_s=statistics.median(ours.cpu_s),
        note=note,
    )


def _time(what: str, ours: Rounds, note: str) -> Figure:
    times_ms = [s * 1e3 for s in ours.seconds]
    return median(what, times_ms, "ms", cpu_s=statistics.median(ours.cpu_s), note=note)
