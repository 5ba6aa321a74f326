"""`prorl bench stream`: a run's trajectories from the store's Flight endpoint into tensors.

They stand beside a raw socket and the usual formats. 512 trajectories of 16k tokens, a quarter of
them sampled, are written as a run directory and served by the replay's own endpoint. Each path has
a consumer process of its own (so that memory peaks do not mix); a process with all rivals'
producers has the same trajectories in memory in each rival's own form. Rounds go around all paths,
so that a busy neighbour meets all of them; medians are reported, and every round's checksum must be
equal. Bars stand in the notes. Nothing here is a test.

The processes are this module as a program, which ends when its standard input closes:

    python -m prorl.bench.stream serve RUN_DIR ...
    python -m prorl.bench.stream consume PATH LOCATION PORT RUN

A consumer prints `ready {}` when its imports are done; then, for each line on standard input, it
takes the whole payload and prints one JSON object: seconds, cpu_s, num_tokens, checksum (sum of all
token ids), and what the path alone knows. Every path but `received` and `socket` ends with torch
tensors and reads every byte of tokens and logprobs once. In each round a path takes the payload
`TURNS` times and gives the middle one: a first turn after a pause is about waking processes, not
about moving data.
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import socket
import statistics
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AsyncExitStack
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from prorl.analysis.synthetic import SyntheticShape, group
from prorl.analysis.synthetic_runs import write_run
from prorl.bench.children import NO_RIVALS, RIVALS, Answering
from prorl.bench.report import Figure, Report, median
from prorl.client import PackedBatch
from prorl.client.fetch import FlightSource
from prorl.errors import UserError
from prorl.flight import FlightNetwork, tune
from prorl.flight.ticket import Ticket
from prorl.storage.serve.endpoint import Endpoint
from prorl.storage.serve.replay import open_replay
from prorl.types import Json

if TYPE_CHECKING:
    from numpy.typing import NDArray

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
SHAPE = SyntheticShape(n=8, num_tokens=16384, sampled_share=0.25, num_turns=14, vocab_size=150_000)
COMMAND = "python -m prorl.bench.stream"

Rounds = list[dict[str, Json]]
"""The reports of a path's consumer, one for each of its rounds."""


async def run(quick: bool, device: str = "cpu") -> Report:
    """Raises UserError for a `device` other than cpu, or cuda where torch sees a GPU."""
    if device != "cpu":
        _check_cuda(device)
    with tempfile.TemporaryDirectory(prefix="prorl-bench-") as folder:
        dirs = await asyncio.to_thread(make_runs, Path(folder))
        measured = await measure(dirs, quick, CUDA_PATHS if device != "cpu" else {})
    payloads = {
        name: (rounds[-1]["num_tokens"], rounds[-1]["checksum"])
        for name, rounds in measured.items()
        if name != "first_batch"
    }
    assert len(set(payloads.values())) == 1, f"the paths disagree: {payloads}"
    return Report(bench="stream", rows=tuple(rows(measured)))


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
    rounds_by_path: dict[str, Rounds] = {name: [] for name in paths}
    async with AsyncExitStack() as stack:

        async def child(module: str, *arguments: str) -> Answering:
            process = Answering("-m", module, *arguments)
            return await stack.enter_async_context(process)

        server = await child("prorl.bench.stream", "serve", *map(str, dirs))
        location, port = str(server.ready["location"]), 0
        if RIVALS:
            port = (await child("configs.rivals.bench.stream", str(dirs[0]))).ready["port"]
        consumers = {}
        for name in paths:
            argv = ("prorl.bench.stream", "consume", name, location, str(port), RUN)
            consumers[name] = await child(*argv)
            await consumers[name].ask()
        for number in range(max(map(max, paths.values()))):
            for name, rounds in paths.items():
                if number < rounds[quick]:
                    rounds_by_path[name].append(await consumers[name].ask())
    return rounds_by_path


