"""`Paced`: runs a flush at once when it has rested, else at the end of its interval.

Quick when idle, joined when busy.

A message costs two thread wake-ups and a system call at each end, whatever it holds. At low rates
each row therefore goes at once, at high rates all of an interval go together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

ROWS_S = 0.005
"""For work rows, whose latency people measure."""

BACK_S = 0.02
"""For credit, acks and events, which nobody waits for while there is credit."""


class Paced:
    """Calls `flush` soon after `ask`, once for all that asked meanwhile.

    At most once per `interval_s`.
    """

    def __init__(self, flush: Callable[[], None], interval_s: float) -> None:
        self._flush, self._interval_s = flush, interval_s
        self._asked: asyncio.Handle | None = None
        self._last = float("-inf")

    def ask(self) -> None:
        """Flush within the pace, together with what else is asked for until then."""
        if self._asked is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._last + self._interval_s - loop.time()
        self._asked = loop.call_later(wait_s, self.now) if wait_s > 0 else loop.call_soon(self.now)

    def now(self) -> None:
        """Flush at once, e.g. before closing."""
        if self._asked is not None:
            self._asked.cancel()
            self._asked = None
        self._last = asyncio.get_running_loop().time()
        self._flush()
