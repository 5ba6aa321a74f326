"""`topology: inline`: gateway, stages and store in this process's loop over `LocalNetwork`.

Sandboxd stays a process. For tests and tiny runs: the same objects as between processes, record
batches on the edges, the same control log and files. Nothing is restarted: what breaks, sandboxd
included, ends the service, and the next one on the root goes on from the log. Trainers and HTTP
clients reach it as usual. Log lines go to ROOT/logs/inline.log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from prorl import helper
from prorl.config import ServiceConfig
from prorl.errors import ConfigError, UnavailableError
from prorl.flight import FlightNetwork, LocalNetwork
from prorl.graph import GRAPH
from prorl.net.bearer import keys_of, signing_key
from prorl.process import JsonLines
from prorl.sandbox.host import UnixSandboxHost
from prorl.service.serve import serving as serving_gateway
from prorl.stages.worker import Worker
from prorl.storage.serve.service import serving as serving_store
from prorl.supervisor.child import Child, ChildSpec, exit_text
from prorl.supervisor.root import Root
from prorl.supervisor.service import GRACE_S, READY_S, check_port, end_the_silent, http_url
from prorl.supervisor.specs import child_specs, model_specs, settle_models


class Inline:
    """Made by `inline_service`; implements `prorl.deploy.running.Running`."""

    def __init__(self, config: ServiceConfig, sandboxd: Child, root: Root) -> None:
        self.config, self._root = config, root
        self._parts: dict[str, asyncio.Future[Any]] = {}
        self._sandboxd = sandboxd

    @property
    def url(self) -> str:
        return http_url(self.config)

    def add(self, name: str, work: asyncio.Future[Any]) -> None:
        """A part whose end is the service's."""
        self._parts[name] = work

    trouble = ""

    def note_commits(self, total: int) -> None:
        """Nothing is restarted here, so nothing counts."""

    async def failed(self) -> None:
        done, _ = await asyncio.wait(self._parts.values(), return_when=asyncio.FIRST_COMPLETED)
        for name, part in self._parts.items():
            if part in done:
                part.result()
                words = (
                    f" {exit_text(part.result())}{self._sandboxd.last_words()}"
                    if name == "sandboxd"
                    else " has ended"
                )
                raise UnavailableError(f"{name}{words}; the run can be resumed")

    async def drain(self, deadline_s: float) -> None:
        """Nothing: attempts end with the process, and begin anew."""

    def kill(self) -> None:
        """Leave at once: this is the service itself."""
        self._sandboxd.signal(signal.SIGKILL)
        self._root.release()
        os._exit(130)


@asynccontextmanager
async def inline_service(config: ServiceConfig) -> AsyncIterator[Inline]:
    """A service in this loop, listening. Raises as `Supervisor` does."""
    if config.listen:
        raise ConfigError(
            "`listen` with topology inline", "topology processes", "or leave `listen` out"
        )
    check_port(config.host, config.http_port)
    root = Root(config.root)
    root.acquire()
    up = False
    try:
        async with AsyncExitStack() as stack:
            running = await _start(stack, config, root)
            up = True
            yield running
    finally:
        root.release(forget=not up)


async def _start(stack: AsyncExitStack, config: ServiceConfig, root: Root) -> Inline:
    """Bring every part up, what others dial first; the stack ends them in the opposite order."""
    signing_key(root.path)
    settled = {"root": root.path, "socket_dir": root.socket_dir, "token": root.token()}
    config = settle_models(config).model_copy(update=settled)
    stack.enter_context(_log_to(root.path / "logs" / "inline.log"))
    sandboxd = await _sandboxd(stack, config, root)
    running = Inline(config, sandboxd, root)
    running.add("sandboxd", asyncio.ensure_future(sandboxd.exited()))
    running.add("listen", _task(stack, end_the_silent(lambda: (sandboxd,))))
    for spec in model_specs(config):
        model = await _child(stack, spec, root)
        running.add(spec.name, asyncio.ensure_future(model.exited()))
    network = LocalNetwork()
    stack.callback(helper.close)
    stack.push_async_callback(network.close)
    await _gateway(stack, running, network)
    trainers = await stack.enter_async_context(FlightNetwork(config.token, keys=keys_of(config)))
    _, work = await stack.enter_async_context(serving_store(running.config, network, trainers))
    running.add("store", work)
    await _stages(stack, running, network)
    root.write(running.config)
    return running


async def _gateway(stack: AsyncExitStack, running: Inline, network: LocalNetwork) -> None:
    """Serve it; from then on the config knows its port."""
    served = await stack.enter_async_context(serving_gateway(running.config, network))
    running.add("gateway", served.work)
    running.add("http", served.web)
    running.config = running.config.model_copy(update={"http_port": served.http_port})


async def _stages(stack: AsyncExitStack, running: Inline, network: LocalNetwork) -> None:
    """Every stage's workers, over one connection to sandboxd."""
    config = running.config
    sandboxes = UnixSandboxHost(str(config.sandbox_socket), config.node_id)
    host = await stack.enter_async_context(sandboxes)
    for stage in reversed(GRAPH.names):
        for index in range(config.pool(stage).workers):
            name = f"{stage}-{index}"
            worker = await stack.enter_async_context(Worker(config, stage, name, network, host))
            running.add(name, _task(stack, worker.wait()))


async def _sandboxd(stack: AsyncExitStack, config: ServiceConfig, root: Root) -> Child:
    specs = child_specs(config, str(root.service_file))
    return await _child(stack, next(spec for spec in specs if spec.name == "sandboxd"), root)


async def _child(stack: AsyncExitStack, spec: ChildSpec, root: Root) -> Child:
    child = Child(spec, root.path / "logs")
    stack.push_async_callback(child.stop, GRACE_S)
    await child.start()
    await child.ready(READY_S)
    return child


def _task(stack: AsyncExitStack, work: Any) -> asyncio.Future[Any]:
    task: asyncio.Future[Any] = asyncio.ensure_future(work)

    async def end() -> None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    stack.push_async_callback(end)
    return task


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
