"""How much of what rollouts say again the servers have in their prefix caches.

By server and by run, and an alarm when that collapses.

A prompt of a rollout repeats all that it was sent and given before: with rollouts that stay where
they are a prefix cache has nearly all of it. The share falls when caching is switched off, when
caches are too small for the rollouts at a time, or when rollouts move. Pure but for the clock and
the log line.

Invariants: sums only grow, whatever workers come and go; an alarm needs `MIN_TOKENS` of evidence
before and in the last `WINDOW_S`, and ends by itself. Bounded: `SLICES` slices of a window for
each share.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping

from prorl.control import Served
from prorl.types import Json

WINDOW_S, SLICES = 60.0, 12
MIN_TOKENS = 4096
"""Of prompts that repeat; fewer are chance."""
USUAL, COLLAPSED, MENDED = 0.3, 0.5, 0.75
"""Least share that can collapse; parts of it at which the alarm begins and ends."""

log = logging.getLogger("prorl.service")


class Share:
    """Of one server or run."""

    def __init__(self) -> None:
        self.total = Served()
        self._slices: deque[tuple[float, Served]] = deque()
        """The last `WINDOW_S`: when each slice began, and what it brought."""
        self.alarm = ""

    def add(self, calls: Served, now: float) -> None:
        """So much more; says whether it collapses."""
        self.total = self.total.plus(calls)
        if self._slices and now - self._slices[-1][0] < WINDOW_S / SLICES:
            began, before = self._slices.pop()
            self._slices.append((began, before.plus(calls)))
        else:
            self._slices.append((now, calls))
        while now - self._slices[0][0] > WINDOW_S:
            self._slices.popleft()
        self._judge()

    @property
    def cached(self) -> float | None:
        """Of all prompt tokens, those that were cached; None before the first."""
        return self.total.cached / self.total.prompt if self.total.prompt else None

    @property
    def reused(self) -> float | None:
        """Of those that the rollout had said before."""
        return _reused(self.total)

    def view(self) -> dict[str, Json]:
        """As `status` shows it."""
        return {"cached_share": self.cached, "reused_share": self.reused, "alarm": self.alarm}

    def _judge(self) -> None:
        recent = Served()
        for _, calls in self._slices:
            recent = recent.plus(calls)
        usual, share = _reused(self.total.since(recent)), _reused(recent)
        known = min(recent.repeated, self.total.repeated - recent.repeated) >= MIN_TOKENS
        if not known or usual is None or share is None:
            return
        if share >= MENDED * usual:
            self.alarm = ""
        elif self.alarm or (usual >= USUAL and share < COLLAPSED * usual):
            self.alarm = (
                f"prefix reuse is {share:.0%}, it was {usual:.0%}: is prefix caching on, is the"
                f" cache large enough, do rollouts move?"
            )


def note(share: Share, name: str, calls: Served, now: float) -> None:
    """`name` has made so many calls more; an alarm is logged when it begins."""
    alarmed = bool(share.alarm)
    share.add(calls, now)
    if share.alarm and not alarmed:
        log.warning("%s: %s", name, share.alarm)
    elif alarmed and not share.alarm:
        log.info("%s: prefix reuse is as it was", name)


def grown(before: Mapping[str, Served], now: Mapping[str, Served]) -> dict[str, Served]:
    """What came between two sayings of a worker, by name."""
    return {
        name: calls.since(before.get(name, Served()))
        for name, calls in now.items()
        if calls != before.get(name)
    }


def _reused(calls: Served) -> float | None:
    return calls.reused / calls.repeated if calls.repeated else None
