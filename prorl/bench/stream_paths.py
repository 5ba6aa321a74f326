"""The consumers of `prorl bench stream`: a process per path, so that each has its own memory peak.

    python -m prorl.bench.stream_paths PATH LOCATION PORT RUN [--device cpu]

Prints `ready {}` when its imports are done; then, for each line on standard input, takes the whole
payload and prints one JSON object: seconds, cpu_s, num_tokens, checksum (sum of all token ids), and
what the path alone knows. Every path but `received` and `socket` ends with torch tensors on the
device and reads every byte of tokens and logprobs once. In each round a path takes the payload
`TURNS` times and says the middle one: a first turn after a pause is about waking processes, not
about moving data.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import orjson

from prorl.bench.stream_bytes import (
    checksum,
    memcpy_seconds,
    peak_mib,
    read_exactly,
    received_bytes,
    total_read,
)
from prorl.client import PackedBatch
from prorl.client.fetch import FlightSource
from prorl.flight import tune
from prorl.flight.ticket import Ticket

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

    def __init__(self, location: str, port: int, run: str, device: str) -> None:
        self._location, self._run, self._device = location, run, device
        self._source: FlightSource | None = None
        self._socket: socket.socket | None = None
        self._port = port
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
        ids, mask = (
            tensors["input_ids"].to(self._device),
            tensors["attention_mask"].to(self._device),
        )
        checksum, num_tokens = int((ids * mask).sum()), int(mask.sum())
        read = [
            float(tensors[name].to(self._device).sum())
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
            torch.from_numpy(np.concatenate([np.array(row[name], dtype) for row in rows])).to(
                self._device
            )
            for name, dtype in (("token_ids", np.int32), ("logprobs", np.float32))
        )
        num_tokens, checksum = len(ids), int(ids.sum()) if float(logprobs.sum()) <= 0 else -1
        return Took(time.perf_counter() - start, num_tokens, checksum, {})

    def _into_tensors(self, *, same_host: bool) -> Took:
        start = time.perf_counter()
        num_tokens = num_bytes = 0
        totals, ids = [], []
        for arrow in self._flight(same_host=same_host).fetch(self._ticket(self._run)).batches:
            batch = PackedBatch(arrow, self._run)
            tensors = batch.torch()
            totals += [
                total_read(tensors.token_ids.to(self._device)),
                total_read(tensors.logprobs.to(self._device)),
            ]
            num_tokens += batch.num_tokens
            num_bytes += batch.token_ids.nbytes + batch.logprobs.nbytes
            ids.append(batch.token_ids)
        read = sum(totals)
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
    given = _options().parse_args()
    tune()
    if given.path not in ("received", "socket"):
        import torch

        torch.set_num_threads(1)
        torch.zeros(1).to(given.device)
    consume: Callable[[], Took] = getattr(
        Consumer(given.location, given.port, given.run, given.device), given.path
    )
    before_mib = peak_mib()
    print("ready", "{}", flush=True)
    for _ in sys.stdin:
        values = _round(consume) | {"peak_mib": peak_mib() - before_mib}
        print(json.dumps(values), flush=True)


def _options() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser()
    paths = [name for name in vars(Consumer) if not name.startswith("_")]
    options.add_argument("path", choices=paths)
    options.add_argument("location")
    options.add_argument("port", type=int)
    options.add_argument("run")
    options.add_argument("--device", default="cpu")
    return options


def _round(consume: Callable[[], Took]) -> dict[str, Any]:
    """The middle one of some turns, with the CPU of each."""
    cpu = time.process_time()
    took = sorted((consume() for _ in range(TURNS)), key=attrgetter("seconds"))[TURNS // 2]
    return took._asdict() | {"cpu_s": (time.process_time() - cpu) / TURNS}


if __name__ == "__main__":
    main()
    os._exit(0)
