"""The listener for other hosts: TLS, certificates and bounds, on a thread and loop of its own.

    connection -> room? -> handshake within HANDSHAKE_S -> who it is -> bytes to and from the app

A connection costs memory from its first byte and 1.5 ms of CPU with its handshake, and anybody may
open one. The gateway's loop, which must never stall, therefore meets only callers whose certificate
was verified. A stranger keeps a connection for `HANDSHAKE_S` at most. How many handshakes one
address makes a second is not bounded here; a firewall bounds that.
New credentials (`LiveCredentials`) are shown from the next handshake on.

Bounded by `MAX_CONNECTIONS`, strangers' included, and `ADDRESS_CONNECTIONS` of one address, each
with at most two buffers of `CHUNK_BYTES` and TLS's own here. What comes beyond is closed.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

from prorl.net.tls import AnyCredentials, Caller, Credentials
from prorl.waits import wait_limit_s

HANDSHAKE_S = wait_limit_s("tls.handshake")

MAX_CONNECTIONS, ADDRESS_CONNECTIONS = 1024, 256
"""At 0.33 MiB each; one address must not take the places of all others."""

CHUNK_BYTES = 64 << 10

Take = Callable[[socket.socket, Caller], None]
"""Gives a caller's plain bytes to the app; called on the listener's thread."""


class TlsListener:
    def __init__(self, listener: socket.socket, credentials: AnyCredentials, take: Take) -> None:
        listener.setblocking(False)
        self._listener, self._credentials, self._take = listener, credentials, take
        self._context_credentials: Credentials | None = None
        self._context: ssl.SSLContext | None = None
        self._connections: Counter[str] = Counter()
        self._open: set[asyncio.Task[None]] = set()
        self._loop: asyncio.AbstractEventLoop
        self._stopping: asyncio.Event
        self._up = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tls-listener", daemon=True)

    def __enter__(self) -> TlsListener:
        self._current_context()  # what is wrong with it is said at the start
        self._thread.start()
        self._up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join()

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        accepting = self._loop.create_task(self._accept())
        self._up.set()
        await self._stopping.wait()
        accepting.cancel()
        await asyncio.sleep(0)  # whoever was let in has begun, and closes what it holds
        works = (accepting, *self._open)
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)

    def _current_context(self) -> ssl.SSLContext:
        credentials = self._credentials.current
        if self._context is None or credentials is not self._context_credentials:
            self._context_credentials, self._context = credentials, credentials.server_context()
        return self._context

    async def _accept(self) -> None:
        while True:
            try:
                connection, address = await self._loop.sock_accept(self._listener)
            except OSError:  # no descriptor is free: strangers give theirs back within HANDSHAKE_S
                await asyncio.sleep(HANDSHAKE_S)
                continue
            host = str(address[0])
            if (
                self._connections[host] >= ADDRESS_CONNECTIONS
                or self._connections.total() >= MAX_CONNECTIONS
            ):
                connection.close()
                await asyncio.sleep(0)
                continue
            self._connections[host] += 1
            task = self._loop.create_task(self._greet(connection, host))
            self._open.add(task)
            task.add_done_callback(self._open.discard)

    async def _greet(self, connection: socket.socket, host: str) -> None:
        """Shake hands with a caller, and carry a verified one on, at the app's cost."""
        reader = asyncio.StreamReader(CHUNK_BYTES, self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        try:
            try:
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol,
                    connection,
                    ssl=self._current_context(),
                    ssl_handshake_timeout=HANDSHAKE_S,
                    ssl_shutdown_timeout=HANDSHAKE_S,
                )
            except (OSError, ssl.SSLError):
                connection.close()
                return
            try:
                writer = asyncio.StreamWriter(transport, protocol, reader, self._loop)
                await self._carry(reader, writer)
            finally:
                transport.abort()
        finally:
            self._connections[host] -= 1
            if not self._connections[host]:
                del self._connections[host]

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ours, apps = socket.socketpair()
        near_reader, near_writer = await asyncio.open_connection(sock=ours, limit=CHUNK_BYTES)
        try:
            self._take(apps, _caller(writer))
            ways = (_pump(reader, near_writer), _pump(near_reader, writer))
            tasks = [self._loop.create_task(way) for way in ways]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            with suppress(OSError, ssl.SSLError, TimeoutError):
                writer.close()
                await writer.wait_closed()
        finally:
            near_writer.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, ssl.SSLError):
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()


def _caller(writer: asyncio.StreamWriter) -> Caller:
    subject = writer.get_extra_info("peercert")["subject"]
    names = [value for part in subject for key, value in part if key == "commonName"]
    return Caller.of(names[0] if names else "")
