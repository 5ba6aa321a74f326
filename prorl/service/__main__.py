"""`python -m prorl.service --config ROOT/service.json`: the gateway's process.

Prints `ready {"http": ..., "http_port": ..., "flight": ...}` when it serves. SIGTERM and SIGINT: stop serving, write what is in the
journal, exit. It dies with its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
from pathlib import Path
from types import TracebackType

import orjson
import uvicorn

from prorl.config import ServiceConfig, load_file, parse
from prorl.errors import ConfigError, ProrlError, UnavailableError
from prorl.flight import FlightNetwork
from prorl.sandbox.linux import PR_SET_PDEATHSIG, prctl
from prorl.service.app import create_app
from prorl.service.gateway import Gateway
from prorl.service.log import ControlLog

STOP_S = 5.0


class _JsonLines(logging.Formatter):
    """One JSON object a line, on stderr."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


class _Server(uvicorn.Server):
    """Leaves signals to us: the log must be closed last."""

    def install_signal_handlers(self) -> None:
        """Nothing."""


def bind(host: str, port: int) -> socket.socket:
    """A listening loopback socket. Raises UnavailableError when the port is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise UnavailableError(f"cannot listen on {host}:{port}: {error.strerror}; choose another `http_port`, 0 for any") from None
    listener.listen(1024)
    return listener


async def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    if not config.token:
        raise ConfigError("`token` is empty", "the bearer token that clients send", "start the service with `prorl serve`")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listener = bind(config.host, config.http_port)
    log = ControlLog(config.root / "control.db")
    network = FlightNetwork(token=config.token)
    gateway = Gateway(config, log, network)
    server = _Server(uvicorn.Config(create_app(gateway), log_config=None, access_log=False, lifespan="off", timeout_keep_alive=60))
    work = asyncio.ensure_future(gateway.run())
    flight = await gateway.listen()
    http = asyncio.ensure_future(server._serve(sockets=[listener]))
    stopping = asyncio.ensure_future(stop.wait())
    port = listener.getsockname()[1]
    host = f"[{config.host}]" if ":" in config.host else config.host
    ready = {"http": f"http://{host}:{port}", "http_port": port, "flight": flight}
    print("ready " + orjson.dumps(ready).decode(), flush=True)
    await asyncio.wait({work, http, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if work.done():
        work.result()
    server.should_exit = True
    await asyncio.wait({asyncio.ensure_future(gateway.durable()), asyncio.ensure_future(network.close())}, timeout=STOP_S / 2)
    work.cancel()
    log.close()


def _crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Our own bug: log it and leave at once; threads inside gRPC would keep the process alive."""
    logging.critical("gateway crashed: %s", error, exc_info=(kind, error, trace))
    sys.stderr.flush()
    os._exit(70)


def main() -> None:
    """Entry point. Exits with 1 and one line on stderr when it cannot start or go on."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser(prog="python -m prorl.service", description="The gateway of a prorl service.")
    parser.add_argument("--config", type=Path, required=True, help="ROOT/service.json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    sys.excepthook = _crash
    path: Path = parser.parse_args().config
    status = 0
    try:
        asyncio.run(serve(parse(ServiceConfig, load_file(path), str(path))))
    except* ProrlError as group:
        for error in group.exceptions:
            logging.error("%s", error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
