"""`topology: inline`: gateway, stages and store in this process's loop.

Sandboxd and model servers stay processes. For tests and tiny runs: the same objects as between
processes, record batches on the edges, the same control log and files. A part of this process that
breaks ends the service, and the next one on the root goes on from the log. Trainers and HTTP
clients reach it as usual. Log lines go to ROOT/logs/inline.log.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

from prorl import helper
from prorl.config import ServiceConfig
from prorl.errors import ConfigError, UnavailableError
from prorl.flight import FlightNetwork
from prorl.graph import GRAPH
from prorl.net.bearer import keys_of
from prorl.process import JsonLines
from prorl.sandbox.host import UnixSandboxHost
from prorl.service.serve import serving as serving_gateway
from prorl.stages.worker import Worker
from prorl.storage.serve.service import serving as serving_store
from prorl.supervisor.child import ChildSpec
from prorl.supervisor.service import Supervisor
from prorl.supervisor.specs import SANDBOXD, child_specs, model_specs


class Inline(Supervisor):
    """The supervisor of the few processes, and all other parts of the service itself."""

    def __init__(self, config: ServiceConfig) -> None:
        if config.listen:
            raise ConfigError(
                "`listen` with topology inline", "topology processes", "or leave `listen` out"
            )
        super().__init__(config, specs=_processes)
        self._parts = AsyncExitStack()

    async def _start(self) -> None:
        """Bring all up, what others dial first; the stack ends them in the opposite order."""
        await super()._start()
        stack = self._parts
        network = FlightNetwork(self.config.token, keys=keys_of(self.config))
        stack.enter_context(_log_to(self._root.path / "logs" / "inline.log"))
        stack.callback(helper.close)
        stack.push_async_callback(network.close)
        served = await stack.enter_async_context(serving_gateway(self.config, network))
        self._background(_endless(asyncio.shield(served.work)), "run the gateway")
        self._background(_endless(asyncio.shield(served.web)), "serve HTTP")
        self.config = self.config.model_copy(update={"http_port": served.http_port})
        _, work = await stack.enter_async_context(serving_store(self.config, network, network))
        self._background(_endless(asyncio.shield(work)), "run the store")
        sandboxes = UnixSandboxHost(str(self.config.sandbox_socket), self.config.node_id)
        host = await stack.enter_async_context(sandboxes)
        for stage in reversed(GRAPH.names):
            for index in range(self.config.pool(stage).workers):
                name = f"{stage}-{index}"
                worker = Worker(self.config, stage, name, network, host)
                await stack.enter_async_context(worker)
                self._background(_endless(worker.wait()), f"run {name}")
        self._root.write(self.config)

    async def drain(self, deadline_s: float) -> None:
        """Nothing: attempts end with the process, and begin anew."""

    def kill(self) -> None:
        """Leave at once: this is the service itself."""
        super().kill()
        if self._up:
            self._root.release()
            os._exit(130)

    async def _end(self) -> None:
        await self._end_watchers()
        await self._parts.aclose()
        await super()._end()


def _processes(config: ServiceConfig, config_file: str) -> tuple[ChildSpec, ...]:
    own = [spec for spec in child_specs(config, config_file) if spec.module == SANDBOXD]
    return (*own, *model_specs(config))


async def _endless(part: Awaitable[object]) -> None:
    """A part whose end is the service's."""
    await part
    raise UnavailableError("it has ended; the run can be resumed")


@contextmanager
def _log_to(path: Path) -> Iterator[None]:
    """Send what the parts log to a file for the block's length; the terminal is for progress."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(JsonLines())
    ours, web = logging.getLogger("prorl"), logging.getLogger("uvicorn")
    for logger in (ours, web):
        logger.addHandler(handler)
        logger.propagate = False
        logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        for logger in (ours, web):
            logger.removeHandler(handler)
            logger.propagate = True
        handler.close()
