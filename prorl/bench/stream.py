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
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import NamedTuple

from prorl.bench.children import Answering
from prorl.bench.machine import machine
from prorl.bench.report import Report
from prorl.bench.stream_rows import Rounds, rows
from prorl.bench.stream_shape import RUN, SHAPE, SHORT, TRAJECTORIES
from prorl.bench.synthetic import group
from prorl.bench.synthetic_run import write_run


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
