"""Channels inside one event loop: what a `FlightNetwork` makes of a dial of its own location.

The same record batches pass as over Flight, without the socket; schemas and versions are compared,
and streams are accepted, refused and ended, as over Flight. A certificate or token is not asked
for: both ends are one process. What bounds the batches that wait is the credit of the edge above.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import pyarrow as pa

from prorl.errors import UnavailableError
from prorl.flight.queues import Inbox
from prorl.flight.refusals import presentable
from prorl.flight.wire import Opening, Routes, check_peer_schema, route_of
from prorl.protocols import Channel
from prorl.types import Json

log = logging.getLogger("prorl.flight")


class LocalChannel:
    """One end; `link` joins two of them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, peer: Mapping[str, Json]) -> None:
        self._peer = peer
        self._inbox = Inbox(loop)
        self._other: LocalChannel | None = None
        self.accepted: asyncio.Future[None] = loop.create_future()

    @classmethod
    def link(cls, hello: Mapping[str, Json]) -> tuple[LocalChannel, LocalChannel]:
        loop = asyncio.get_running_loop()
        dialled, served = cls(loop, hello), cls(loop, hello)
        dialled._other, served._other = served, dialled
        dialled.accept()
        return dialled, served

    @property
    def peer(self) -> Mapping[str, Json]:
        return self._peer

    @property
    def node(self) -> str:
        return ""

    @property
    def is_local(self) -> bool:
        return True

    def send(self, batch: pa.RecordBatch) -> None:
        self.accept()
        if self._other is not None:
            self._other._inbox.put(batch)

    async def receive(self) -> pa.RecordBatch | None:
        self.accept()
        return await self._inbox.receive()

    def accept(self) -> None:
        if not self.accepted.done():
            self.accepted.set_result(None)

    async def close(self) -> None:
        self.end()

    def end(self) -> None:
        """End both directions after what was sent."""
        other, self._other = self._other, None
        self._inbox.end()
        if other is not None:
            other.end()


class LocalStreams:
    """The open streams between parts of one loop. Belongs to that loop."""

    def __init__(self) -> None:
        self._handlers: dict[asyncio.Future[None], LocalChannel] = {}

    async def open(
        self, location: str, routes: Routes, opening: Opening, sends: pa.Schema, receives: pa.Schema
    ) -> Channel:
        """The dialler's end, once the route's handler has accepted the stream.

        Raises what the handler refuses with; NotFoundError, SchemaError as over Flight.
        """
        accept, handler_receives, handler_sends = route_of(routes, opening)
        check_peer_schema(handler_sends, receives, f"{location} {opening.path}")
        check_peer_schema(sends, handler_receives, opening.path)
        dialled, served = LocalChannel.link(opening.hello)
        handler = asyncio.ensure_future(accept(served))
        self._handlers[handler] = served
        handler.add_done_callback(self._handled)
        await served.accepted
        return dialled

    def _handled(self, handler: asyncio.Future[None]) -> None:
        served = self._handlers.pop(handler)
        error = (
            UnavailableError("shutting down")
            if handler.cancelled()
            else presentable(handler.exception())
        )
        if served.accepted.done():
            if error is not None and not handler.cancelled():
                log.warning("a stream ended: %s", error, extra={"peer": dict(served.peer)})
        elif error is not None:
            served.accepted.set_exception(error)
        served.accept()
        served.end()

    async def close(self) -> None:
        """End every stream and cancel its handler."""
        handlers = dict(self._handlers)
        for handler, served in handlers.items():
            served.end()
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
