"""A service whose process `service` is this one, so that a test can change what runs in it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from prorl.config import ServiceConfig
from prorl.config.layout import SERVICE, processes
from prorl.deploy.service import service
from prorl.flight import FlightNetwork
from prorl.net.bearer import keys_of
from prorl.sandbox.host import UnixSandboxHost
from prorl.stages.chain import Chain
from prorl.supervisor.child import ChildSpec
from prorl.supervisor.service import Supervisor
from prorl.supervisor.specs import child_specs


def _others(config: ServiceConfig, config_file: str) -> tuple[ChildSpec, ...]:
    ours = {SERVICE, *processes(config)}
    return tuple(spec for spec in child_specs(config, config_file) if spec.name not in ours)


@asynccontextmanager
async def _worker(config: ServiceConfig, name: str) -> AsyncIterator[None]:
    """Runs the stages as `python -m prorl.stages` does, with a Flight server of its own."""
    async with (
        FlightNetwork(config.token, keys=keys_of(config)) as network,
        UnixSandboxHost(str(config.sandbox_socket), config.node_id, name) as host,
        Chain(config, name, network, host),
    ):
        yield


@asynccontextmanager
async def in_process(config: ServiceConfig) -> AsyncIterator[Supervisor]:
    """The same parts as in `python -m prorl.deploy.service`, and workers, each at its own Flight
    server; sandboxd and models stay processes.
    """
    async with (
        Supervisor(config, specs=_others) as running,
        FlightNetwork(running.config.token, keys=keys_of(running.config)) as network,
        service(running.config, network) as part,
        AsyncExitStack() as stack,
    ):
        work = asyncio.ensure_future(part.work)
        port = part.ready["http_port"]
        running.config = running.config.model_copy(update={"http_port": port})
        running.publish()
        for name in processes(running.config):
            if name != SERVICE:
                await stack.enter_async_context(_worker(running.config, name))
        yield running
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
