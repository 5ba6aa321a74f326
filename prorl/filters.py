"""A complete group as its filter sees it, and the named filters: one row each.

Any other filter is SQL (`prorl/storage/serve/filter.py` says what it sees and gives).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from prorl.states import FailureClass, RolloutState


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which complete groups are worth training on."""

    sql: str
    min_valid: int = 2
    """A group with fewer valid members is dropped as `incomplete` without asking the SQL."""
    drops: bool = True
    """Whether it may drop a group that has enough valid members."""


FILTERS: Mapping[str, Filter] = {
    "none": Filter(
        sql="""
select group_id, true as kept, 'unfiltered' as reason
from rollouts
group by group_id
""",
        min_valid=1,  # without one there is nothing to serve
        drops=False,
    ),
    # DAPO's dynamic sampling (arXiv 2503.14476): a group whose rewards are all equal has no
    # advantage and teaches nothing.
    "dapo": Filter(
        sql="""
select group_id,
       min(reward) <> max(reward) as kept,
       if(kept, 'informative', 'all_equal') as reason
from rollouts
group by group_id
"""
    ),
}


def find_filter(text: str) -> Filter:
    """The filter of this name, or else the one whose SQL this is.

    >>> find_filter("none").drops, find_filter("select ...").drops
    (False, True)
    """
    return FILTERS.get(text) or Filter(sql=text)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    """State of one member, as the store needs it to decide a complete group."""

    rollout_id: int
    sample_index: int
    attempt: int
    state: RolloutState
    failure_class: FailureClass
    reward: float | None
    """None unless COMPLETED."""
    num_trained: int = 0
    """Sampled tokens that may train: without one there is nothing to learn from it."""


class GroupDecision(NamedTuple):
    """The filter's verdict on a complete group."""

    group_id: int
    kept: bool
    reason: str
    """`informative`, `all_equal`, `incomplete`, `unfiltered`, or the user's own."""
