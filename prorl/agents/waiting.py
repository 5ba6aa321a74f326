"""Waiting under a `Deadline` that others may pause.

`asyncio.timeout` cannot do it, since it fixes the end when it starts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TypeVar

from prorl.limits import Clock, Deadline
from prorl.types import Completion, FailureCode, Json

ResultT = TypeVar("ResultT")

SILENT_S = 5.0
"""A model call without a token for this long waits for its server, not for the policy."""

_MIN_WAIT_S = 0.01
"""A paused deadline with nothing left would otherwise be looked at without rest."""
_CANCEL_S = 5.0


class Ear:
    """What a model call has given so far, and when."""

    def __init__(self, clock: Clock) -> None:
        self._clock, self.at = clock, clock()
        self.part: Completion | None = None

    def __call__(self, part: Completion) -> None:
        self.at, self.part = self._clock(), part


async def within(deadline: Deadline, call: Coroutine[Json, Json, ResultT], what: str) -> ResultT:
    """The result of `call`, unless the deadline ends first: then `call` is cancelled.

    Raises BudgetError(DEADLINE).
    """
    task = asyncio.ensure_future(call)
    try:
        while not task.done():
            deadline.check(FailureCode.DEADLINE, what)
            await asyncio.wait({task}, timeout=max(deadline.remaining_s, _MIN_WAIT_S))
        return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task}, timeout=_CANCEL_S)
