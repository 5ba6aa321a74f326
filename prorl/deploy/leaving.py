"""Drains a node: it accepts nothing new, ends or returns what it has, and waits for the store.

    SIGTERM          `sigterm_drain_s` to end what is in hand: whoever sends it kills soon
    SIGUSR1          `drain_s`: a batch system's warning before the end of a job
    walltime         the same, by the node's own clock, so early that everything fits
    Dask, operator   the same; an operator's order comes over the control streams
    SIGINT           nothing is waited for; the second one kills

What goes back is charged to no rollout. A node that was sent SIGTERM inside a Slurm job stays as an
empty process until Slurm ends it: a job that ends by itself is not put back into the queue.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager

from prorl.config import ServiceConfig
from prorl.errors import ConfigError
from prorl.supervisor.service import Supervisor
from prorl.waits import wait_limit_s

FINISH_S = wait_limit_s("node.finish")

MANY = 16

log = logging.getLogger("prorl.deploy")


class LeaveRequests:
    """Requests to leave; also the first `MANY` that come before the node is up."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[tuple[str, float]] = asyncio.Queue(MANY)
        self.reasons: list[str] = []
        self.kill = asyncio.Event()

    def ask(self, why: str, deadline_s: float) -> None:
        """Leave; what is not finished after `deadline_s` goes back. The earliest one counts."""
        self.reasons.append(why)
        if not self._queue.full():
            self._queue.put_nowait((why, deadline_s))

    def interrupt(self) -> None:
        """Somebody at a terminal does not want to wait."""
        if "SIGINT" in self.reasons:
            self.kill.set()
        self.ask("SIGINT", 0.0)

    async def next(self) -> tuple[str, float]:
        return await self._queue.get()


@asynccontextmanager
async def leave_requests(config: ServiceConfig) -> AsyncIterator[LeaveRequests]:
    """Turn signals into requests for the length of the block."""
    loop, requests = asyncio.get_running_loop(), LeaveRequests()
    loop.add_signal_handler(signal.SIGINT, requests.interrupt)
    loop.add_signal_handler(signal.SIGTERM, requests.ask, "SIGTERM", config.sigterm_drain_s)
    loop.add_signal_handler(signal.SIGUSR1, requests.ask, "SIGUSR1", config.drain_s)
    try:
        yield requests
    finally:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            loop.remove_signal_handler(number)


async def stay(
    supervisor: Supervisor,
    requests: LeaveRequests,
    remaining_s: float | None = None,
    *others: Coroutine[object, object, None],
) -> None:
    """Work until the node has left.

    `remaining_s`: seconds of its walltime. `others`: what runs as long as it does. Raises what
    broke it, or one of them.
    """
    watched = (supervisor.failed(), supervisor.drained.wait(), requests.kill.wait())
    done_here = (
        _obey(supervisor, requests),
        _watch_clock(supervisor.config, requests, remaining_s),
    )
    works = [asyncio.ensure_future(work) for work in (*watched, *done_here, *others)]
    try:
        done, _ = await asyncio.wait(works, return_when=asyncio.FIRST_COMPLETED)
        for work in done:
            work.result()
        if requests.kill.is_set():
            supervisor.kill()
    finally:
        for work in works:
            work.cancel()
        await asyncio.gather(*works, return_exceptions=True)


async def _obey(supervisor: Supervisor, requests: LeaveRequests) -> None:
    """Carry out requests for ever; a later one may have the earlier deadline."""
    async with asyncio.TaskGroup() as drains:
        while True:
            why, deadline_s = await requests.next()
            log.info("leaving within %g s: %s", deadline_s, why)
            drains.create_task(supervisor.drain(deadline_s))


async def _watch_clock(
    config: ServiceConfig, requests: LeaveRequests, remaining_s: float | None
) -> None:
    """Ask when the walltime says so, then for ever nothing."""
    if remaining_s is not None:
        drain_s = min(config.drain_s, remaining_s / 4)
        await asyncio.sleep(max(0.0, remaining_s - drain_s - min(FINISH_S, remaining_s / 4)))
        requests.ask("walltime", drain_s)
    await asyncio.Event().wait()


async def outlast_slurm(requests: LeaveRequests) -> None:
    """Wait for Slurm to end the job, if that is what it is about to do."""
    if "SIGTERM" in requests.reasons and "SLURM_JOB_ID" in os.environ:
        log.info("the node has left and waits for Slurm to end its job")
        await asyncio.Event().wait()


def seconds(text: str) -> float | None:
    """Reads a duration as Slurm writes it, or plain seconds; None without a limit.

    >>> seconds("1-02:00:00"), seconds("10:00"), seconds("90"), seconds("UNLIMITED")
    (93600.0, 600.0, 90.0, None)
    """
    if text.upper() in ("", "UNLIMITED", "NOT_SET", "INVALID"):
        return None
    days, dash, clock = text.rpartition("-")
    try:
        parts = [float(part) for part in clock.split(":")]
        if len(parts) > 3 or min(parts) < 0:
            raise ValueError(text)
        whole = sum(part * 60.0**place for place, part in enumerate(reversed(parts)))
        return whole + (86400.0 * int(days) if dash else 0.0)
    except ValueError:
        raise ConfigError(f"time left {text!r}", "seconds, MM:SS, HH:MM:SS or D-HH:MM:SS") from None
