"""The consumers of `prorl bench stream`: a process per path, so that each has its own memory peak.

    python -m prorl.bench.stream_paths PATH LOCATION PORT RUN

Prints `ready {}` when its imports are done; then, for each line on standard input, takes the whole
payload and prints one JSON object: seconds, cpu_s, num_tokens, checksum (sum of all token ids), and
what the path alone knows. Every path but `received` and `socket` ends with torch tensors and
reads every byte of tokens and logprobs once. In each round a path takes the payload
`TURNS` times and says the middle one: a first turn after a pause is about waking processes, not
about moving data.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import struct
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import orjson

from prorl.client import PackedBatch
from prorl.client.fetch import FlightSource
from prorl.flight import tune
from prorl.flight.ticket import Ticket

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 2 << 30
"""All of the run in one plan."""


TURNS = 3


class Took(NamedTuple):
    """What one round found; `more` is the path's own."""

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


def main() -> None:
    """Serve rounds until stdin ends."""
    options = argparse.ArgumentParser()
    options.add_argument("path", choices=[name for name in vars(Consumer) if name[0] != "_"])
    options.add_argument("location")
    options.add_argument("port", type=int)
    options.add_argument("run")
    given = options.parse_args()
    tune()
    if given.path not in ("received", "socket"):
        import torch

        torch.set_num_threads(1)
        torch.zeros(1)
    consume: Callable[[], Took] = getattr(
        Consumer(given.location, given.port, given.run), given.path
    )
    before_mib = peak_mib()
    print("ready", "{}", flush=True)
    for _ in sys.stdin:
        cpu_s = time.process_time()
        took = sorted((consume() for _ in range(TURNS)), key=attrgetter("seconds"))[TURNS // 2]
        cpu_s = (time.process_time() - cpu_s) / TURNS
        growth = {"cpu_s": cpu_s, "peak_mib": peak_mib() - before_mib}
        print(json.dumps(took._asdict() | growth), flush=True)
    os._exit(0)


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
    """Bytes that this process's TCP connections have received, as the kernel counts them.

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


if __name__ == "__main__":
    main()
