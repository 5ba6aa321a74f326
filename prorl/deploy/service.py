"""`python -m prorl.deploy.service --config ROOT/service.json`: the process `service`.

Gateway, store and, where the stages have no processes of their own, a chain of INIT, RUN and EVAL
in one loop, each reached at the Flight endpoints of this process: by others through the socket, by
the parts of this process without it. What others dial comes up first; the end goes the other way,
so that what has run is scored, what is scored is stored, and the log closes last.

Prints `ready {"http": ..., "http_port": ..., "flight": ...}` when all of it serves. SIGTERM and
SIGINT: end in order, within 13 s. SIGUSR1: the stages take nothing new, finish what is in hand, and
leave; `left` is printed, and gateway and store go on. SIGUSR2: the same, and the stages give back
what is not finished. A part that breaks ends the process; the next one starts from the log, the
parts and the journal of turns. The rest is `prorl/process.py`.
"""

from __future__ import annotations

import gc

if __name__ == "__main__":
    gc.disable()  # until `live`: what is imported stays, and is not looked through each time

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from prorl.config import ServiceConfig
from prorl.config.layout import SERVICE, processes
from prorl.errors import UnavailableError
from prorl.flight import FlightNetwork
from prorl.process import ServicePart, command_line, credentials_of, live, serve_part, until_first
from prorl.service.serve import serving as serving_gateway
from prorl.types import Json

if TYPE_CHECKING:
    from prorl.stages.chain import Chain


@asynccontextmanager
async def service(config: ServiceConfig, network: FlightNetwork) -> AsyncIterator[ServicePart]:
    """Starts all parts; their work ends only by an error. It imports no other process's modules."""
    async with AsyncExitStack() as stack:
        credentials = credentials_of(config)
        served = await stack.enter_async_context(
            serving_gateway(config, network, credentials=credentials)
        )
        ready: dict[str, Json] = {"http": served.http, "http_port": served.http_port}
        ready["flight"] = served.flight
        works: list[Callable[[], Coroutine[object, object, None]]] = [served.failed]
        if not config.store.own_process:
            from prorl.storage.serve.service import serving as serving_store

            store, work = await stack.enter_async_context(serving_store(config, network, network))
            ready["location"] = store.location
            works.append(partial(_endless, work, "the store"))
        if SERVICE in processes(config):
            from prorl.sandbox.host import UnixSandboxHost
            from prorl.stages.chain import Chain, on_signals

            host = UnixSandboxHost(str(config.sandbox_socket), config.node_id, SERVICE)
            chain = Chain(config, SERVICE, network, await stack.enter_async_context(host))
            await stack.enter_async_context(chain)
            on_signals(chain)
            works.append(partial(_leaves, chain))
        tasks = [asyncio.ensure_future(work()) for work in works]
        try:
            yield ServicePart(ready=ready, work=until_first(*tasks))
        finally:
            for task in tasks:
                task.cancel()  # what ends from here on is asked to
            await asyncio.gather(*tasks, return_exceptions=True)


async def _endless(work: asyncio.Task[None], name: str) -> None:
    await asyncio.shield(work)
    raise UnavailableError(f"{name} has ended")


async def _leaves(chain: Chain) -> None:
    """Say when the stages have left; the others stay."""
    await chain.wait()
    print("left", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    args = command_line("python -m prorl.deploy.service", "A prorl service.").parse_args()
    live(args.config, partial(serve_part, SERVICE, service), streams=True)
