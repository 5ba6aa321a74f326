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
from pathlib import Path

from prorl.bench.children import NO_RIVALS, RIVALS, Answering
from prorl.bench.report import Figure, Report, median
from prorl.bench.stored import write_run
from prorl.bench.synthetic import Shape, group
from prorl.errors import UserError
from prorl.types import Json

PATHS = {"received": (15, 7), "tensors": (15, 7), "mapped": (15, 7), "first_batch": (30, 15)}
"""Each with its rounds, in full and quick."""
CUDA_PATHS = {"cuda": (15, 7)}
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

Rounds = list[dict[str, Json]]
"""What a path's consumer said in each of its rounds."""


async def run(quick: bool, device: str = "cpu") -> Report:
    """Raises UserError for a `device` other than cpu, or cuda where torch sees a GPU."""
    if device != "cpu":
        _check_cuda(device)
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        dirs = await asyncio.to_thread(make_runs, Path(folder))
        found = await measure(dirs, quick, CUDA_PATHS if device != "cpu" else {})
    payloads = {
        name: (rounds[-1]["num_tokens"], rounds[-1]["checksum"])
        for name, rounds in found.items()
        if name != "first_batch"
    }
    assert len(set(payloads.values())) == 1, f"the paths disagree: {payloads}"
    return Report(bench="stream", rows=tuple(rows(found)))


def make_runs(folder: Path) -> list[Path]:
    groups = [group(i, SHAPE) for i in range(TRAJECTORIES // SHAPE.n)]
    long = write_run(folder / RUN, groups, RUN)
    short = write_run(folder / f"{RUN}-short", groups[: SHORT // SHAPE.n], f"{RUN}-short")
    return [long, short]


def _check_cuda(device: str) -> None:
    import torch

    if device != "cuda" or not torch.cuda.is_available():
        raise UserError(f"--device {device}", "cpu, or cuda on a machine whose GPU torch sees")


async def measure(
    dirs: list[Path], quick: bool, more_paths: dict[str, tuple[int, int]]
) -> dict[str, Rounds]:
    """Start every process, then go around the paths; their warm-ups are left out."""
    paths = PATHS | more_paths | (RIVAL_PATHS if RIVALS else {})
    found: dict[str, Rounds] = {name: [] for name in paths}
    async with AsyncExitStack() as stack:

        async def child(module: str, *arguments: str) -> Answering:
            made = Answering("-m", module, *arguments)
            return await stack.enter_async_context(made)

        server = await child("prorl.bench.stream_server", *map(str, dirs))
        location, port = str(server.ready["location"]), 0
        if RIVALS:
            port = (await child("configs.rivals.bench.stream", str(dirs[0]))).ready["port"]
        consumers = {}
        for name in paths:
            argv = ("prorl.bench.stream_paths", name, location, str(port), RUN)
            consumers[name] = await child(*argv)
            await consumers[name].ask()
        for number in range(max(map(max, paths.values()))):
            for name, rounds in paths.items():
                if number < rounds[quick]:
                    found[name].append(await consumers[name].ask())
    return found


def rows(found: dict[str, Rounds]) -> list[Figure]:
    received = found["received"]
    wire = [one["more"]["wire_bytes"] / one["num_tokens"] for one in received]
    bar = 4 + 4 * SHAPE.sampled_share + 0.25
    note = f"bar {bar:g}; TCP bytes as the kernel counts them"
    figures = [median("bytes_per_token", wire, "B/token", note=note)]
    tensors = found["tensors"]
    if "socket" in found:
        size = found["socket"][-1]["more"]["bytes"]
        rival, command = size / _middle(found["socket"], "seconds") / 1e9, f"{COMMAND} socket"
        for name, ours, note in (
            ("received", received, "bar 0.7; batches in memory"),
            ("tensors", tensors, "bar 0.5; into tensors, every byte read"),
        ):
            row = _speed(f"{name}_vs_socket", ours, size, note)
            figures.append(row.beside("raw socket", rival, command, more_is_better=True))
        for name, least in (("json_lists", 50), ("pickled_lists", 30), ("dataproto", 10)):
            row, theirs = _time(f"vs_{name}", tensors, f"bar {least}"), found[name]
            took_ms = _middle(theirs, "seconds") * 1e3
            figures.append(row.beside(name, took_ms, f"{COMMAND} {name}"))
    else:
        figures += [_time(f"{name}_ms", found[name], NO_RIVALS) for name in ("received", "tensors")]

    first = found["first_batch"]
    short_ms = statistics.median(one["more"]["short_s"] for one in first) * 1e3
    note = f"bar 1.5 times that at {SHORT}: {_middle(first, 'seconds') * 1e3 / short_ms:.2f}"
    row = _time("same_host_first_batch_ms", first, note)
    figures.append(row.beside(f"{SHORT} trajectories", short_ms, f"{COMMAND} first_batch"))

    mapped = found["mapped"]
    size = mapped[-1]["more"]["bytes"]
    memcpy = size / statistics.median(one["more"]["memcpy_s"] for one in mapped) / 1e9
    note = "bar 0.4; mapped anew each round, every byte read"
    row = _speed("same_host_read_vs_memcpy", mapped, size, note)
    figures.append(row.beside("memcpy, warm", memcpy, f"{COMMAND} mapped", more_is_better=True))
    if "cuda" in found:
        cuda = found["cuda"]
        pinned = size / statistics.median(one["more"]["pinned_s"] for one in cuda) / 1e9
        row = _speed("cuda_vs_pinned", cuda, size, "mapped, sent to the GPU, every byte read there")
        rival = "copies of pinned memory"
        figures.append(row.beside(rival, pinned, f"{COMMAND} cuda", more_is_better=True))

    note = "growth of the consumer's resident size over all rounds"
    return figures + [
        Figure(what=f"peak_memory_{name}", value=rounds[-1]["peak_mib"], unit="MiB", note=note)
        for name, rounds in found.items()
        if name != "first_batch"
    ]


def _middle(rounds: Rounds, key: str) -> float:
    return float(statistics.median(one[key] for one in rounds))


def _speed(what: str, ours: Rounds, size: float, note: str) -> Figure:
    return Figure(
        what=what,
        value=size / _middle(ours, "seconds") / 1e9,
        unit="GB/s",
        repeats=tuple(size / one["seconds"] / 1e9 for one in ours),
        cpu_s=_middle(ours, "cpu_s"),
        note=note,
    )


def _time(what: str, ours: Rounds, note: str) -> Figure:
    times_ms = [one["seconds"] * 1e3 for one in ours]
    return median(what, times_ms, "ms", cpu_s=_middle(ours, "cpu_s"), note=note)
