"""The gateway as one thing to enter and leave: log, core, Flight side, HTTP side.

For the process and for `topology: inline`.

async with serving(config, network) as served:
    print(served.http, served.flight)
    await served.failed()           # returns never; raises when the gateway cannot go on
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import uvicorn

from prorl.config import ServiceConfig
from prorl.errors import ConfigError, ProrlError, UnavailableError
from prorl.protocols import Network
from prorl.service.app import create_app
from prorl.service.gateway import Gateway
from prorl.service.log import ControlLog
from prorl.service.manifest import check_directories

STOP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A gateway that serves."""

    gateway: Gateway
    http: str
    http_port: int
    flight: str
    work: asyncio.Future[None]
    server: asyncio.Future[None]

    async def failed(self) -> None:
        """Wait until the gateway cannot go on; raises the reason."""
        await asyncio.wait({self.work, self.server}, return_when=asyncio.FIRST_COMPLETED)
        for part in (self.work, self.server):
            if part.done():
                part.result()
        raise UnavailableError("the gateway's HTTP side has ended")


class _Server(uvicorn.Server):
    """Leaves signals to its owner: the log must be closed last."""

    def install_signal_handlers(self) -> None:
        """Nothing."""


def bind(host: str, port: int) -> socket.socket:
    """A listening loopback socket. Raises UnavailableError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio turns Nagle's algorithm off only for sockets that say that they are TCP; with it, an
    # answer may wait 40 ms for an ACK.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UnavailableError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another `http_port`, 0"
            " for any"
        ) from None
    listener.listen(1024)
    return listener


@asynccontextmanager
async def serving(
    config: ServiceConfig, network: Network, log: ControlLog | None = None
) -> AsyncIterator[Served]:
    """Serve a root over HTTP and over `network` (not closed here).

    Raises ConfigError, UnavailableError, ConflictError, SchemaError.
    """
    if not config.token:
        raise ConfigError(
            "`token` is empty",
            "the bearer token that clients send",
            "start the service with `prorl serve`",
        )
    listener = bind(config.host, config.http_port)
    try:
        log = log or ControlLog(config.root / "control.db")
    except ProrlError:
        listener.close()
        raise
    try:
        gateway = Gateway(config, log, network)
        check_directories(config.root, gateway.core.state.runs.values())
    except ProrlError:
        listener.close()
        log.close()
        raise
    work = asyncio.ensure_future(gateway.run())
    server = _Server(
        uvicorn.Config(
            create_app(gateway),
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_keep_alive=60,
        )
    )
    http = asyncio.ensure_future(server._serve(sockets=[listener]))
    try:
        flight = await gateway.listen()
        port = listener.getsockname()[1]
        host = f"[{config.host}]" if ":" in config.host else config.host
        yield Served(
            gateway=gateway,
            http=f"http://{host}:{port}",
            http_port=port,
            flight=flight,
            work=work,
            server=http,
        )
    finally:
        server.should_exit = True
        if not work.done():
            with suppress(ProrlError, TimeoutError):
                await asyncio.wait_for(gateway.durable(), STOP_S)
        await asyncio.wait({http}, timeout=STOP_S)
        for task in (http, work):
            task.cancel()
        await asyncio.gather(http, work, return_exceptions=True)
        listener.close()
        log.close()