def rows(by_path: dict[str, Rounds]) -> list[Figure]:
    received = by_path["received"]
    wire = [round_["more"]["wire_bytes"] / round_["num_tokens"] for round_ in received]
    bar = 4 + 4 * SHAPE.sampled_share + 0.25
    note = f"bar {bar:g}; TCP bytes as the kernel counts them"
    figures = [median("bytes_per_token", wire, "B/token", note=note)]
    tensors = by_path["tensors"]
    if "socket" in by_path:
        size = by_path["socket"][-1]["more"]["bytes"]
        rival, command = size / _middle(by_path["socket"], "seconds") / 1e9, f"{COMMAND} socket"
        for name, ours, note in (
            ("received", received, "bar 0.7; batches in memory"),
            ("tensors", tensors, "bar 0.5; into tensors, every byte read"),
        ):
            row = _speed(f"{name}_vs_socket", ours, size, note)
            figures.append(row.beside("raw socket", rival, command, more_is_better=True))
        for name, least in (("json_lists", 50), ("pickled_lists", 30), ("dataproto", 10)):
            row, theirs = _time(f"vs_{name}", tensors, f"bar {least}"), by_path[name]
            took_ms = _middle(theirs, "seconds") * 1e3
            figures.append(row.beside(name, took_ms, f"{COMMAND} {name}"))
    else:
        figures += [
            _time(f"{name}_ms", by_path[name], NO_RIVALS) for name in ("received", "tensors")
        ]

    first = by_path["first_batch"]
    short_ms = statistics.median(round_["more"]["short_s"] for round_ in first) * 1e3
    note = f"bar 1.5 times that at {SHORT}: {_middle(first, 'seconds') * 1e3 / short_ms:.2f}"
    row = _time("same_host_first_batch_ms", first, note)
    figures.append(row.beside(f"{SHORT} trajectories", short_ms, f"{COMMAND} first_batch"))

    mapped = by_path["mapped"]
    size = mapped[-1]["more"]["bytes"]
    memcpy = size / statistics.median(round_["more"]["memcpy_s"] for round_ in mapped) / 1e9
    note = "bar 0.4; mapped anew each round, every byte read"
    row = _speed("same_host_read_vs_memcpy", mapped, size, note)
    figures.append(row.beside("memcpy, warm", memcpy, f"{COMMAND} mapped", more_is_better=True))
    if "cuda" in by_path:
        cuda = by_path["cuda"]
        pinned = size / statistics.median(round_["more"]["pinned_s"] for round_ in cuda) / 1e9
        row = _speed("cuda_vs_pinned", cuda, size, "mapped, sent to the GPU, every byte read there")
        rival = "copies of pinned memory"
        figures.append(row.beside(rival, pinned, f"{COMMAND} cuda", more_is_better=True))

    note = "growth of the consumer's resident size over all rounds"
    return figures + [
        Figure(name=f"peak_memory_{name}", value=rounds[-1]["peak_mib"], unit="MiB", note=note)
        for name, rounds in by_path.items()
        if name != "first_batch"
    ]


def _middle(rounds: Rounds, key: str) -> float:
    return float(statistics.median(round_[key] for round_ in rounds))


def _speed(name: str, ours: Rounds, size: float, note: str) -> Figure:
    return Figure(
        name=name,
        value=size / _middle(ours, "seconds") / 1e9,
        unit="GB/s",
        repeats=tuple(size / round_["seconds"] / 1e9 for round_ in ours),
        cpu_s=_middle(ours, "cpu_s"),
        note=note,
    )


def _time(name: str, ours: Rounds, note: str) -> Figure:
    times_ms = [round_["seconds"] * 1e3 for round_ in ours]
    return median(name, times_ms, "ms", cpu_s=_middle(ours, "cpu_s"), note=note)


MAX_BYTES = 2 << 30
"""All of the run in one plan."""


TURNS = 3


class Took(NamedTuple):
    """Holds what one round found; `more` is the path's own."""

    seconds: float
    num_tokens: int
    checksum: int
    more: dict[str, float]


