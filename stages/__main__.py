"""`python -m prorl.stages --config ROOT/service.json --stage run --worker run-0`: the process of one stage worker.

Prints `ready {"worker": ..., "location": ...}` when it listens. SIGTERM and SIGINT: stop what is in hand, report it, exit within 5 s.
It dies with its parent.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import orjson

from prorl.config import ServiceConfig, load_file, parse
from prorl.errors import ProrlError
from prorl.flight import FlightNetwork, trace, tune
from prorl.sandbox.host import UnixSandboxHost
from prorl.sandbox.linux import PR_SET_PDEATHSIG, prctl
from prorl.stages.worker import Worker
from prorl.types import Stage

SWITCH_S = 0.0005
"""How long a thread that wants the GIL waits: the streams' threads hand over in microseconds."""


class _JsonLines(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        line = {"at": record.created, "level": record.levelname.lower(), "logger": record.name, "event": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return orjson.dumps(line).decode()


async def serve(config: ServiceConfig, stage: Stage, name: str) -> None:
    """Work until SIGTERM, SIGINT or a drain."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if config.trace:
        trace.start(config.root / "trace", name)
    async with (
        FlightNetwork(token=config.token) as network,
        UnixSandboxHost(str(config.sandbox_socket), config.node_id) as host,
        Worker(config, stage, name, network, host) as worker,
    ):
        print("ready " + orjson.dumps({"worker": name, "location": worker.location}).decode(), flush=True)
        ends = {asyncio.ensure_future(worker.wait()), asyncio.ensure_future(stop.wait())}
        done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for end in done:
        end.result()


def main() -> None:
    """Entry point. Exits with 1 and one line on stderr when it cannot start or go on."""
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    parser = argparse.ArgumentParser(prog="python -m prorl.stages", description="One stage worker of a prorl service.")
    parser.add_argument("--config", type=Path, required=True, help="ROOT/service.json")
    parser.add_argument("--stage", type=Stage, required=True, choices=list(Stage))
    parser.add_argument("--worker", required=True, help="its name, e.g. run-0")
    asked = parser.parse_args()
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    sys.setswitchinterval(SWITCH_S)
    tune()
    status = 0
    try:
        asyncio.run(serve(parse(ServiceConfig, load_file(asked.config), str(asked.config)), asked.stage, asked.worker))
    except* ProrlError as group:
        for error in group.exceptions:
            logging.error("%s", error)
        status = 1
    except* BaseException as group:
        logging.critical("the worker broke", exc_info=group)
        status = 70
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads inside gRPC would keep the process alive.
    os._exit(status)


if __name__ == "__main__":
    main()
