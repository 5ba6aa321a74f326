"""`python -m prorl.stages --config ROOT/service.json --stage run --worker run-0`: the process of
one stage worker.

Prints `ready {"worker": ..., "location": ...}` when it listens. SIGTERM and SIGINT: stop what is in
hand, report it, exit within 5 s. The rest is `prorl/process.py`.
"""

from __future__ import annotations

from functools import partial

from prorl.config import ServiceConfig
from prorl.flight import FlightNetwork, trace
from prorl.process import command_line, live, say_ready, stopping, until_first
from prorl.sandbox.host import UnixSandboxHost
from prorl.stages.worker import Worker
from prorl.types import Stage


async def serve(stage: Stage, name: str, config: ServiceConfig) -> None:
    """Work until SIGTERM, SIGINT or a drain."""
    stop = stopping()
    if config.trace:
        trace.start(config.root / "trace", name)
    async with (
        FlightNetwork(token=config.token) as network,
        UnixSandboxHost(str(config.sandbox_socket), config.node_id) as host,
        Worker(config, stage, name, network, host) as worker,
    ):
        say_ready(worker=name, location=worker.location)
        await until_first(worker.wait(), stop.wait())


def main() -> None:
    """Entry point."""
    parser = command_line("python -m prorl.stages", "One stage worker of a prorl service.")
    parser.add_argument("--stage", type=Stage, required=True, choices=list(Stage))
    parser.add_argument("--worker", required=True, help="its name, e.g. run-0")
    asked = parser.parse_args()
    live(asked.config, partial(serve, asked.stage, asked.worker), streams=True)


if __name__ == "__main__":
    main()
