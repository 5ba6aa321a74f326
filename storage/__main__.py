"""`python -m prorl.storage --config ROOT/service.json`: the store's process.

Prints `ready {"location": ...}` when trainers can reach it. SIGTERM and SIGINT: what was scored is committed, within 5 s, then exit.
It dies with its parent. Any error that it cannot mend ends it; the next one starts from the control log.
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
import structlog

from prorl.config import ServiceConfig, load_file, parse
from prorl.errors import ProrlError
from prorl.flight import FlightNetwork, trace, tune
from prorl.sandbox.linux import PR_SET_PDEATHSIG, prctl
from prorl.storage.service import WORKER, serving

SWITCH_S = 0.0005
"""How long a busy Python thread may keep the others waiting; the default of 5 ms shows in every small call."""


async def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    if config.trace:
        trace.start(config.root / "trace", WORKER)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with FlightNetwork(token=config.token) as network, serving(config, network, network) as (store, work):
        print("ready " + orjson.dumps({"location": store.location}).decode(), flush=True)
        stopped = asyncio.ensure_future(stop.wait())
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        if work.done():
            work.result()


def _log_json() -> None:
    """One JSON object a line, on stderr, for our log and for the libraries'."""
    shared: list[structlog.typing.Processor] = [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso")]
    shared += [structlog.processors.format_exc_info]
    render = structlog.processors.JSONRenderer(serializer=lambda value, **_: orjson.dumps(value, default=str).decode())
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter], logger_factory=structlog.stdlib.LoggerFactory()
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, render]
        )
    )
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Our own bug: log it and leave at once; threads inside gRPC would keep the process alive."""
    logging.critical("the store crashed: %s", error, exc_info=(kind, error, trace))
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
    parser = argparse.ArgumentParser(prog="python -m prorl.storage", description="The store of a prorl service.")
    parser.add_argument("--config", type=Path, required=True, help="ROOT/service.json")
    path: Path = parser.parse_args().config
    _log_json()
    sys.excepthook = _crash
    sys.setswitchinterval(SWITCH_S)
    tune()
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
