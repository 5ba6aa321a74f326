"""`python -m prorl.service --config ROOT/service.json`: the gateway's process. Prints `ready
{"http": ..., "http_port": ..., "flight": ...}` when it serves. SIGTERM and SIGINT: stop serving,
write what is in the journal, exit. The rest is `prorl/process.py`.
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
from prorl.process import Part, command_line, credentials_of, live, serve_part
from prorl.service.serve import serving


@asynccontextmanager
async def gateway(config: ServiceConfig, network: FlightNetwork) -> AsyncIterator[Part]:
    async with serving(config, network, credentials=credentials_of(config)) as served:
        ready = {"http": served.http, "http_port": served.http_port, "flight": served.flight}
        yield Part(ready=ready, work=served.failed())


if __name__ == "__main__":
    asked = command_line("python -m prorl.service", "The gateway of a prorl service.").parse_args()
    live(asked.config, partial(serve_part, "gateway", gateway))
