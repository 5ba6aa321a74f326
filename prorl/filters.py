"""A complete group as its filter sees it, and the named filters: one row each.

`pass_rate:LO-HI` is one too, with its own bounds. Any other filter is SQL
(`prorl/storage/serve/filter.py` says what it sees and gives).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from prorl.states import FailureClass, RolloutState


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    sql: str
    min_valid: int = 2
    """A group with fewer valid members is dropped as `incomplete` without asking the SQL."""
    drops: bool = True
    """True if it may drop a group that has enough valid members."""
    rates: tuple[float, float] = (0.0, 1.0)
    """It keeps no group whose mean reward, cut to 0 ... 1, is outside of them."""

    def cannot_be_kept(self, rewards: Sequence[float], living: int) -> bool:
        """Returns whether a group is dropped whatever `living` members do; `rewards`: of valid ones
        so far.

        >>> find_filter("dapo").cannot_be_kept([1.0], 1), find_filter("dapo").cannot_be_kept([], 1)
        (False, True)
        >>> find_filter("pass_rate:0.2-0.8").cannot_be_kept([1.0] * 7, 1)
        True
        """
        most = len(rewards) + living
        if most < self.min_valid:
            return True
        sure = sum(min(1.0, max(0.0, reward)) for reward in rewards)
        return (sure + living) / most < self.rates[0] or sure / most > self.rates[1]


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
    # The same, and a task that taught nothing twice in a row, or more often, sits out an epoch, two
    # ... eight: what was easy or hopeless last time most often still is (GRESO, arXiv 2506.02177).
    "greso": Filter(
        sql="""
select r.group_id,
       min(reward) <> max(reward) as kept,
       if(kept, 'informative', 'all_equal') as reason,
       if(kept, 0, least(8, any_value(coalesce(h.streak, 0)))) as rest
from rollouts r left join history h using (task_id)
group by r.group_id
"""
    ),
    # The same among those that ended by themselves: a difference that is only made by answers that
    # were cut off teaches to be short.
    "overlong": Filter(
        sql="""
select group_id,
       coalesce(min(ended) <> max(ended), false) as kept,
       case when kept then 'informative'
            when min(reward) <> max(reward) then 'overlong'
            else 'all_equal' end as reason
from (select *, case when stop_reason not in ('max_tokens', 'context') then reward end as ended
      from rollouts)
group by group_id
"""
    ),
}

PASS_RATE = "pass_rate:LO-HI"

_PASS_RATE = """
select group_id,
       avg(case when reward < 0 then 0 when reward > 1 then 1 else reward end) as rate,
       rate between {0} and {1} as kept,
       case when kept then 'informative' when rate < {0} then 'too_hard' else 'too_easy' end
         as reason
from rollouts
group by group_id
"""


@cache
def find_filter(text: str) -> Filter:
    """The filter of this name, or else the one whose SQL this is.

    >>> find_filter("none").drops, find_filter("select ...").drops
    (False, True)
    >>> find_filter("pass_rate:0.1-0.9").rates
    (0.1, 0.9)
    """
    if (match := re.fullmatch(r"pass_rate:(\d\.?\d*)-(\d\.?\d*)", text)) is not None:
        low, high = map(float, match.groups())
        return Filter(sql=_PASS_RATE.format(low, high), rates=(low, high))
    return FILTERS.get(text) or Filter(sql=text)


def is_named(text: str) -> bool:
    """Returns whether it is the name of a filter of ours."""
    return text in FILTERS or find_filter(text).sql != text


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupMember:
    rollout_id: int
    sample_index: int
    attempt: int
    state: RolloutState
    failure_class: FailureClass
    reward: float | None
    """None unless COMPLETED."""
    num_trained: int = 0
    """Sampled tokens that may train: without one there is nothing to learn from it."""

    @property
    def valid(self) -> bool:
        """Tells whether its reward counts: it completed, and not by a fault of ours. It must have a
        token that trains: one whose weights are known.
        """
        return (
            self.state is RolloutState.COMPLETED
            and self.num_trained > 0
            and self.failure_class.trains
            and self.reward is not None
        )


class GroupDecision(NamedTuple):
    group_id: int
    kept: bool
    reason: str
    """`informative`, `all_equal`, `incomplete`, `unfiltered`, or the user's own."""
    rest: int = 0
    """Epochs that its task sits out."""
    siblings: int = 0
    """Rollouts of its task's next groups; 0 = as before."""
