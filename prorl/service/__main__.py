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
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

import orjson

from prorl.config import ServiceConfig, load_file, parse
from prorl.errors import ProrlError
from prorl.flight import FlightNetwork, trace
from prorl.sandbox.linux import PR_SET_PDEATHSIG, prctl
from prorl.service.serve import serving


class _JsonLines(logging.Formatter):
    """One JSON object a line, on stderr."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


async def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    if config.trace:
        trace.start(config.root / "trace", "gateway")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FlightNetwork(token=config.token) as network, serving(config, network) as served:
        ready = {"http": served.http, "http_port": served.http_port, "flight": served.flight}
        print("ready " + orjson.dumps(ready).decode(), flush=True)
        failed, stopped = asyncio.ensure_future(served.failed()), asyncio.ensure_future(stop.wait())
        await asyncio.wait({failed, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if failed.done():
            failed.result()
        failed.cancel()


def _crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Our own bug: log it and leave at once; threads inside gRPC would keep the process alive."""
    logging.critical("gateway crashed: %s", error, exc_info=(kind, error, trace))
    sys.stderr.flush()
    os._exit(70)


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error


def main() -> None:
    """Entry point. Exits with 1 and one line on stderr when it cannot start or go on."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser(prog="python -m prorl.service", description="The gateway of a prorl service.")
    parser.add_argument("--config", type=Path, required=True, help="ROOT/service.json")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    path: Path = parser.parse_args().config
    sys.excepthook = _crash
    status = 0
    try:
        asyncio.run(serve(parse(ServiceConfig, load_file(path), str(path))))
    except* ProrlError as group:
        for error in _leaves(group):
            logging.error("%s", error)
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    main()
