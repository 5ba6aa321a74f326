"""`Channel` over one Arrow Flight `DoExchange`: both ends.

pyarrow's streams block, so each end has two threads without state, a reader and a writer; on the
serving side the reader is the RPC's own. Everything that decides runs on the owner's loop.

How a stream ends. The dialler says `GOODBYE`; a server that wants to end says it first, and the
dialler answers with its own. The RPC thread returns when the dialler said it (or is gone), the
handler is done and the writer thread has left: gRPC frees the stream at that moment. A peer that
was killed breaks the stream: the reader notices at once, `receive` gives None, both threads leave.
The dialler never half-closes (`done_writing`): the reader does so inside Arrow when the stream
ends, and twice at once aborts the process.

Not promised: noticing a peer that is frozen but alive on a Unix socket (heartbeats of the control
protocol do), delivery of what was sent before the peer died.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from functools import partial

import pyarrow as pa
import pyarrow.flight as fl

from prorl.errors import ProrlError, SchemaError, UnavailableError
from prorl.flight.queues import Inbox, Sender, call_threadsafe
from prorl.flight.refusals import REFUSALS, STREAM_ENDS, STREAM_ERRORS, from_flight
from prorl.flight.wire import (
    GOODBYE,
    IDLE,
    IDLE_S,
    Opening,
    call_options,
    check_peer_schema,
    open_client,
)
from prorl.net.tls import Credentials
from prorl.types import Json
from prorl.waits import wait_limit_s

CLOSE_S = wait_limit_s("flight.close")

log = logging.getLogger("prorl.flight")


def _read(reader: fl.FlightStreamReader, inbox: Inbox) -> bool:
    """Hand batches over until the stream ends; True when the other end said goodbye."""
    while True:
        try:
            chunk = reader.read_chunk()
        except STREAM_ENDS:
            return False
        if chunk.data is not None:
            inbox.put_threadsafe(chunk.data)
        elif chunk.app_metadata is not None and chunk.app_metadata.to_pybytes() == GOODBYE:
            return True


def _write(writer: fl.FlightStreamWriter, sender: Sender, *, idle: bool) -> None:
    """Write what is queued, then goodbye; `idle`: keep the connection's pings welcome."""
    try:
        while True:
            batches, ended = sender.take(IDLE_S)
            for batch in batches:
                writer.write_batch(batch)
            if ended:
                writer.write_metadata(GOODBYE)
                return
            if idle and not batches:
                writer.write_metadata(IDLE)
    except STREAM_ERRORS:
        return


class _End(ABC):
    """Holds what both ends share: the loop's side of a stream."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, peer: Mapping[str, Json], node: str = ""
    ) -> None:
        self._loop = loop
        self._peer, self._node = peer, node
        self._inbox = Inbox(loop)
        self._sender = Sender()
        self._closing = False
        self._closed = asyncio.Event()

    @property
    def peer(self) -> Mapping[str, Json]:
        return self._peer

    @property
    def node(self) -> str:
        return self._node

    @property
    def is_local(self) -> bool:
        return False

    def send(self, batch: pa.RecordBatch) -> None:
        if self._closing or self._closed.is_set():
            return
        if not self._sender.put(batch):
            log.warning(
                "a peer stopped reading; its stream is cut", extra={"peer": dict(self._peer)}
            )
            self._closing = True
            self._cut()

    async def receive(self) -> pa.RecordBatch | None:
        return await self._inbox.receive()

    @abstractmethod
    def _cut(self) -> None:
        """End the stream without regard for what is queued."""


class DialledChannel(_End):
    """The dialler's end: owns a client with a connection of its own."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hello: Mapping[str, Json],
        client: fl.FlightClient,
        streams: tuple[fl.FlightStreamWriter, fl.FlightStreamReader],
    ) -> None:
        super().__init__(loop, hello)
        self._client = client
        self._writer, self._reader = streams
        self._writing = threading.Thread(
            target=partial(_write, self._writer, self._sender, idle=False),
            name="flight-writer",
            daemon=True,
        )
        self._reading = threading.Thread(target=self._run_reader, name="flight-reader", daemon=True)

    def start(self) -> None:
        self._writing.start()
        self._reading.start()

    def _run_reader(self) -> None:
        if _read(self._reader, self._inbox):
            self._inbox.end_threadsafe()
            self._sender.end()
            _read(self._reader, self._inbox)
        self._inbox.end_threadsafe()
        self._sender.end()
        self._writing.join()
        _close_quietly(self._writer, self._client)
        call_threadsafe(self._loop, self._closed.set)

    def _cut(self) -> None:
        self._reader.cancel()

    @property
    def is_closed(self) -> bool:
        return self._closed.is_set()

    def end(self) -> None:
        """Start to end the stream after what is queued; idempotent."""
        if not self._closing:
            self._closing = True
            self._sender.end()

    async def close(self) -> None:
        """Send what is queued, end the stream, wait for its threads; idempotent."""
        self.end()
        try:
            await asyncio.wait_for(self._closed.wait(), CLOSE_S)
        except TimeoutError:
            self._cut()
            await self._closed.wait()
        self._reading.join()


