"""`python -m prorl.service --config ROOT/service.json`: the gateway's process.

Prints `ready {"http": ..., "http_port": ..., "flight": ...}` when it serves. SIGTERM and SIGINT:
stop serving, write what is in the journal, exit. The rest is `prorl/process.py`.
"""

from __future__ import annotations

from prorl.config import ServiceConfig
from prorl.flight import FlightNetwork, trace
from prorl.process import command_line, credentials_of, live, say_ready, stopping, until_first
from prorl.service.serve import serving


async def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    if config.trace:
        trace.start(config.root / "trace", "gateway")
    stop, credentials = stopping(), credentials_of(config)
    async with (
        FlightNetwork(token=config.token, credentials=credentials) as network,
        serving(config, network, credentials=credentials) as served,
    ):
        say_ready(http=served.http, http_port=served.http_port, flight=served.flight)
        await until_first(served.failed(), stop.wait())


if __name__ == "__main__":
    live(
        command_line("python -m prorl.service", "The gateway of a prorl service.")
        .parse_args()
        .config,
        serve,
    )
