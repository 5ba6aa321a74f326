"""`LocalNetwork`: the same channels inside one event loop, for `topology: inline` and for tests.

Only record batches pass; schemas and versions are compared, and streams accepted, refused and
ended, as over Flight.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

import pyarrow as pa

from prorl.errors import ProrlError, UnavailableError
from prorl.flight.queues import Inbox
from prorl.flight.wire import Opening, Routes, check_peer_schema, route_of, with_version
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


class LocalNetwork:
    """Implements `prorl.protocols.Network` inside one loop; any text is a location."""

    def __init__(self) -> None:
        self._served: dict[str, Routes] = {}
        self._handlers: dict[asyncio.Future[None], LocalChannel] = {}
        self._closed = False

    async def __aenter__(self) -> LocalNetwork:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    async def listen(self, name: str, routes: Routes) -> str:
        if name in self._served:
            raise UnavailableError(f"cannot listen at {name}: taken")
        self._served[name] = routes
        return name

    async def dial(
        self,
        location: str,
        path: str,
        hello: Mapping[str, Json],
        sends: pa.Schema,
        receives: pa.Schema,
    ) -> Channel:
        routes = self._served.get(location)
        if routes is None or self._closed:
            raise UnavailableError(f"{location} {path}: nobody listens")
        opening = Opening(path, with_version(hello))
        accept, handler_receives, handler_sends = route_of(routes, opening)
        check_peer_schema(handler_sends, receives, f"{location} {path}")
        check_peer_schema(sends, handler_receives, path)
        dialled, served = LocalChannel.link(opening.hello)
        handler = asyncio.ensure_future(accept(served))
        self._handlers[handler] = served
        handler.add_done_callback(self._handled)
        await served.accepted
        return dialled

    def _handled(self, handler: asyncio.Future[None]) -> None:
        served = self._handlers.pop(handler)
        error = UnavailableError("shutting down") if handler.cancelled() else handler.exception()
        if served.accepted.done():
            if error is not None and not handler.cancelled():
                log.warning(
                    "a stream ended: %s",
                    error,
                    exc_info=None if isinstance(error, ProrlError) else error,
                )
        elif error is not None:
            served.accepted.set_exception(error)
        served.accept()
        served.end()

    async def close(self) -> None:
        self._closed = True
        self._served.clear()
        handlers = dict(self._handlers)
        for handler, served in handlers.items():
            served.end()
            handler.cancel()
        await asyncio.gather(*handlers, return_exceptions=True)
