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
import json
import statistics
import sys
import tempfile
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from prorl.bench.children import Answering
from prorl.bench.report import Figure, Report, machine, median
from prorl.bench.synthetic import Shape, group, write_run
from prorl.types import Json

RUN = "bench"
TRAJECTORIES, SHORT = 512, 64
SHAPE = Shape(n=8, num_tokens=16384, sampled_share=0.25, num_turns=14, vocab_size=150_000)
COMMAND = "python -m prorl.bench.stream_paths"


class Lane(NamedTuple):
    """A path and how many rounds it takes."""

    name: str
    rounds: int
    quick: int


PATHS = (
    Lane("received", 15, 7),
    Lane("tensors", 15, 7),
    Lane("mapped", 15, 7),
    Lane("first_batch", 30, 15),
    Lane("socket", 15, 7),
    Lane("json_lists", 3, 1),
    Lane("pickled_lists", 3, 1),
    Lane("dataproto", 7, 3),
)


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
        """Add the figures of one round."""
        self.seconds.append(said["seconds"])
        self.cpu_s.append(said["cpu_s"])
        self.more.append(said["more"])
        self.peak_mib, self.num_tokens, self.checksum = (
            said["peak_mib"],
            said["num_tokens"],
            said["checksum"],
        )

    @property
    def median_s(self) -> float:
        """Median seconds of the rounds."""
        return statistics.median(self.seconds)


async def run(quick: bool, device: str = "cpu") -> Report:
    """Measure all rows; `device` is where the tensors end up."""
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        dirs = await asyncio.to_thread(make_runs, Path(folder))
        found = await measure(dirs, quick, device)
    checksums = {
        name: (rounds.num_tokens, rounds.checksum)
        for name, rounds in found.items()
        if name != "first_batch"
    }
    assert len(set(checksums.values())) == 1, f"the paths disagree: {checksums}"
    return Report(bench="stream", machine=machine(), rows=tuple(rows(found)))


def make_runs(folder: Path) -> list[Path]:
    """The run, and a short one for `same_host_first_batch_ms`."""
    groups = [group(i, SHAPE) for i in range(TRAJECTORIES // SHAPE.n)]
    long = write_run(folder / RUN, groups, RUN)
    short = write_run(folder / f"{RUN}-short", groups[: SHORT // SHAPE.n], f"{RUN}-short")
    return [long, short]


async def measure(dirs: list[Path], quick: bool, device: str) -> dict[str, Rounds]:
    """Start every process, then go around the paths."""
    found = {path.name: Rounds() for path in PATHS}
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(_module("stream_server", *map(str, dirs)))
        rivals = await stack.enter_async_context(_module("stream_rivals", str(dirs[0])))
        location, port = (json.loads(server.ready)["location"], json.loads(rivals.ready)["port"])
        where = (str(location), str(port), RUN, "--device", device)
        consumers = {}
        for path in PATHS:
            consumer = _module("stream_paths", path.name, *where)
            consumers[path.name] = await stack.enter_async_context(consumer)
            await consumer.ask()
        for number in range(max(path.rounds for path in PATHS)):
            for path in PATHS:
                if number < (path.quick if quick else path.rounds):
                    found[path.name].add(await consumers[path.name].ask())
    return found


def _module(name: str, *arguments: str) -> Answering:
    """A child of this folder that has a round done at each line."""
    return Answering(sys.executable, "-m", f"prorl.bench.{name}", *arguments)


def rows(found: dict[str, Rounds]) -> list[Figure]:
    """The rows of the report, in the order of the bars."""
    received, socket, tensors = found["received"], found["socket"], found["tensors"]
    payload = socket.more[-1]["bytes"]
    read = "bar 0.5; into tensors, every byte read"
    return [
        _bytes_per_token(received),
        _rate("received_vs_socket", received, socket, payload, "bar 0.7; batches in memory"),
        _rate("tensors_vs_socket", tensors, socket, payload, read),
        *(_times(name, tensors, found[rival], rival, bar) for name, rival, bar in _FORMATS),
        Figure(
            what="vs_transferqueue",
            value=tensors.median_s * 1e3,
            unit="ms",
            rival="TransferQueue",
            note="bar 2; not measured: it brings Ray and is not an extra of ours",
        ),
        _first_batch(found["first_batch"]),
        _mapped(found["mapped"]),
        *(_peak(name, rounds) for name, rounds in found.items() if name != "first_batch"),
    ]


def _bytes_per_token(received: Rounds) -> Figure:
    each = [more["wire_bytes"] / received.num_tokens for more in received.more]
    bar = 4 + 4 * SHAPE.sampled_share + 0.25
    note = f"bar {bar:g}; TCP bytes as the kernel counts them"
    return median("bytes_per_token", each, "B/token", note=note)


def _first_batch(first: Rounds) -> Figure:
    short_ms = statistics.median(more["short_s"] for more in first.more) * 1e3
    note = f"bar 1.5 times that at {SHORT}: {first.median_s * 1e3 / short_ms:.2f}"
    row = median("same_host_first_batch_ms", _ms(first.seconds), "ms", note=note)
    return row.beside("64 trajectories", short_ms, f"{COMMAND} first_batch")


def _mapped(mapped: Rounds) -> Figure:
    """Mapped anew each round, so that no page is there yet."""
    gigabytes = mapped.more[-1]["bytes"] / 1e9
    memcpy_s = statistics.median(more["memcpy_s"] for more in mapped.more)
    row = Figure(
        what="same_host_read_vs_memcpy",
        value=gigabytes / mapped.median_s,
        unit="GB/s",
        repeats=tuple(gigabytes / s for s in mapped.seconds),
        cpu_s=statistics.median(mapped.cpu_s),
        note="bar 0.4; mapped anew each round, every byte read",
    )
    rival = gigabytes / memcpy_s
    return row.beside("memcpy, warm", rival, f"{COMMAND} mapped", more_is_better=True)


_FORMATS = (
    ("vs_json_lists", "json_lists", 50),
    ("vs_pickled_lists", "pickled_lists", 30),
    ("vs_dataproto", "dataproto", 10),
)


def _rate(what: str, ours: Rounds, socket: Rounds, payload: float, note: str) -> Figure:
    row = Figure(
        what=what,
        value=payload / ours.median_s / 1e9,
        unit="GB/s",
        repeats=tuple(payload / s / 1e9 for s in ours.seconds),
        cpu_s=statistics.median(ours.cpu_s),
        note=note,
    )
    rival = payload / socket.median_s / 1e9
    return row.beside("raw socket", rival, f"{COMMAND} socket", more_is_better=True)


def _times(what: str, ours: Rounds, rival: Rounds, name: str, bar: int) -> Figure:
    cpu_s = statistics.median(ours.cpu_s)
    row = median(what, _ms(ours.seconds), "ms", cpu_s=cpu_s, note=f"bar {bar}")
    return row.beside(name, rival.median_s * 1e3, f"{COMMAND} {name}")


def _peak(name: str, rounds: Rounds) -> Figure:
    return Figure(
        what=f"peak_memory_{name}",
        value=rounds.peak_mib,
        unit="MiB",
        note="growth of the consumer's resident size over all rounds",
    )


def _ms(seconds: list[float]) -> tuple[float, ...]:
    return tuple(s * 1e3 for s in seconds)
