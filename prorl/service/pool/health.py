"""Decides whether a model server is well: evidence -> verdict. Pure: no I/O, no clock.

    evidence                                  verdict
    refused, reset, unwell (its own 5xx)      out at once, even when nothing is left
    silent twice                              out, unless half of the pool is;
                                              `DEAD_MISSES` times: out
    errors, malformed replies, no tokens      out when their share of the last calls is too high
    behind                                    none: weights are `publish.py`'s business

The way back is always the same: `back_at` is over and the server has answered a real model call.
Each time that it comes back and goes again soon, the next try is later (`BACKOFF_S` doubled).

Invariants: one bad reply of many takes nothing out; a verdict depends on the evidence and the
seconds given alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from prorl.states import BackendFault

SLOW_MISSES = 2
"""Unanswered probes in a row until a server is out, as long as half of the pool is in."""
DEAD_MISSES = 5
"""Unanswered probes in a row until it is out whatever is left."""
MIN_FAULTS = 3
"""Fewer bad replies among the last calls are chance."""
ERROR_SHARE = 0.5
LIE_SHARE = 0.15
"""A server that lies, or never answers some calls, is worse than one that is gone."""
FIRST_BACKOFF_S = 0.25
LAST_BACKOFF_S = 30.0
ABSENT_S = 1.0
"""Asking one that is merely away costs nothing: at most this long between two tries."""
STEADY_S = 60.0
"""A server that was well for this long starts afresh."""


class HealthVerdict(StrEnum):
    NONE = ""
    SLOW = "slow"
    """Out, unless half of the pool is out."""
    DEAD = "dead"


@dataclass(slots=True)
class ServerHealth:
    """One server's; times are seconds on the caller's clock."""

    misses: int = 0
    trips: int = 0
    """The number of times that it went out lately."""
    tries: int = 0
    """The number of times that it was asked since it went out, in vain."""
    out_since: float = -1.0
    """-1 while it is in."""
    well_since: float = -1e9
    back_at: float = 0.0
    """Not asked whether it is well before."""
    reason: str = ""
    refused_replies: int = 0
    busy_replies: int = 0
    """Model calls that it put off (HTTP 408, 429, 503)."""
    busy_at: float = -1e9
    busy_reason: str = ""

    @property
    def is_out(self) -> bool:
        return self.out_since >= 0.0

    def probe(self, trouble: BackendFault | None) -> HealthVerdict:
        """A health probe was answered (None), or what became of it."""
        if trouble is None:
            self.misses = 0
            return HealthVerdict.NONE
        self.misses += 1
        if trouble is not BackendFault.SILENT or self.misses >= DEAD_MISSES:
            return HealthVerdict.DEAD
        return HealthVerdict.SLOW if self.misses >= SLOW_MISSES else HealthVerdict.NONE

    @staticmethod
    def call(trouble: BackendFault, faults: int, calls: int) -> HealthVerdict:
        """A model call went wrong; of the last `calls` of that worker `faults` went wrong alike."""
        match trouble:
            case BackendFault.REFUSED:
                return HealthVerdict.DEAD
            case BackendFault.ERROR | BackendFault.MALFORMED | BackendFault.SILENT:
                share = ERROR_SHARE if trouble is BackendFault.ERROR else LIE_SHARE
                tripped = faults >= MIN_FAULTS and faults >= share * calls
                return HealthVerdict.DEAD if tripped else HealthVerdict.NONE
            case _:
                return HealthVerdict.NONE

    def out(self, now: float, reason: str) -> None:
        """It is given nothing from here on; the next try is later each time."""
        if self.is_out:
            return
        self.trips = 0 if now - self.well_since > STEADY_S else self.trips + 1
        self.tries, self.out_since, self.reason = 0, now, reason
        self.back_at = now + self._backoff_s

    def failed_again(self, now: float, trouble: BackendFault, jitter: float) -> None:
        """Asked, it is not well; `jitter` from 0 to 1 spreads the next try."""
        self.tries += 1
        longest_s = (
            ABSENT_S if trouble in (BackendFault.REFUSED, BackendFault.SILENT) else LAST_BACKOFF_S
        )
        self.back_at = now + min(longest_s, self._backoff_s) * (0.5 + jitter / 2)

    def back(self, now: float) -> None:
        self.out_since, self.well_since, self.misses, self.reason = -1.0, now, 0, ""

    @property
    def _backoff_s(self) -> float:
        return float(min(LAST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self.trips + self.tries, 16)))
