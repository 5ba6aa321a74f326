"""The sampler's arithmetic."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from prorl.service.core.sampler import Demand, may_open, reached

COUNTS = st.integers(0, 50)


@given(
    COUNTS,
    COUNTS,
    COUNTS,
    st.integers(1, 50),
    st.integers(1, 50),
    COUNTS,
    st.booleans(),
    st.booleans(),
)
def test_bounds_hold(
    open_groups: int,
    unacked: int,
    kept: int,
    max_open: int,
    max_unacked: int,
    target: int,
    filtered: bool,
    streaming: bool,
) -> None:
    demand = Demand(
        open_groups=open_groups,
        unacked=unacked,
        kept=kept,
        max_open=max_open,
        max_unacked=max_unacked,
        target=target,
        filtered=filtered,
        streaming=streaming,
    )
    room = may_open(demand)
    assert room >= 0
    if room:
        assert open_groups + room <= max_open
        assert not streaming or open_groups + unacked + room <= max_unacked
        assert not reached(demand)
        assert filtered or not target or kept + open_groups + room <= target


def test_a_dropped_group_is_replenished_and_a_kept_one_is_not() -> None:
    full = Demand(
        open_groups=4, unacked=0, kept=0, max_open=4, max_unacked=9, target=4, filtered=True
    )
    assert may_open(full) == 0
    assert may_open(replace(full, open_groups=3)) == 1
    assert may_open(replace(full, open_groups=3, kept=1, filtered=False)) == 0
