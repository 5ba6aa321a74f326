"""The process of one stage worker.

`python -m prorl.stages --config ROOT/service.json --stage run --worker run-0`

Prints `ready {"worker": ..., "location": ...}` when it listens. SIGTERM and SIGINT: stop what is in
hand, report it, exit within 5 s. SIGUSR1: take nothing new, finish what is in hand, exit with
EXIT_LEFT. SIGUSR2: the same, and give back what is not finished. The rest is `prorl/process.py`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `live`: what is imported stays, and is not looked through each time

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from prorl.config import ServiceConfig
from prorl.flight import FlightNetwork
from prorl.graph import GRAPH
from prorl.process import Part, command_line, live, serve_part
from prorl.sandbox.host import UnixSandboxHost
from prorl.stages.worker import Worker


@asynccontextmanager
async def worker(
    stage: str, name: str, config: ServiceConfig, network: FlightNetwork
) -> AsyncIterator[Part]:
    """One stage worker, listening; its work ends when it was drained."""
    async with (
        UnixSandboxHost(str(config.sandbox_socket), config.node_id) as host,
        Worker(config, stage, name, network, host) as made,
    ):
        loop = asyncio.get_running_loop()
        for number, deadline_s in ((signal.SIGUSR1, None), (signal.SIGUSR2, 0.0)):
            loop.add_signal_handler(number, made.leave, deadline_s)
        yield Part(ready={"worker": name, "location": made.location}, work=made.wait())


def main() -> None:
    """Run one stage worker until it is told to end; returns the exit status."""
    parser = command_line("python -m prorl.stages", "One stage worker of a prorl service.")
    parser.add_argument("--stage", required=True, choices=GRAPH.names)
    parser.add_argument("--worker", required=True, help="its name, e.g. run-0")
    asked = parser.parse_args()
    serving = partial(worker, asked.stage, asked.worker)
    live(asked.config, partial(serve_part, asked.worker, serving), streams=True)


if __name__ == "__main__":
    main()
