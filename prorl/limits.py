"""Limits that several rooms share, and time as a value.

A `Deadline` is passed in, never read from a global. The wire carries seconds that remain.

Clocks are injected (`Clock` = a function that gives monotonic seconds), so that tests move time by
hand.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from prorl.errors import BudgetError
from prorl.timing import now
from prorl.types import FailureCode

MAX_ARTIFACT_BYTES = 512 << 10
"""The limit of what EVAL grades: it fits into a record batch of 2 MiB beside its rollout. An env
that packs what a sandbox changed has `RolloutLimits.artifact_mb` instead
(`protocols.ScoresInPlace`).
"""

Clock = Callable[[], float]
"""Monotonic seconds."""


def steady(wall: Clock, clock: Clock) -> Clock:
    """Returns the seconds since the epoch that never jump: somebody who sets the clock changes no
    duration.

    >>> wall, clock = [100.0], [0.0]
    >>> now = steady(lambda: wall[0], lambda: clock[0])
    >>> wall[0] = 7300.0; clock[0] = 5.0; now()
    105.0
    """
    began = wall() - clock()
    return lambda: began + clock()


@dataclass(slots=True)
class Deadline:
    """A budget that runs down on the receiver's own clock and can be paused.

    It is, for instance, while a backend takes new weights.

    >>> now = [0.0]
    >>> deadline = Deadline(10.0, clock=lambda: now[0])
    >>> now[0] = 4.0
    >>> deadline.remaining_s
    6.0
    >>> deadline.pause(); now[0] = 100.0; deadline.resume(); deadline.remaining_s
    6.0
    """

    budget_s: float
    clock: Clock = field(default=now, repr=False)
    _end: float = field(init=False, repr=False)
    _paused_at: float | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._end = self.clock() + self.budget_s

    @property
    def remaining_s(self) -> float:
        now = self.clock() if self._paused_at is None else self._paused_at
        return max(0.0, self._end - now)

    @property
    def expired(self) -> bool:
        return self.remaining_s <= 0.0

    def pause(self) -> None:
        if self._paused_at is None:
            self._paused_at = self.clock()

    def resume(self) -> None:
        if self._paused_at is not None:
            self._end += self.clock() - self._paused_at
            self._paused_at = None

    def give_back(self, seconds: float) -> None:
        """This much of what was spent was not the budget's to pay."""
        self._end += seconds

    def check(self, code: FailureCode, label: str) -> None:
        if self.expired:
            raise BudgetError(code, f"{label}: {self.budget_s:g} s are used up")
