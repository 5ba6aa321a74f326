"""`prorl bench stream`: a run's trajectories from the store's Flight endpoint into tensors, beside
a raw socket and the usual formats.

512 trajectories of 16k tokens, a quarter of them sampled, are written as a run directory and served
by the replay's own endpoint. Each path has a consumer process of its own (so that memory peaks do
not mix); a process with all rivals' producers has the same trajectories in memory in each rival's
own form. Rounds go around all paths, so that a busy neighbour meets all of them; medians are
reported, and every round's checksum must be equal. Bars stand in the notes. Nothing here is a test.
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

from prorl.bench.report import Figure, Report, machine
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
        server = await stack.enter_async_context(
            Process("prorl.bench.stream_server", *map(str, dirs))
        )
        rivals = await stack.enter_async_context(Process("prorl.bench.stream_rivals", str(dirs[0])))
        where = (str(server.ready["location"]), str(rivals.ready["port"]), RUN, "--device", device)
        consumers = {}
        for path in PATHS:
            consumers[path.name] = await stack.enter_async_context(
                Process("prorl.bench.stream_paths", path.name, *where)
            )
            await consumers[path.name].round()
        for number in range(max(path.rounds for path in PATHS)):
            for path in PATHS:
                if number < (path.quick if quick else path.rounds):
                    found[path.name].add(await consumers[path.name].round())
    return found


class Process:
    """A `python -m` child that says `ready {json}`, takes a round per line, and ends when its
    standard input closes.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-m", module, *arguments]
        self._process: asyncio.subprocess.Process | None = None
        self.ready: dict[str, Json] = {}

    async def __aenter__(self) -> Process:
        pipe = asyncio.subprocess.PIPE
        self._process = await asyncio.create_subprocess_exec(
            *self._command, stdin=pipe, stdout=pipe
        )
        word, _, values = (await self._line()).partition(" ")
        assert word == "ready", f"{' '.join(self._command)} said {word!r}"
        self.ready = json.loads(values)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(10):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def round(self) -> dict[str, Json]:
        """Have one round done; what the child said of it."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        await self._process.stdin.drain()
        return dict(json.loads(await self._line()))

    async def _line(self) -> str:
        assert self._process is not None
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        assert line, f"{' '.join(self._command)} ended"
        return line


def rows(found: dict[str, Rounds]) -> list[Figure]:
    """The rows of the report, in the order of the bars."""
    received, socket = found["received"], found["socket"]
    payload = socket.more[-1]["bytes"]
    wire = [more["wire_bytes"] for more in received.more]
    share = SHAPE.sampled_share
    return [
        Figure(
            what="bytes_per_token",
            value=statistics.median(wire) / received.num_tokens,
            unit="B/token",
            repeats=tuple(w / received.num_tokens for w in wire),
            note=f"bar {4 + 4 * share + 0.25:g}; TCP bytes as the kernel counts them",
        ),
        _rate("received_vs_socket", received, socket, payload, "bar 0.7; batches in memory"),
        _rate(
            "tensors_vs_socket",
            found["tensors"],
            socket,
            payload,
            "bar 0.5; into tensors, every byte read",
        ),
        *(
            _times(name, found["tensors"], found[rival], rival, bar)
            for name, rival, bar in _FORMATS
        ),
        Figure(
            what="vs_transferqueue",
            value=found["tensors"].median_s * 1e3,
            unit="ms",
            rival="TransferQueue",
            note="bar 2; not measured: it brings Ray and is not an extra of ours",
        ),
        *_same_host(found["first_batch"], found["mapped"]),
        *(_peak(name, rounds) for name, rounds in found.items() if name != "first_batch"),
    ]


def _same_host(first: Rounds, mapped: Rounds) -> list[Figure]:
    memcpy_s = statistics.median(more["memcpy_s"] for more in mapped.more)
    short_ms = statistics.median(more["short_s"] for more in first.more) * 1e3
    return [
        Figure(
            what="same_host_first_batch_ms",
            value=first.median_s * 1e3,
            unit="ms",
            repeats=_ms(first.seconds),
            rival="64 trajectories",
            rival_value=short_ms,
            rival_command=f"{COMMAND} first_batch",
            ratio=short_ms / (first.median_s * 1e3),
            note=f"bar 1.5 times that at {SHORT}: {first.median_s * 1e3 / short_ms:.2f}",
        ),
        Figure(
            what="same_host_read_vs_memcpy",
            value=mapped.more[-1]["bytes"] / mapped.median_s / 1e9,
            unit="GB/s",
            repeats=tuple(mapped.more[-1]["bytes"] / s / 1e9 for s in mapped.seconds),
            cpu_s=statistics.median(mapped.cpu_s),
            rival="memcpy, warm",
            rival_value=mapped.more[-1]["bytes"] / memcpy_s / 1e9,
            rival_command=f"{COMMAND} mapped",
            ratio=memcpy_s / mapped.median_s,
            note="bar 0.4; mapped anew each round, every byte read",
        ),
    ]


_FORMATS = (
    ("vs_json_lists", "json_lists", 50),
    ("vs_pickled_lists", "pickled_lists", 30),
    ("vs_dataproto", "dataproto", 10),
)


def _rate(what: str, ours: Rounds, socket: Rounds, payload: float, note: str) -> Figure:
    return Figure(
        what=what,
        value=payload / ours.median_s / 1e9,
        unit="GB/s",
        repeats=tuple(payload / s / 1e9 for s in ours.seconds),
        cpu_s=statistics.median(ours.cpu_s),
        rival="raw socket",
        rival_value=payload / socket.median_s / 1e9,
        rival_command=f"{COMMAND} socket",
        ratio=socket.median_s / ours.median_s,
        note=note,
    )


def _times(what: str, ours: Rounds, rival: Rounds, name: str, bar: int) -> Figure:
    return Figure(
        what=what,
        value=ours.median_s * 1e3,
        unit="ms",
        repeats=_ms(ours.seconds),
        cpu_s=statistics.median(ours.cpu_s),
        rival=name,
        rival_value=rival.median_s * 1e3,
        rival_command=f"{COMMAND} {name}",
        ratio=rival.median_s / ours.median_s,
        note=f"bar {bar}",
    )


def _peak(name: str, rounds: Rounds) -> Figure:
    return Figure(
        what=f"peak_memory_{name}",
        value=rounds.peak_mib,
        unit="MiB",
        note="growth of the consumer's resident size over all rounds",
    )


def _ms(seconds: list[float]) -> tuple[float, ...]:
    return tuple(s * 1e3 for s in seconds)
