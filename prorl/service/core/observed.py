"""What the gateway saw happen since it started, for `/metrics`.

How long rollouts were where, and what failed. Counters only; nothing decides by them, and a restart
begins at zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from enum import StrEnum

from prorl.types import FailureCode

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Upper ends of the histograms' buckets, in seconds; one more takes the rest."""


class Phase(StrEnum):
    """Where a rollout spends its time, from acceptance to its commit."""

    QUEUE = "queue"
    """It waits for a lease."""
    INIT = "init"
    RUN = "run"
    EVAL = "eval"
    STORE = "store"
    """Its row waits for its part to be durable."""


class Histogram:
    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS) + 1)
        self.total_s = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BUCKETS, seconds)] += 1
        self.total_s += seconds


class Observed:
    def __init__(self) -> None:
        self.phases = {phase: Histogram() for phase in Phase}
        self.failures: Counter[FailureCode] = Counter()
        """Of attempts, also of those that were tried again."""

    def left(self, phase: Phase, seconds: float) -> None:
        """A rollout left a phase, for the next one or for good."""
        self.phases[phase].add(seconds)
