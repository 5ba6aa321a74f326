"""The two ends of `prorl bench tls`, each a process on a host of its own.

    python -m prorl.bench.tls_ends serve HOST RUN_DIR SERVICE_FILE     prints `ready {...}`: where
    python -m prorl.bench.tls_ends consume READY_JSON JOIN_FILE        a JSON line a line it reads

Both speak Arrow Flight and raw sockets (the same Arrow bytes, one `sendall`, received into a buffer
that is there already), each with and without mutual TLS. A consumer's line is the name of a path.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import ssl
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from prorl.bench.stream_rivals import read_run
from prorl.bench.stream_shape import RUN
from prorl.client.fetch import FlightSource
from prorl.flight import FlightNetwork, tune
from prorl.flight.ticket import Ticket
from prorl.storage.endpoint import Endpoint
from prorl.storage.replay import open_replay
from prorl.tls import Credentials

FLIGHT, RAW = ("plain", "mtls"), ("raw_socket", "raw_tls_socket")
HOT_BYTES, MAX_BYTES = 8 << 30, 2 << 30
PIECE = 1 << 20


async def serve(host: str, run_dir: Path, credentials: Credentials) -> None:
    """Serve until standard input closes."""
    with tempfile.TemporaryDirectory(prefix="prorl-hot-") as hot:
        endpoint = Endpoint(Path(hot) / "hot", HOT_BYTES)
        endpoint.add(*open_replay(run_dir))
        payload = _arrow_bytes(run_dir)
        raw, raw_tls = (
            _listen(host, payload, context) for context in (None, credentials.server_context())
        )
        async with FlightNetwork(credentials=credentials) as network:
            said = {
                "plain": await network.listen(f"grpc://{host}:0", {}, endpoint.reads()),
                "mtls": await network.listen(f"grpc+tls://{host}:0", {}, endpoint.reads()),
                "raw_socket": raw,
                "raw_tls_socket": raw_tls,
                "num_bytes": len(payload),
            }
            print("ready", json.dumps(said), flush=True)
            await asyncio.to_thread(sys.stdin.read)
        endpoint.close()


def _arrow_bytes(run_dir: Path) -> memoryview:
    batch = read_run(run_dir).arrow
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    return memoryview(sink.getvalue())


def _listen(host: str, payload: memoryview, context: ssl.SSLContext | None) -> tuple[str, int]:
    """A server that sends the payload for each byte it gets; its address."""
    listening = socket.create_server((host, 0))

    def answer() -> None:
        while True:
            found, _ = listening.accept()
            peer = context.wrap_socket(found, server_side=True) if context else found
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while peer.recv(1):
                peer.sendall(payload)

    threading.Thread(target=answer, daemon=True).start()
    return listening.getsockname()[:2]  # type: ignore[no-any-return]


class Consumer:
    """Takes the whole payload over a path; connections are made at the first call and kept."""

    def __init__(self, where: dict[str, Any], credentials: Credentials) -> None:
        self._where, self._credentials = where, credentials
        self._flights: dict[str, FlightSource] = {}
        self._sockets: dict[str, socket.socket] = {}
        self._buffer = memoryview(bytearray(where["num_bytes"]))
        # A plan has the groups copied out of Parquet, as they are in a run that is being made.
        self._fetch(FlightSource(where["plain"]))

    def take(self, path: str) -> None:
        """Once; nothing is read of it."""
        if path in FLIGHT:
            self._fetch(self._flight(path))
            return
        peer, filled = self._socket(path), 0
        peer.sendall(b"?")
        while filled < len(self._buffer):
            got = peer.recv_into(self._buffer[filled : filled + PIECE])
            assert got, "the server has gone"
            filled += got

    @staticmethod
    def _fetch(source: FlightSource) -> None:
        ticket = Ticket(run=RUN, consumer="c", cursor=f"{RUN}@0", max_bytes=MAX_BYTES)
        for _ in source.fetch(ticket).batches:
            pass

    def _flight(self, path: str) -> FlightSource:
        if path not in self._flights:
            source = FlightSource(self._where[path], host="", credentials=self._credentials)
            self._flights[path] = source
        return self._flights[path]

    def _socket(self, path: str) -> socket.socket:
        if path not in self._sockets:
            made = socket.create_connection(self._where[path])
            if path == "raw_tls_socket":
                made = self._credentials.client_context().wrap_socket(
                    made, server_hostname=self._credentials.peer_name
                )
            self._sockets[path] = made
        return self._sockets[path]


def consume(consumer: Consumer) -> None:
    """A round a line."""
    print("ready", "{}", flush=True)
    for line in sys.stdin:
        cpu_s, began = time.process_time(), time.perf_counter()
        consumer.take(line.strip())
        seconds = time.perf_counter() - began
        said = {"seconds": seconds, "cpu_s": time.process_time() - cpu_s}
        print(json.dumps(said), flush=True)


if __name__ == "__main__":
    tune()
    role, *words = sys.argv[1:]
    if role == "serve":
        asyncio.run(serve(words[0], Path(words[1]), Credentials.read(Path(words[2]))))
    else:
        consume(Consumer(json.loads(words[0]), Credentials.read(Path(words[1]))))
    os._exit(0)
