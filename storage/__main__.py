"""`python -m prorl.storage --config ROOT/service.json`: the store's process.

Prints `ready {"location": ...}` when trainers can reach it. SIGTERM and SIGINT: what was scored is
committed, within 5 s, then exit. Any error that it cannot mend ends it; the next one starts from
the control log. The rest is `prorl/process.py`.
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
from prorl.storage.serve.service import WORKER, serving


@asynccontextmanager
async def store(config: ServiceConfig, network: FlightNetwork) -> AsyncIterator[ServicePart]:
    """Start the store and give it once it listens."""
    async with serving(config, network, network) as (store_service, work):
        yield ServicePart(ready={"location": store_service.location}, work=work)


if __name__ == "__main__":
    args = command_line("python -m prorl.storage", "The store of a prorl service.").parse_args()
    live(args.config, partial(serve_part, WORKER, store), streams=True)