class Consumer:
    """One path. The connection is made before the first round and kept."""

    def __init__(self, location: str, port: int, run: str) -> None:
        self._location, self._run, self._port = location, run, port
        self._source: FlightSource | None = None
        self._socket: socket.socket | None = None
        self._staging = bytearray(0)

    def received(self) -> Took:
        """Flight over TCP: all record batches in memory, nothing read."""
        before = received_bytes()
        start = time.perf_counter()
        batches = list(self._flight(same_host=False).fetch(self._ticket(self._run)).batches)
        seconds = time.perf_counter() - start
        packed = [PackedBatch(batch, self._run) for batch in batches]
        wire_bytes = received_bytes() - before
        return Took(
            seconds,
            sum(b.num_tokens for b in packed),
            checksum([b.token_ids for b in packed]),
            {"wire_bytes": wire_bytes},
        )

    def tensors(self) -> Took:
        """Flight over TCP into tensors, every byte read."""
        return self._into_tensors(same_host=False)

    def mapped(self) -> Took:
        """The mapped file of the same host into tensors, every byte read.

        A memcpy of as many bytes is timed beside it.
        """
        took = self._into_tensors(same_host=True)
        return took._replace(
            more={**took.more, "memcpy_s": memcpy_seconds(int(took.more["bytes"]))}
        )

    def cuda(self) -> Took:
        """The mapped file of the same host into a GPU's memory, every byte read there.

        One copy of as many bytes of pinned memory is timed beside it.
        """
        took = self._into_tensors(same_host=True, device="cuda")
        return took._replace(
            more={**took.more, "pinned_s": pinned_seconds(int(took.more["bytes"]))}
        )

    def first_batch(self) -> Took:
        """Time to the first batch of the same host.

        It is that of the whole run and, in turns with it, of the short one.
        """
        whole, short = self._first(self._run), self._first(f"{self._run}-short")
        return whole._replace(more={"short_s": short.seconds})

    def _first(self, run: str) -> Took:
        start = time.perf_counter()
        fetched = self._flight(same_host=True).fetch(self._ticket(run))
        first = PackedBatch(next(fetched.batches), run)
        checksum = int(first.torch().token_ids.sum())
        return Took(time.perf_counter() - start, first.num_tokens, checksum, {})

    def socket(self) -> Took:
        """Read the same Arrow bytes from a raw socket into a buffer that is there already."""
        start = time.perf_counter()
        payload = self._ask("socket")
        seconds = time.perf_counter() - start
        import pyarrow as pa

        batches = [
            PackedBatch(batch, self._run) for batch in pa.ipc.open_stream(pa.py_buffer(payload))
        ]
        return Took(
            seconds,
            sum(b.num_tokens for b in batches),
            checksum([b.token_ids for b in batches]),
            {"bytes": len(payload)},
        )

    def json_lists(self) -> Took:
        """JSON lists (orjson both ends, no HTTP) into packed tensors."""
        return self._from_lists("json_lists", orjson.loads)

    def pickled_lists(self) -> Took:
        """Pickled Python lists into packed tensors."""
        return self._from_lists("pickled_lists", pickle.loads)

    def dataproto(self) -> Took:
        """A pickled dict of padded int64 tensors, as trainers of the verl family send."""
        start = time.perf_counter()
        tensors = pickle.loads(self._ask("dataproto"))
        ids, mask = tensors["input_ids"], tensors["attention_mask"]
        checksum, num_tokens = int((ids * mask).sum()), int(mask.sum())
        read = [
            float(tensors[name].sum())
            for name in ("rollout_log_probs", "loss_mask", "position_ids")
        ]
        return Took(time.perf_counter() - start, num_tokens, checksum, {"read": len(read)})

    def _from_lists(self, form: str, loads: Callable[[Any], Any]) -> Took:
        """Lists become tensors by way of numpy.

        That is 1.3 times faster than the `torch.tensor(list)` that trainers write.
        """
        import torch

        start = time.perf_counter()
        rows = loads(self._ask(form))
        ids, logprobs = (
            torch.from_numpy(np.concatenate([np.array(row[name], dtype) for row in rows]))
            for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32))
        )
        num_tokens, checksum = len(ids), int(ids.sum()) if float(logprobs.sum()) <= 0 else -1
        return Took(time.perf_counter() - start, num_tokens, checksum, {})

    def _into_tensors(self, *, same_host: bool, device: str = "cpu") -> Took:
        start = time.perf_counter()
        num_tokens = num_bytes = 0
        totals, ids = [], []
        for arrow in self._flight(same_host=same_host).fetch(self._ticket(self._run)).batches:
            batch = PackedBatch(arrow, self._run)
            tensors = batch.torch()
            totals += [total_read(t.to(device)) for t in (tensors.token_ids, tensors.logprobs)]
            num_tokens += batch.num_tokens
            num_bytes += batch.token_ids.nbytes + batch.logprobs.nbytes
            ids.append(batch.token_ids)
        read = int(sum(totals))
        seconds = time.perf_counter() - start
        return Took(
            seconds, num_tokens, checksum(ids), {"bytes": num_bytes, "read": float(read % 2)}
        )

    def _flight(self, *, same_host: bool) -> FlightSource:
        if self._source is None:
            self._source = FlightSource(self._location, host=None if same_host else "")
        return self._source

    def _ticket(self, run: str) -> Ticket:
        return Ticket(run=run, consumer=str(os.getpid()), cursor=f"{run}@0", max_bytes=MAX_BYTES)

    def _ask(self, form: str) -> memoryview:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port))
        self._socket.sendall(form.encode() + b"\n")
        length = int.from_bytes(read_exactly(self._socket, memoryview(bytearray(8))), "little")
        if len(self._staging) < length:
            self._staging = bytearray(length)
        return read_exactly(self._socket, memoryview(self._staging)[:length])


