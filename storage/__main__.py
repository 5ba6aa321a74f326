"""`python -m prorl.storage --config ROOT/service.json`: the store's process.

Prints `ready {"location": ...}` when trainers can reach it. SIGTERM and SIGINT: what was scored is
committed, within 5 s, then exit. Any error that it cannot mend ends it; the next one starts from
the control log. The rest is `prorl/process.py`.
"""

from __future__ import annotations

import structlog

from prorl.config import ServiceConfig
from prorl.flight import FlightNetwork, trace
from prorl.process import command_line, credentials_of, live, say_ready, stopping, until_first
from prorl.storage.service import WORKER, serving


async def serve(config: ServiceConfig) -> None:
    """Serve until SIGTERM or SIGINT."""
    if config.trace:
        trace.start(config.root / "trace", WORKER)
    stop = stopping()
    async with (
        FlightNetwork(token=config.token, credentials=credentials_of(config)) as network,
        serving(config, network, network) as (store, work),
    ):
        say_ready(location=store.location)
        await until_first(work, stop.wait())


def log_by_standard_library() -> None:
    """structlog's events reach `JsonLines` as they are, on the levels that the standard library
    knows.
    """
    structlog.configure(
        processors=[
            structlog.processors.format_exc_info,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
    )


def main() -> None:
    """Entry point."""
    log_by_standard_library()
    live(
        command_line("python -m prorl.storage", "The store of a prorl service.")
        .parse_args()
        .config,
        serve,
        streams=True,
    )


if __name__ == "__main__":
    main()
