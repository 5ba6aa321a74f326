"""An attempt's connections: at most MOST at once, each accepted in its turn (`share.py`).

What waits to be let in waits in the listener's queue, so it costs its own program alone. Where all
are taken, the one that has been idle for longest is closed; one whose request never ends counts as
idle as long as its head is not there, and `model_endpoint.READ_S` ends it afterwards.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.web_protocol import RequestHandler

from prorl.agents.capture.share import Account, share
from prorl.waits import wait_limit_s

MOST = 32
"""An attempt has at most so many connections; agents keep one to ten. Each may hold HEADERS of 8
KiB and 128 KiB of a body that is not read.
"""
HEADERS = 64
"""A request has at most so many headers; clients send about twenty."""
LINGER_S = wait_limit_s("endpoint.linger")
REFUSED_S = 0.1
"""Until the next connection is accepted after one could not be, for lack of descriptors."""

_log = logging.getLogger("prorl.agents.capture.http")
_log.setLevel(logging.CRITICAL)  # what a client breaks is its own affair, and may be said for ever


class Connections(web.Server):
    """The HTTP server of one attempt."""

    def __init__(
        self, handle: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]], account: Account
    ) -> None:
        super().__init__(
            handle, access_log=None, logger=_log, max_headers=HEADERS, lingering_time=LINGER_S
        )
        self._account = account
        self._idle: dict[RequestHandler, None] = {}
        """Open and without a request, in the order in which they became so."""
        self._busy: set[RequestHandler] = set()
        """With a request that is being answered, also where its client has gone away."""
        self._changed = asyncio.Event()

    def connection_made(self, handler: RequestHandler, transport: asyncio.Transport) -> None:
        super().connection_made(handler, transport)
        self._idle[handler] = None

    def connection_lost(self, handler: RequestHandler, exc: BaseException | None = None) -> None:
        super().connection_lost(handler, exc)
        self._idle.pop(handler, None)
        self._changed.set()

    def begins(self, handler: RequestHandler) -> None:
        """A request of this connection is being answered."""
        self._idle.pop(handler, None)
        self._busy.add(handler)

    def ends(self, handler: RequestHandler) -> None:
        self._busy.discard(handler)
        if handler.transport is not None:
            self._idle[handler] = None
        self._changed.set()

    async def accept(self, listener: socket.socket) -> None:
        """Let connections in until this is cancelled."""
        loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(MOST)
        while True:
            await self._room()
            await share().admit(self._account)
            try:
                accepted, _ = await loop.sock_accept(listener)
            except OSError:
                await asyncio.sleep(REFUSED_S)
                continue
            with suppress(OSError):  # it is gone already
                await loop.connect_accepted_socket(self, accepted)

    async def _room(self) -> None:
        while len(self._idle) + len(self._busy) >= MOST:
            self._changed.clear()
            if self._idle:
                handler = next(iter(self._idle))
                del self._idle[handler]
                handler.force_close()
            await self._changed.wait()