def take_rounds(path: str, location: str, port: str, run: str) -> None:
    """Consume the payload by one path, `TURNS` times for each line of standard input."""
    if path not in ("received", "socket"):
        import torch

        torch.set_num_threads(1)
        torch.zeros(1)
    consume: Callable[[], Took] = getattr(Consumer(location, int(port), run), path)
    before_mib = peak_mib()
    print("ready", "{}", flush=True)
    for _ in sys.stdin:
        cpu_s = time.process_time()
        took = sorted((consume() for _ in range(TURNS)), key=attrgetter("seconds"))[TURNS // 2]
        cpu_s = (time.process_time() - cpu_s) / TURNS
        growth = {"cpu_s": cpu_s, "peak_mib": peak_mib() - before_mib}
        print(json.dumps(took._asdict() | growth), flush=True)


def read_exactly(source: socket.socket, into: memoryview) -> memoryview:
    filled = 0
    while filled < len(into):
        got = source.recv_into(into[filled : filled + (1 << 20)])
        assert got, "the rival's producer is gone"
        filled += got
    return into


def total_read(tensor: Any) -> Any:
    """Reads every byte: the sum of the tensor's memory taken as int64, where the tensor is.

    A sum of int32 would be bound by the widening.
    """
    import torch

    even = tensor[:-1] if len(tensor) % 2 else tensor
    aligned = even.storage_offset() % 2 == 0 and even.data_ptr() % 8 == 0
    return (even.view(torch.int64) if aligned else even).sum()


def checksum(arrays: list[NDArray[np.int32]]) -> int:
    return sum(int(array.sum(dtype=np.int64)) for array in arrays)


def memcpy_seconds(num_bytes: int) -> float:
    source, target = np.ones(num_bytes, np.uint8), np.zeros(num_bytes, np.uint8)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start)
    return min(times)


def pinned_seconds(num_bytes: int) -> float:
    import torch

    source = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    times = []
    for _ in range(3):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_mib() -> float:
    """Highest resident size of this process alone (`ru_maxrss` starts with the parent's)."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return float(status["VmHWM"].split()[0]) / 1024


def received_bytes() -> int:
    """Returns the bytes that this process's TCP connections have received, as the kernel counts
    them.

    The figure is tcp_info.tcpi_bytes_received.
    """
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as duplicate:
                if (
                    duplicate.family in (socket.AF_INET, socket.AF_INET6)
                    and duplicate.type == socket.SOCK_STREAM
                ):
                    info = duplicate.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 136)
                    total += struct.unpack_from("<Q", info, 128)[0]
        except OSError:
            continue
    return total


HOT_BYTES = 8 << 30


async def serve(run_dirs: list[Path]) -> None:
    """Serve run directories until standard input closes; `ready {"location"}` when it listens."""
    with tempfile.TemporaryDirectory(prefix="prorl-hot-") as hot:
        endpoint = Endpoint(Path(hot) / "hot", HOT_BYTES)
        for run_dir in run_dirs:
            endpoint.add(*open_replay(run_dir))
        async with FlightNetwork(token=os.environ.get("PRORL_TOKEN", "")) as network:
            location = await network.listen("grpc://127.0.0.1:0", {}, endpoint.reads())
            print("ready", json.dumps({"location": location}), flush=True)
            await asyncio.to_thread(sys.stdin.read)
        endpoint.close()


if __name__ == "__main__":
    tune()
    if sys.argv[1] == "serve":
        asyncio.run(serve([Path(name) for name in sys.argv[2:]]))
    else:
        take_rounds(*sys.argv[2:])
    os._exit(0)
