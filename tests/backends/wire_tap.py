"""A wire tap: a port that carries bytes to a model server and back, and writes them down.

What is read from it is what the server was asked and what it said, whatever either side makes of
it. `async with Tap(port) as tap: tap.url`; `refuse` is what the kernel does for a dead process,
`listen` ends that. Frozen servers need nothing: their silence is carried, too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import h11
import orjson


@dataclass
class Call:
    at: float
    """When it was asked, by `time.monotonic`."""
    name: str
    prompt: list[int]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    is_whole: bool = False
    """Whether the reply came to its end."""


@dataclass
class Connection:
    request_chunks: list[tuple[float, bytes]] = field(default_factory=list)
    reply_chunks: list[bytes] = field(default_factory=list)


class Tap:
    """In front of the server at `port` of this host."""

    def __init__(self, port: int) -> None:
        self._upstream, self.port, self.url = port, 0, ""
        self._connections: list[Connection] = []
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Tap:
        await self.listen()
        return self

    async def __aexit__(self, *exc: object) -> None:
        self.refuse()

    async def listen(self) -> None:
        self._server = await asyncio.start_server(self._carry, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def refuse(self) -> None:
        if self._server is not None:
            self._server.close()
        for writer in self._open:
            writer.transport.abort()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = Connection()
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._upstream)
        except OSError:
            writer.transport.abort()
            return
        self._connections.append(connection)
        self._open |= {writer, back}
        try:
            await asyncio.gather(
                _pump(
                    reader, back, lambda b: connection.request_chunks.append((time.monotonic(), b))
                ),
                _pump(there, writer, connection.reply_chunks.append),
            )
        finally:
            self._open -= {writer, back}
            back.transport.abort()
            writer.transport.abort()

    def calls(self) -> list[Call]:
        """The model calls of rollouts so far; probes are not among them."""
        calls = [call for connection in self._connections for call in _calls(connection)]
        return sorted(calls, key=lambda call: call.at)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Any) -> None:
    try:
        while part := await reader.read(1 << 16):
            note(part)
            writer.write(part)
            await writer.drain()
        writer.close()
    except OSError:
        writer.transport.abort()


def _calls(connection: Connection) -> Iterator[Call]:
    for (at, target, request_bytes), (kind, reply_bytes) in zip(
        _requests(connection.request_chunks),
        [*_replies(connection.reply_chunks), ("", b"")],
        strict=False,
    ):
        if target != b"/v1/completions":
            continue
        body = orjson.loads(request_bytes)
        if str(body["request_id"]).startswith("probe"):
            continue
        call = Call(at, body["request_id"], body["prompt"])
        for value in _values(kind, reply_bytes):
            for choice in value.get("choices") or ():
                call.ids += choice["token_ids"] or []
                call.logprobs += (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"]
                call.is_whole = call.is_whole or choice["finish_reason"] is not None
        yield call


def _values(kind: str, body: bytes) -> Iterator[Any]:
    """The JSON objects of a reply; of a stream that was cut those that came whole."""
    if kind.startswith("application/json"):
        yield orjson.loads(body)
    elif kind.startswith("text/event-stream"):
        *lines, _ = body.split(b"\n")
        for line in lines:
            data = line.removeprefix(b"data:").strip()
            if line.startswith(b"data:") and data != b"[DONE]":
                yield orjson.loads(data)


def _requests(parts: list[tuple[float, bytes]]) -> Iterator[tuple[float, bytes, bytes]]:
    """Yields (when it began, target, body) of each whole request."""
    parser, began, target, body = h11.Connection(h11.SERVER), 0.0, b"", b""
    for at, part in parts:
        parser.receive_data(part)
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Request):
                began, target, body = at, event.target, b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                yield began, target, body
                parser.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
                parser.send(h11.EndOfMessage())
                if parser.our_state is h11.MUST_CLOSE:
                    return
                parser.start_next_cycle()
            else:
                break


def _replies(parts: list[bytes]) -> Iterator[tuple[str, bytes]]:
    """(content type, body) of each reply; the last may be cut."""
    parser = h11.Connection(h11.CLIENT)
    _expect(parser)
    kind, body = "", b""
    for part in parts:
        parser.receive_data(part)
        while True:
            event = parser.next_event()
            if isinstance(event, h11.Response):
                kind = dict(event.headers).get(b"content-type", b"").decode()
                body = b""
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                yield kind, body
                kind, body = "", b""
                if parser.their_state is h11.MUST_CLOSE:
                    return
                parser.start_next_cycle()
                _expect(parser)
            else:
                break
    if kind:
        yield kind, body


def _expect(parser: h11.Connection) -> None:
    parser.send(h11.Request(method="GET", target="/", headers=[("Host", "tap")]))
    parser.send(h11.EndOfMessage())
