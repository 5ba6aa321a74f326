"""The gateway as one context manager: control log, core, Flight side, HTTP side.

The process `service` enters it.

async with serving(config, network) as served:
    print(served.http, served.flight)
    await served.failed()           # returns never; raises when the gateway cannot go on
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass

import uvicorn
from starlette.types import ASGIApp

from prorl.config import ServiceConfig
from prorl.errors import ConfigError, ProrlError, UnavailableError
from prorl.net.tls import AnyCredentials, Caller
from prorl.protocols import Network
from prorl.service.core.manifest import claim_store, foreign_directories
from prorl.service.gateway import Gateway
from prorl.service.http.app import create_app
from prorl.service.http.tls_listener import Take, TlsListener
from prorl.service.log.log import ControlLog
from prorl.waits import wait_limit_s

logger = logging.getLogger("prorl.service")

STOP_S = wait_limit_s("gateway.stop")


@dataclass(frozen=True, slots=True)
class RunningGateway:
    gateway: Gateway
    http: str
    http_port: int
    flight: str
    work: asyncio.Future[None]
    web: asyncio.Future[None]

    async def failed(self) -> None:
        """Wait until the gateway cannot go on; raises the reason."""
        await asyncio.wait({self.work, self.web}, return_when=asyncio.FIRST_COMPLETED)
        for part in (self.work, self.web):
            if part.done():
                part.result()
        raise UnavailableError("the gateway's HTTP side has ended")


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
    config: ServiceConfig,
    network: Network,
    log: ControlLog | None = None,
    credentials: AnyCredentials | None = None,
) -> AsyncIterator[RunningGateway]:
    """Serve a root over HTTP and over `network`, which is not closed here. With `credentials` over
    HTTPS at `config.listen` as well. Raises ConfigError, UnavailableError, ConflictError,
    SchemaError.
    """
    if not config.token:
        raise ConfigError(
            "`token` is empty",
            "the bearer token that clients send",
            "start the service with `prorl serve`",
        )
    with ExitStack() as sockets:
        listener = sockets.enter_context(bind(config.host, config.http_port))
        outer = None
        if credentials is not None:
            assert config.listener is not None
            outer = sockets.enter_context(bind(config.listener.host, config.listener.port))
        log = log or ControlLog(config.root / "control.db")
        sockets.callback(log.close)
        gateway = Gateway(config, log, network)
        claim_store(config, log.owner)
        for run_id, reason in gateway.core.state.refused.items():
            logger.error("run %s is not served: %s", run_id, reason)
        for run, why in list(foreign_directories(config, gateway.core.state.open.values())):
            logger.error("run %s is failed: %s", run.run_id, why)
            gateway.core.fail_run(run, why)
        work = asyncio.ensure_future(gateway.run())
        app = create_app(gateway)
        try:
            async with _web(app, listener) as (web, take):
                if outer is not None and credentials is not None:
                    sockets.enter_context(TlsListener(outer, credentials, take))
                flight = await gateway.listen()
                host, port = config.host, listener.getsockname()[1]
                http = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
                yield RunningGateway(gateway, http, port, flight, work, web)
        finally:
            await _end(gateway, work)


async def _end(gateway: Gateway, work: asyncio.Future[None]) -> None:
    """End a gateway's work, when what it has said is durable or `STOP_S` are over."""
    if not work.done():
        gateway.core.rollouts.settle_returned()
        with suppress(ProrlError, TimeoutError):
            await asyncio.wait_for(gateway.durable(), STOP_S)
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


@asynccontextmanager
async def _web(
    app: ASGIApp, listener: socket.socket
) -> AsyncIterator[tuple[asyncio.Future[None], Take]]:
    """uvicorn around the app in this loop, on one listener and for what `take` is given; open
    requests end within `STOP_S`.
    """
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=60
    )
    config.load()
    server, loop = uvicorn.Server(config), asyncio.get_running_loop()

    def take(connection: socket.socket, caller: Caller) -> None:
        def protocol() -> asyncio.Protocol:
            protocol_instance: asyncio.Protocol = config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=server.server_state, app_state={"caller": caller}
            )
            return protocol_instance

        asyncio.run_coroutine_threadsafe(loop.connect_accepted_socket(protocol, connection), loop)

    # Not `serve`: signals are the process's, which closes the log last.
    task = asyncio.ensure_future(server._serve(sockets=[listener]))
    try:
        yield task, take
    finally:
        server.should_exit = True
        await asyncio.wait({task}, timeout=STOP_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
