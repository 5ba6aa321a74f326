"""The sampler: how many groups may be started, and when a run has enough.

Pure: numbers in, numbers out.

Submitted groups are a pool that is started in order. A dropped or stale group is replenished by the
next of the pool, because only kept groups count towards the target; where a kept group can still go
stale, the rest of the pool stays until the target was handed out. Backpressure acts here and
nowhere else: a started group always finishes.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The counts of a run that decide whether another of its groups may be started."""

    open_groups: int
    """Started and not decided."""
    unacked: int
    """Kept groups that the primary consumer's cursor does not cover yet."""
    kept: int
    """Kept and not gone stale."""
    max_open: int
    max_unacked: int
    target: int = 0
    """0 = all that was submitted."""
    filtered: bool = False
    """Whether the run's filter may drop a group."""
    streaming: bool = False
    """Whether unacknowledged groups hold the run back."""
    delivered: int = 0
    """Handed out."""
    perishable: bool = False
    """Whether a kept group may still go stale before it is handed out."""


def full(demand: Demand) -> bool:
    """Whether one more kept group would be more than the run wants now."""
    return bool(demand.target) and demand.kept >= demand.target


def reached(demand: Demand) -> bool:
    """Whether the run has all the groups it wants, for good: the rest is redundant.

    >>> from dataclasses import replace
    >>> few = Demand(open_groups=0, unacked=0, kept=4, max_open=8, max_unacked=8, target=4)
    >>> reached(few), reached(replace(few, perishable=True, delivered=3))
    (True, False)
    """
    have = demand.delivered if demand.perishable else demand.kept
    return bool(demand.target) and have >= demand.target


def may_open(demand: Demand) -> int:
    """How many more groups may be started now.

    >>> few = Demand(open_groups=3, unacked=4, kept=0, max_open=8, max_unacked=8, streaming=True)
    >>> may_open(few)
    1
    >>> may_open(Demand(open_groups=3, unacked=4, kept=5, max_open=8, max_unacked=8, target=10))
    2
    """
    room = demand.max_open - demand.open_groups
    if demand.streaming:
        room = min(room, demand.max_unacked - demand.open_groups - demand.unacked)
    if demand.target:
        # Without a filter every started group will be kept, so more than the target would be thrown
        # away for sure.
        missing = demand.target - demand.kept
        room = min(
            room, 0 if missing <= 0 else room if demand.filtered else missing - demand.open_groups
        )
    return max(0, room)
