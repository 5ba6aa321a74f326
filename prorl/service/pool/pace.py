"""How fast servers are, and what the balancer makes of it.

Seconds that a token of theirs takes, as RUN's calls have it.

A rollout on a server that takes twice as long for a token weighs as four on one that does not
(`POWER`): so many fewer are there. Servers within `ALIKE` of the fastest count as equal, so that
chance moves nothing. What was measured fades with `FADE_S`: one that is given nothing is tried
again. Pure but for the clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from prorl.control import Served
from prorl.limits import Clock

POWER = 2.0
ALIKE = 1.25
"""Ratios up to here are chance."""
MOST = 8.0
"""No server counts as slower than this."""
FADE_S = 30.0
TOKENS = 2000
"""So many tokens later a measurement counts a third."""
MIN_TOKENS = 500
"""Fewer say nothing."""


class _Pace(NamedTuple):
    seconds: float
    tokens: float
    at: float


class Paces:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paces: dict[str, _Pace] = {}

    def add(self, name: str, calls: Served) -> None:
        if calls.sampled:
            before = self._paces.get(name, _Pace(0.0, 0.0, 0.0))
            kept = math.exp(-calls.sampled / TOKENS)
            self._paces[name] = _Pace(
                kept * before.seconds + calls.llm_s,
                kept * before.tokens + calls.sampled,
                self._clock(),
            )

    def forget(self, name: str) -> None:
        """It is watched no longer, or was started anew; idempotent."""
        self._paces.pop(name, None)

    def weights(self) -> Mapping[str, float]:
        """What a rollout weighs on each server that is known: 1 on the fastest."""
        paces = {
            name: one.seconds / one.tokens
            for name, one in self._paces.items()
            if one.tokens >= MIN_TOKENS and one.seconds > 0
        }
        fastest = min(paces.values(), default=1.0)
        now = self._clock()
        return {
            name: self._weight(pace / fastest, now - self._paces[name].at)
            for name, pace in paces.items()
        }

    @staticmethod
    def _weight(ratio: float, age_s: float) -> float:
        if ratio < ALIKE:
            return 1.0
        return float((1.0 + (min(ratio, MOST) - 1.0) * math.exp(-age_s / FADE_S)) ** POWER)
