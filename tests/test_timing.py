"""One clock: time in which we were stopped is nobody's."""

from __future__ import annotations

import asyncio
import time

import pytest

from prorl.limits import Deadline
from prorl.timing import LATE_S, TICK_S, ActiveLoop, now, run

STOPPED_S = LATE_S + 0.5


async def _stopped() -> tuple[float, bool]:
    """Returns the cost of a stop on the clock, and whether a budget shorter than it is used up."""
    began, deadline = now(), Deadline(STOPPED_S / 2)
    async with asyncio.timeout(STOPPED_S / 2):
        await asyncio.sleep(0)
        time.sleep(STOPPED_S)  # as SIGSTOP does: nothing of this process runs
        await asyncio.sleep(0.05)
    return now() - began, deadline.expired


def test_a_loop_that_was_stopped_gives_the_time_back_to_every_deadline() -> None:
    passed_s, expired = run(_stopped())
    assert passed_s < TICK_S + 0.5
    assert not expired


def test_without_it_a_stop_is_spent() -> None:
    with pytest.raises(TimeoutError):
        asyncio.run(_stopped())


def test_an_idle_loop_is_not_stopped() -> None:
    """Else its timers would never come."""

    run(asyncio.sleep(LATE_S + 1))


def test_where_no_loop_runs_it_is_the_machines_clock() -> None:
    before = time.monotonic()
    assert before <= now() <= time.monotonic()
    with asyncio.Runner(loop_factory=ActiveLoop) as runner:
        assert isinstance(runner.get_loop(), ActiveLoop)
