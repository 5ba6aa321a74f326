"""`FlightNetwork`: listens and dials over Arrow Flight, with a bearer token on every call.

A process has one. A dial of a location that it serves itself gets a channel inside the loop
(`local.py`): the endpoint hands the same record batches over without the socket. All other dials,
those of other processes among them, go through Flight.

One `FlightServerBase` per location; several parts of a process may serve routes at one. Its RPC
threads own nothing: they hand streams and reads to the loop of the process and wait for the answer.
`FlightReads` lets the store answer `get_flight_info`, `do_get` and `do_action` from coroutines; a
`do_get` answers with a `pa.Table` (or an IPC reader), which pyarrow streams in C++ without the GIL,
never with a Python iterator.

Shutdown: `close` ends every channel, cancels what handlers still do, and waits `CLOSE_S` for the
RPC threads; a stream whose peer is stalled is left to the end of the process (`os._exit`).
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import CancelledError as FutureCancelled
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.flight as fl

from prorl.errors import UnavailableError
from prorl.flight.channel import CLOSE_S, DialledChannel, ServedChannel, dial_blocking
from prorl.flight.local import LocalStreams
from prorl.flight.queues import call_threadsafe
from prorl.flight.refusals import STREAM_ERRORS, presentable, to_flight
from prorl.flight.rpc import FlightReads, RpcServer
from prorl.flight.wire import (
    Opening,
    Route,
    Routes,
    check_location,
    guard_fork,
    with_version,
)
from prorl.net.bearer import Keys
from prorl.net.tls import AnyCredentials, Credentials
from prorl.protocols import Accept, Channel
from prorl.types import Json
from prorl.waits import wait_limit_s

DIAL_S = wait_limit_s("flight.dial")

POLL_S = 0.2
"""The seconds between two looks of a waiting read whether its client is still there (Flight has no
event for it).
"""


LOOK_S = 30.0
"""The seconds between two looks of a listener whether it has new credentials to show."""

REBIND_S = 0.2
"""gRPC lets go of a port some milliseconds after it was told to."""

AnswerT = TypeVar("AnswerT")

log = logging.getLogger("prorl.flight")


class _Listening(NamedTuple):
    """A location that is served, and all that it takes to serve it again."""

    name: str
    routes: dict[str, Route]
    reads: FlightReads | None
    credentials: Credentials | None
    server: RpcServer


class FlightNetwork:
    """Implements `prorl.protocols.Network` between processes. Belongs to one event loop."""

    def __init__(
        self, token: str = "", credentials: AnyCredentials | None = None, keys: Keys | None = None
    ) -> None:
        """`token` is sent with every call, but not by the service to other hosts; `keys` says
        who is let in, by default whoever sends it.

        `credentials`: for `grpc+tls` locations, both listened at and dialled. Once they are others,
        those are shown, at listeners within `LOOK_S`.
        """
        self._token, self._credentials = token, credentials
        self._keys = keys or Keys(token)
        self._servers: list[_Listening] = []
        self._renewing: asyncio.Task[None] | None = None
        self._streams: dict[ServedChannel, asyncio.Future[None]] = {}
        self._dialled: set[DialledChannel] = set()
        self._local = LocalStreams()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    async def __aenter__(self) -> FlightNetwork:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def listen(self, name: str, routes: Routes, reads: FlightReads | None = None) -> str:
        """Serve routes (and reads) at `grpc+unix:///path`, `grpc://host:port` or, with
        certificates on both sides, `grpc+tls://host:port`; port 0 = any. The location to dial.

        Routes for a location that this network serves already join those that are there. Raises
        ConfigError for a location of another form, UnavailableError when it or a path is taken.
        """
        check_location(name)
        guard_fork()
        self._loop = asyncio.get_running_loop()
        served = self._served_at(name)
        if served is not None:
            if reads is not None or served.routes.keys() & routes.keys():
                raise UnavailableError(f"cannot listen at {name}: this process does already")
            served.routes.update(routes)
            return name
        routes = dict(routes)
        credentials = self._credentials.current if self._credentials is not None else None
        server = self._serve(name, routes, reads, credentials)
        if not name.startswith("grpc+unix"):
            name = f"{name.rpartition(':')[0]}:{server.port}"
        self._servers.append(_Listening(name, routes, reads, credentials, server))
        if name.startswith("grpc+tls") and self._renewing is None:
            self._renewing = asyncio.create_task(self._renew_forever())
        return name

    def _served_at(self, location: str) -> _Listening | None:
        return next((listening for listening in self._servers if listening.name == location), None)

    def _serve(
        self, name: str, routes: Routes, reads: FlightReads | None, credentials: Credentials | None
    ) -> RpcServer:
        try:
            return RpcServer(self, name, routes, reads, self._keys, credentials)
        except STREAM_ERRORS as error:
            why = str(error).splitlines()[0]
            if "did not start properly" in why:  # gRPC says the reason on stderr alone
                why = "another process has that port, or the address is not this host's"
            raise UnavailableError(f"cannot listen at {name}: {why}") from None

    async def _renew_forever(self) -> None:
        """Listen with new credentials once there are some; open streams go on as they are."""
        assert self._credentials is not None
        while True:
            await asyncio.sleep(min(LOOK_S, self._credentials.current.look_s))
            credentials = self._credentials.current
            for place, old in enumerate(self._servers):
                if old.name.startswith("grpc+tls") and old.credentials is not credentials:
                    # Its port is free at once; the call itself waits for streams that go on.
                    threading.Thread(target=old.server.shutdown, daemon=True).start()
                    await asyncio.sleep(REBIND_S)
                    server = self._serve(old.name, old.routes, old.reads, credentials)
                    self._servers[place] = old._replace(credentials=credentials, server=server)
                    log.info("listening at %s with a new certificate", old.name)

    async def dial(
        self,
        location: str,
        path: str,
        hello: Mapping[str, Json],
        sends: pa.Schema,
        receives: pa.Schema,
    ) -> Channel:
        """Raises UnavailableError when nobody answers, SchemaError when versions or columns differ,
        ConfigError for a refused token, else what the other end's handler refused with.
        """
        loop = asyncio.get_running_loop()
        opening, token = Opening(path, with_version(hello)), self._token
        own = self._served_at(location)
        if own is not None:
            if self._closed:
                raise UnavailableError(f"{location} {path}: shutting down")
            return await self._local.open(location, own.routes, opening, sends, receives)
        credentials = self._credentials.current if self._credentials is not None else None
        if location.startswith("grpc+tls") and credentials is not None:
            token = "" if credentials.role == "service" else token
            credentials.check_valid()
        schemas = (sends, receives)
        dialling = asyncio.ensure_future(
            asyncio.to_thread(
                dial_blocking, loop, location, opening, schemas, token, DIAL_S, credentials
            )
        )
        try:
            channel = await asyncio.shield(dialling)
        except asyncio.CancelledError:
            dialling.add_done_callback(_discard)
            raise
        channel.start()
        self._dialled = {end for end in self._dialled if not end.is_closed} | {channel}
        return channel

    async def close(self) -> None:
        """Stop listening, end every channel, wait for peers that answer; idempotent."""
        if self._closed:
            return
        self._closed = True
        for stream, handler in self._streams.items():
            await stream.close()
            handler.cancel()
        await self._local.close()
        await asyncio.gather(*(end.close() for end in self._dialled))
        await asyncio.gather(*self._streams.values(), return_exceptions=True)
        if self._renewing is not None:
            self._renewing.cancel()
        for listening in self._servers:
            # `shutdown` waits for open streams without limit: it gets a thread and a deadline
            stopping = threading.Thread(
                target=listening.server.shutdown, name="flight-shutdown", daemon=True
            )
            stopping.start()
            await asyncio.to_thread(stopping.join, CLOSE_S)

    def begin_stream(self, opening: Opening, accept: Accept, node: str) -> ServedChannel:
        assert self._loop is not None
        stream = ServedChannel(self._loop, opening.hello, node)
        call_threadsafe(self._loop, lambda: self._handle(stream, accept))
        return stream

    def _handle(self, stream: ServedChannel, accept: Accept) -> None:
        if self._closed:
            stream.finish(UnavailableError("shutting down"))
            return
        handler = asyncio.ensure_future(accept(stream))
        self._streams[stream] = handler
        handler.add_done_callback(lambda done: self._handled(stream, done))

    def _handled(self, stream: ServedChannel, handler: asyncio.Future[None]) -> None:
        del self._streams[stream]
        error = (
            UnavailableError("shutting down")
            if handler.cancelled()
            else presentable(handler.exception())
        )
        if error is not None and stream.accepted.done() and not handler.cancelled():
            log.warning("a stream ended: %s", error, extra={"peer": dict(stream.peer)})
        stream.finish(error)

    def answer(
        self,
        context: fl.ServerCallContext,
        handler: Callable[[bytes], Awaitable[AnswerT]],
        argument: bytes,
    ) -> AnswerT:
        """Run a read on the loop and wait for it in an RPC thread; raises Flight errors."""
        if self._loop is None or self._closed:
            raise to_flight(UnavailableError("shutting down"))
        future = asyncio.run_coroutine_threadsafe(_call(handler, argument), self._loop)
        refusal = presentable(self._outcome(context, future))
        if refusal is not None:
            raise to_flight(refusal) from None
        return future.result()

    def _outcome(
        self, context: fl.ServerCallContext, future: Future[AnswerT]
    ) -> BaseException | None:
        """Returns what a read raised, if anything; it is cancelled with its client, or with us."""
        while True:
            try:
                return future.exception(POLL_S)
            except FutureTimeout:
                if context.is_cancelled() or self._closed:
                    future.cancel()
            except FutureCancelled:
                raise fl.FlightCancelledError("cancelled") from None


async def _call(handler: Callable[[bytes], Awaitable[AnswerT]], argument: bytes) -> AnswerT:
    return await handler(argument)


def _discard(dialling: asyncio.Future[DialledChannel]) -> None:
    """Close a channel that nobody waits for any more."""
    if not dialling.cancelled() and dialling.exception() is None:
        channel = dialling.result()
        channel.start()
        channel.end()
