"""A service around a block of code, with the signals that end it.

First Ctrl-C or SIGTERM: `Stop.requested` is set, the owner leaves its block, the service ends in
order and keeps what was done. Second: every child is killed. Signal handlers belong to the main
thread's loop and are given back at the end.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

from prorl.config import ServiceConfig
from prorl.supervisor.service import Supervisor
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.client.client import Client
    from prorl.client.http import Http

ResultT = TypeVar("ResultT")

POLL_S = 0.3

PATIENCE_S = wait_limit_s("cli.gateway")


class Stop:
    """A request to stop, which may come once or twice."""

    def __init__(self) -> None:
        self.requested = asyncio.Event()
        self._on_second: Callable[[], None] = lambda: None

    def arm(self, on_second: Callable[[], None]) -> None:
        """Sets what a second request does."""
        self._on_second = on_second

    def ask(self) -> None:
        """Requests a stop, by signal or by code."""
        if self.requested.is_set():
            self._on_second()
        self.requested.set()


@asynccontextmanager
async def signals() -> AsyncIterator[Stop]:
    """Turn SIGINT and SIGTERM into a `Stop` for the length of the block."""
    loop, stop = asyncio.get_running_loop(), Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.ask)
    try:
        yield stop
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


@asynccontextmanager
async def service(config: ServiceConfig, stop: Stop) -> AsyncIterator[Supervisor]:
    """Start a service and give it once it listens.

    Raises UserError for what it cannot work with, UnavailableError when a process does not start.
    """
    supervisor = Supervisor(config)
    stop.arm(supervisor.kill)
    async with supervisor:
        yield supervisor


def client_of(running: Supervisor, patience_s: float = PATIENCE_S) -> Client:
    """Makes a client of the service. Its calls block: make them in threads (`to_thread`)."""
    from prorl.client.client import Client

    return Client(http=http_of(running, patience_s))


def http_of(running: Supervisor, patience_s: float = PATIENCE_S) -> Http:
    """Makes a client of the service's HTTP alone, which needs no Arrow; its calls block, too.

    It looks for a restarted gateway in silence: the terminal is for progress.
    """
    import stamina

    from prorl.client.http import Http

    stamina.instrumentation.set_on_retry_hooks([])
    return Http(running.url, running.config.token, retry_s=patience_s)


async def first(stop: Stop, running: Supervisor, work: Awaitable[ResultT]) -> ResultT | None:
    """Await `work`; None when a stop was asked for first.

    Raises what `work` or the service's failure raises.
    """
    job = asyncio.ensure_future(work)
    failure = asyncio.ensure_future(running.failed())
    stop_request = asyncio.ensure_future(stop.requested.wait())
    try:
        await asyncio.wait([job, failure, stop_request], return_when=asyncio.FIRST_COMPLETED)
        if failure.done():
            await failure
        return await job if job.done() else None
    finally:
        for task in (job, failure, stop_request):
            task.cancel()
        await asyncio.gather(job, failure, stop_request, return_exceptions=True)
