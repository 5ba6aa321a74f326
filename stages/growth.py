"""`Growth`: rows that end in the same turn of the loop get their columns in one call.

The columns are those that their stage adds; the call is into Arrow.

When a stage gets a hundred rows in one message, most of them end together; converting them one by
one would cost more than the work of a quick stage. A row whose values cannot be converted fails
alone. Bounded by the stage's slots.
"""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from prorl.errors import RolloutError, boundary
from prorl.schema.rows import Added, Row, grow
from prorl.types import FailureCode


class _Waiting(NamedTuple):
    before: Row
    added: Added
    grown: asyncio.Future[Row]


class Growth:
    """Grows one stage's rows by that stage's columns. Belongs to the event loop."""

    def __init__(self) -> None:
        self._waiting: list[_Waiting] = []

    async def __call__(self, before: Row, added: Added) -> Row:
        """The row of the next edge.

        Raises RolloutError (`stage_error`) for values that do not fit their columns.
        """
        loop = asyncio.get_running_loop()
        if not self._waiting:
            loop.call_soon(self._convert)
        waiting = _Waiting(before, added, loop.create_future())
        self._waiting.append(waiting)
        return await waiting.grown

    def _convert(self) -> None:
        waiting, self._waiting = self._waiting, []
        if not _try(waiting):
            for one in waiting:
                _try([one])


def _try(waiting: list[_Waiting]) -> bool:
    """Convert these together; False when several were tried and one of them cannot be converted."""
    try:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, "what a stage adds"):
            batch = grow([one.before for one in waiting], [one.added for one in waiting])
    except RolloutError as error:
        if len(waiting) == 1:
            _settle(waiting[0].grown, error)
        return len(waiting) == 1
    for i, one in enumerate(waiting):
        _settle(one.grown, Row(batch, i))
    return True


def _settle(grown: asyncio.Future[Row], result: Row | RolloutError) -> None:
    """Give the result, unless nobody waits any more."""
    if grown.done():
        return
    if isinstance(result, RolloutError):
        grown.set_exception(result)
    else:
        grown.set_result(result)
