"""A worker: the process of one chain of stages, or of one stage apart.

`python -m prorl.stages --config ROOT/service.json --worker worker-0`

Prints `ready {"worker": ..., "location": ...}` when it listens. SIGTERM and SIGINT: stop what is in
hand, report it, exit within 7 s. SIGUSR1: take nothing new, finish what is in hand, exit with
EXIT_DRAINED. SIGUSR2: the same, and give back what is not finished. The rest is `prorl/process.py`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `live`: what is imported stays, and is not looked through each time

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

from prorl.config import ServiceConfig
from prorl.flight import FlightNetwork
from prorl.process import ServicePart, command_line, live, serve_part
from prorl.sandbox.host import UnixSandboxHost
from prorl.stages.chain import Chain, on_signals


@asynccontextmanager
async def worker(
    name: str, config: ServiceConfig, network: FlightNetwork
) -> AsyncIterator[ServicePart]:
    """The stages of a worker, listening; their work ends when they have left."""
    async with (
        UnixSandboxHost(str(config.sandbox_socket), config.node_id, name) as host,
        Chain(config, name, network, host) as chain,
    ):
        on_signals(chain)
        ready = {"worker": name, "location": config.worker_flight(name)}
        yield ServicePart(ready=ready, work=chain.wait())


def main() -> None:
    """Run a worker until it is told to end; returns the exit status."""
    parser = command_line("python -m prorl.stages", "A worker of a prorl service.")
    parser.add_argument("--worker", required=True, help="its name, e.g. worker-0")
    args = parser.parse_args()
    live(args.config, partial(serve_part, args.worker, partial(worker, args.worker)), streams=True)


if __name__ == "__main__":
    main()