class ServedChannel(_End):
    """The serving end: lives inside an RPC thread that `serve` occupies."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, hello: Mapping[str, Json], node: str = ""
    ) -> None:
        super().__init__(loop, hello, node)
        self.accepted: Future[None] = Future()
        """Done when the handler first sends or receives, or fails before that (refused)."""
        self.handled: Future[None] = Future()
        """Done when the handler has returned or raised."""

    def send(self, batch: pa.RecordBatch) -> None:
        self.accept()
        super().send(batch)

    async def receive(self) -> pa.RecordBatch | None:
        self.accept()
        return await super().receive()

    def accept(self) -> None:
        """Let the dialler's `dial` return."""
        if not self.accepted.done():
            self.accepted.set_result(None)

    def finish(self, error: ProrlError | None) -> None:
        """The handler is done: refuse the stream if it never accepted, else end it."""
        if not self.accepted.done():
            if error is None:
                self.accepted.set_result(None)
            else:
                self.accepted.set_exception(error)
        self._closing = True
        self._sender.end()
        self.handled.set_result(None)

    def wait_accepted(self, timeout_s: float) -> None:
        """Block the RPC thread until the handler accepts; raises what it refused with."""
        try:
            self.accepted.result(timeout_s)
        except FutureTimeout:
            self.abandon()
            raise UnavailableError("the stream was not accepted in time") from None

    def abandon(self) -> None:
        """The stream will not be served: its handler receives None."""
        self._inbox.end_threadsafe()

    def serve(
        self, reader: fl.MetadataRecordBatchReader, writer: fl.MetadataRecordBatchWriter
    ) -> None:
        """Occupy the RPC thread until dialler, handler and writer thread are done."""
        write = partial(_write, writer, self._sender, idle=True)
        writing = threading.Thread(target=write, name="flight-writer", daemon=True)
        writing.start()
        _read(reader, self._inbox)
        self._inbox.end_threadsafe()
        self.handled.result()
        writing.join()
        call_threadsafe(self._loop, self._closed.set)

    def _cut(self) -> None:
        self._inbox.end()
        self._sender.end()

    async def close(self) -> None:
        """Say goodbye after what is queued; idempotent."""
        if not self._closing:
            self._closing = True
            self._sender.end()
            self._inbox.end()


def dial_blocking(
    loop: asyncio.AbstractEventLoop,
    location: str,
    opening: Opening,
    schemas: tuple[pa.Schema, pa.Schema],
    token: str,
    timeout_s: float,
    credentials: Credentials | None = None,
) -> DialledChannel:
    """Open a stream: blocks until the other end accepts it; raises what it refused with.

    The stream has no deadline, so a timer cuts it when the other end does neither in time.
    """
    sends, receives = schemas
    where = f"{location} {opening.path}"
    client = open_client(location, credentials)
    try:
        writer, reader = client.do_exchange(
            fl.FlightDescriptor.for_command(opening.encode()), call_options(token)
        )
    except STREAM_ERRORS as error:
        client.close()
        raise from_flight(error, where) from None
    timer = threading.Timer(timeout_s, reader.cancel)
    timer.start()
    try:
        writer.begin(sends)
        check_peer_schema(reader.schema, receives, where)
    except REFUSALS as error:
        reader.cancel()
        _close_quietly(writer, client)
        raise error if isinstance(error, SchemaError) else from_flight(error, where) from None
    finally:
        timer.cancel()
    return DialledChannel(loop, opening.hello, client, (writer, reader))


def _close_quietly(writer: fl.FlightStreamWriter, client: fl.FlightClient) -> None:
    """Free a stream whose end is already known."""
    for part in (writer, client):
        try:
            part.close()
        except STREAM_ERRORS:
            continue
