"""The sampler: how many groups may be started, and when a run has enough. Pure.

A run has a pool of groups that are started in order. Only kept groups count, and what is open
becomes kept with the rate at which the filter has kept others (`Rate`): as many are started as
yield what is missing by that forecast. Towards a target the forecast's lower end must reach it, so
that it is not missed by a few at the end, as it must a step's where nothing may be older than the
step's weights; a stock that waits for the trainer is filled up to the forecast's upper end. Both
ends are one standard deviation away. A group that is dropped, failed or hopeless is replenished as
soon as it is decided, because the forecast has changed; where a kept group can still go stale, the
rest of the pool stays until the target was handed out.

What a trainer takes while a group is sampled is the stock that keeps it fed: with the groups of its
step, and the times that both take, no more waits than that (`Demand.lead`), else `max_uncommitted`.
Backpressure acts here and nowhere else: a started group ends unless it is redundant.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

PRIOR = 8.0
"""Groups kept and groups dropped that every run is taken to begin with: about half teach nothing,
by all who have measured it.
"""

LATE = 1.0
"""A group is late after this multiple of the mean time: what is open longest is more often what
nobody solves, and the slots that its last member leaves free begin another.
"""

MEMORY = 256.0
"""Decisions that the rate is a mean of, about: it changes while the policy learns."""


class Rate(NamedTuple):
    """Holds what the filter made of the last groups; older ones fade."""

    kept: float = 0.0
    decided: float = 0.0

    def after(self, kept: bool) -> Rate:
        """The rate with one more decision.

        >>> Rate().after(True).after(False)
        Rate(kept=0.99609375, decided=1.99609375)
        """
        fade = 1 - 1 / MEMORY
        return Rate(self.kept * fade + kept, self.decided * fade + 1)

    @property
    def mean(self) -> float:
        return (self.kept + PRIOR) / (self.decided + 2 * PRIOR)

    def groups_for(self, kept: int, side: int) -> float:
        """Returns how many groups have `kept` at the forecast's lower (1) or upper (-1) end.

        `k` open groups give a beta-binomial number of kept ones: mean `k p`, variance
        `k p q (seen + k) / (seen + 1)`; this is `k p - side * sd = kept`, solved for `k`.

        >>> half = Rate(500.0, 1000.0)
        >>> [round(half.groups_for(16, side), 1) for side in (-1, 1)]
        [26.8, 38.3]
        """
        p, seen = self.mean, self.decided + 2 * PRIOR
        linear = p * (1 - p) * seen / (seen + 1)
        square = p * (1 - p) / (seen + 1)
        a, half_b = p * p - square, kept * p + linear / 2  # a > 0: `PRIOR` keeps `p * seen` over 1
        return (half_b + side * math.sqrt(half_b * half_b - a * kept * kept)) / a


UNKNOWN = Rate()


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The counts of a run that decide whether another of its groups may be started."""

    open_groups: int
    uncommitted: int
    """Kept groups that the primary consumer's cursor does not cover yet."""
    untrained: int = 0
    """Kept groups that the newest weights were not trained on: at most `uncommitted`, and fewer
    where the trainer publishes more often than it writes a checkpoint.
    """
    kept: int
    max_open: int
    max_uncommitted: int
    target: int = 0
    """0 = all that was submitted."""
    filtered: bool = False
    """True if the run's filter may drop a group."""
    streaming: bool = False
    delivered: int = 0
    perishable: bool = False
    """True if a kept group may still go stale before it is handed out."""
    paused: bool = False
    rate: Rate = UNKNOWN
    step: int = 0
    """Groups that the trainer takes at a time; 0 = not known."""
    max_staleness: int = -1
    group_s: float = 0.0
    """The seconds that a group takes; 0 = not known."""
    late: int = 0
    """The number of open groups that take longer than most: nobody counts on them."""
    handout_interval_s: float = 0.0
    """Seconds between two groups that the trainer takes; 0 = not known."""

    @property
    def lead(self) -> int:
        """Kept groups that may wait for the trainer: its next step, and what it takes meanwhile.

        >>> known = Demand(open_groups=0, uncommitted=0, kept=0, max_open=8, max_uncommitted=64,
        ...                step=8, group_s=60.0, handout_interval_s=5.0)
        >>> known.lead
        24
        """
        if not self.step or not self.handout_interval_s or not self.group_s:
            return self.max_uncommitted
        steps = 1 + math.ceil(self.group_s / (self.step * self.handout_interval_s))
        return min(self.max_uncommitted, self.step * steps)

    @property
    def strict(self) -> bool:
        """Tells whether nothing may be older than its step's weights: a step's rest is lost."""
        return self.streaming and self.step > 0 and self.max_staleness == 0

    @property
    def stock(self) -> int:
        """Tells how many more kept groups the trainer has a use for."""
        waiting = self.kept - self.delivered
        missing = min(self.max_uncommitted - self.uncommitted, self.lead - waiting)
        if self.step and self.max_staleness >= 0:
            # Groups of a later step would have gone stale when their turn comes.
            missing = min(missing, self.step * (1 + self.max_staleness) - self.untrained)
        return max(0, missing)


def full(demand: Demand) -> bool:
    """Returns whether one more kept group would be more than the run wants now."""
    return bool(demand.target) and demand.kept >= demand.target


def reached(demand: Demand) -> bool:
    """Returns whether the run has all the groups it wants, for good: the rest is redundant.

    >>> from dataclasses import replace
    >>> few = Demand(open_groups=0, uncommitted=0, kept=4, max_open=8, max_uncommitted=8, target=4)
    >>> reached(few), reached(replace(few, perishable=True, delivered=3))
    (True, False)
    """
    have = demand.delivered if demand.perishable else demand.kept
    return bool(demand.target) and have >= demand.target


def step_reached(demand: Demand) -> bool:
    """Returns whether the step has its groups and no later one could use what is open: it is
    redundant.
    """
    return demand.strict and demand.untrained >= demand.step


def may_open(demand: Demand) -> int:
    """Returns how many more groups may be started now.

    >>> from dataclasses import replace
    >>> some = Demand(open_groups=3, uncommitted=4, kept=0, max_open=8, max_uncommitted=8)
    >>> may_open(replace(some, streaming=True))
    1
    >>> may_open(replace(some, kept=5, target=10))
    2
    """
    if demand.paused:
        return 0
    limit = demand.max_open
    if demand.streaming:
        limit = min(limit, _open_for(demand, demand.stock, side=1 if demand.strict else -1))
    if demand.target:
        limit = min(limit, _open_for(demand, demand.target - demand.kept, side=1))
    late = demand.late if demand.filtered else 0
    return max(0, min(limit + late, demand.max_open) - demand.open_groups)


def _open_for(demand: Demand, missing: int, side: int) -> int:
    if missing <= 0 or not demand.filtered:
        return max(0, missing)  # every started group will be kept: one more is one too many
    groups = demand.rate.groups_for(missing, side)
    return max(missing, math.floor(groups) if side < 0 else math.ceil(groups))
