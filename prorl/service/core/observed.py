"""Figures that the gateway has observed since it started, for `/metrics` and `prorl status`. How
long rollouts were where, what failed, and what became of the time of a run's steps. Nothing decides
by them, and a restart begins at zero.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from prorl.control import CallTotals
from prorl.types import FailureCode

BUCKETS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)
"""Upper ends of the histograms' buckets, in seconds; one more takes the rest."""

LAST = 10
"""Steps of a trainer that its idle share is of: few enough to follow a change within minutes."""


class Phase(StrEnum):
    """Says where a rollout spends its time, from acceptance to its commit."""

    QUEUE = "queue"
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


class StepSeconds(NamedTuple):
    """Holds the seconds of a trainer's steps, from one commit to the next."""

    steps: int = 0
    step_s: float = 0.0
    waited_s: float = 0.0
    """The part of `step_s` until the last group of the step was handed out."""
    slots_s: float = 0.0
    """Seconds of RUN's slots, all together; other runs' rollouts are in them, too."""
    busy_s: float = 0.0
    worked_s: float = 0.0
    """Seconds of the run's rollouts in RUN and EVAL."""
    wasted_s: float = 0.0
    """The part of `worked_s` that went into attempts that were ended or failed, and into groups
    that went stale or came when the run had enough. What the filter drops is not waste: nobody can
    know it before.
    """

    def plus(self, other: StepSeconds) -> StepSeconds:
        steps, *seconds = (mine + theirs for mine, theirs in zip(self, other, strict=True))
        return StepSeconds(int(steps), *seconds)


@dataclass(slots=True)
class StepUtilization:
    total: StepSeconds = field(default_factory=StepSeconds)
    last: deque[StepSeconds] = field(default_factory=lambda: deque(maxlen=LAST))
    handed: deque[float] = field(default_factory=deque)
    """The times when the groups that no commit covers were handed out."""
    worked_s: float = 0.0
    wasted_s: float = 0.0
    num_worked: int = 0
    """Rollouts that ended with a verdict."""
    calls: CallTotals = field(default_factory=CallTotals)
    """The totals of its model calls, of all workers."""
    _before: tuple[float, float, float, float] | None = None
    """At the last commit: its time, seconds that slots were busy, worked, wasted."""

    def ended(self, seconds: float, good: bool) -> None:
        """A rollout left a stage, with what it is wanted for or without."""
        self.worked_s += seconds
        self.wasted_s += 0.0 if good else seconds
        self.num_worked += good

    def called(self, calls: CallTotals) -> None:
        self.calls = self.calls.plus(calls)

    def hand_out(self, groups: int, now: float) -> None:
        """Notes that so many groups were handed out."""
        self.handed.extend([now] * groups)

    def waste(self, rollouts: int) -> None:
        """A whole group was for nothing; its rollouts took what others do."""
        self.wasted_s += rollouts * self.worked_s / max(1, self.num_worked)

    def committed(self, groups: int, now: float, busy_s: float, slots: int) -> None:
        has_all = len(self.handed) >= groups
        handed = [self.handed.popleft() for _ in range(groups)] if has_all else [now]
        if has_all and self._before is not None:
            at, busy, worked, wasted = self._before
            step = StepSeconds(
                1,
                now - at,
                max(0.0, handed[-1] - at),
                slots * (now - at),
                min(slots * (now - at), max(0.0, busy_s - busy)),
                self.worked_s - worked,
                self.wasted_s - wasted,
            )
            self.total = self.total.plus(step)
            self.last.append(step)
        self._before = now, busy_s, self.worked_s, self.wasted_s

    @property
    def recent(self) -> StepSeconds:
        spent = StepSeconds()
        for step in self.last:
            spent = spent.plus(step)
        return spent


class Observed:
    def __init__(self) -> None:
        self.phases = {phase: Histogram() for phase in Phase}
        self.failures: Counter[FailureCode] = Counter()
        """The failures of attempts, also of those that were tried again."""

    def add_phase(self, phase: Phase, seconds: float) -> None:
        self.phases[phase].add(seconds)
