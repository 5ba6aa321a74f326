"""Decides when to flush, and when to dial again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

ROWS_S = 0.005
"""For work rows, whose latency people measure."""

BACK_S = 0.02
"""For credit, acks and events, which nobody waits for while there is credit."""

FIRST_BACKOFF_S = 0.02
LAST_BACKOFF_S = 1.0
LAST_UNIX_BACKOFF_S = 0.2
"""The longest wait on one host: all children of a service that starts dial the gateway; a socket of
this host refuses at once.
"""


class Paced:
    """Calls `flush` soon after `ask`, once for all that asked meanwhile, at most once an interval.

    A message costs two thread wake-ups and a system call at each end, whatever it holds. At low
    rates each row therefore goes at once, at high rates all of an interval go together.
    """

    def __init__(self, flush: Callable[[], None], interval_s: float) -> None:
        self._flush, self._interval_s = flush, interval_s
        self._scheduled: asyncio.Handle | None = None
        self._last = float("-inf")

    def ask(self) -> None:
        if self._scheduled is not None:
            return
        loop = asyncio.get_running_loop()
        wait_s = self._last + self._interval_s - loop.time()
        self._scheduled = (
            loop.call_later(wait_s, self.now) if wait_s > 0 else loop.call_soon(self.now)
        )

    def now(self) -> None:
        """Flush at once, e.g. before closing."""
        if self._scheduled is not None:
            self._scheduled.cancel()
            self._scheduled = None
        self._last = asyncio.get_running_loop().time()
        self._flush()


def backoff_s(location: str, tries: int) -> float:
    """Returns the wait before a location is dialled again that has refused this often."""
    last_s = LAST_UNIX_BACKOFF_S if location.startswith("grpc+unix://") else LAST_BACKOFF_S
    return min(last_s, FIRST_BACKOFF_S * 2.0 ** min(tries, 16)) * random.uniform(0.5, 1.0)
