"""The sampler's arithmetic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.service.core.sampler import (
    MEMORY,
    PRIOR,
    Demand,
    Rate,
    full,
    may_open,
    reached,
    step_reached,
)

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
    uncommitted: int,
    kept: int,
    max_open: int,
    max_uncommitted: int,
    target: int,
    filtered: bool,
    streaming: bool,
) -> None:
    demand = Demand(
        open_groups=open_groups,
        uncommitted=uncommitted,
        kept=kept,
        max_open=max_open,
        max_uncommitted=max_uncommitted,
        target=target,
        filtered=filtered,
        streaming=streaming,
    )
    room = may_open(demand)
    assert room >= 0
    if room:
        assert open_groups + room <= max_open
        assert filtered or not streaming or open_groups + uncommitted + room <= max_uncommitted
        assert not reached(demand)
        assert filtered or not target or kept + open_groups + room <= target


PLAIN = Demand(open_groups=0, uncommitted=0, kept=0, max_open=50, max_uncommitted=30)
SOME = Demand(
    open_groups=4, uncommitted=0, kept=0, max_open=4, max_uncommitted=9, target=4, filtered=True
)
STREAM = replace(SOME, target=0, open_groups=0, streaming=True, max_open=99, max_uncommitted=64)
HALF = Rate(500.0, 1000.0)


def test_a_dropped_group_is_replenished_and_a_kept_group_is_not() -> None:
    assert may_open(SOME) == 0
    assert may_open(replace(SOME, open_groups=3)) == 1
    assert may_open(replace(SOME, open_groups=3, kept=1, filtered=False)) == 0


def test_enough_is_kept_and_for_good_only_what_was_handed_out() -> None:
    kept = replace(SOME, kept=4)
    assert full(kept)
    assert not full(replace(kept, kept=3))
    assert not full(replace(kept, target=0))
    assert reached(kept)
    assert not reached(replace(kept, kept=3))
    assert not reached(replace(kept, target=0))
    fleeting = replace(kept, perishable=True)
    assert not reached(replace(fleeting, delivered=3))
    assert reached(replace(fleeting, delivered=4))


def test_a_paused_run_starts_nothing() -> None:
    few = replace(SOME, open_groups=0)
    assert may_open(few) == 4
    assert may_open(replace(few, paused=True)) == 0


def test_a_filter_that_keeps_nearly_nothing_is_bounded_by_what_may_be_open() -> None:
    never = Rate(0.0, 1e9)
    assert may_open(replace(SOME, open_groups=0, max_open=50, rate=never)) == 50
    assert may_open(replace(STREAM, max_uncommitted=3, rate=never)) == 99


def test_the_rate_follows_what_is_decided() -> None:
    rate = Rate()
    assert rate.mean == 0.5
    for _ in range(2000):
        rate = rate.after(True)
    assert rate.decided == pytest.approx(MEMORY, rel=0.01)
    assert rate.mean > 0.95
    for _ in range(2000):
        rate = rate.after(False)
    assert rate.mean < 0.05


def test_late_groups_are_not_counted_on_within_what_may_be_open() -> None:
    demand = replace(STREAM, max_uncommitted=8, rate=HALF)
    num_allowed = may_open(demand)
    late = replace(demand, open_groups=num_allowed, late=3)
    assert may_open(late) == 3
    assert may_open(replace(late, max_open=num_allowed + 1)) == 1
    assert may_open(replace(late, filtered=False)) == 0


def test_no_more_waits_than_a_trainer_takes_while_a_group_is_sampled() -> None:
    stream_demand = replace(STREAM, step=8, group_s=60.0, handout_interval_s=5.0, filtered=False)
    assert may_open(stream_demand) == stream_demand.lead == 24
    assert may_open(replace(stream_demand, kept=20, delivered=0)) == 4
    assert may_open(replace(stream_demand, kept=20, delivered=16)) == 20
    slower, faster = (
        replace(stream_demand, handout_interval_s=50.0),
        replace(stream_demand, handout_interval_s=0.5),
    )
    assert (slower.lead, faster.lead) == (16, 64)
    for unknown in ({"step": 0}, {"group_s": 0.0}, {"handout_interval_s": 0.0}):
        assert replace(stream_demand, **unknown).lead == 64


def test_no_more_waits_than_stays_fresh() -> None:
    fresh = replace(STREAM, step=8, max_staleness=1, filtered=False)
    assert may_open(fresh) == 16
    assert may_open(replace(fresh, untrained=10)) == 6
    assert may_open(replace(fresh, untrained=17)) == 0
    assert may_open(replace(fresh, uncommitted=60)) == 4, "published, and in no checkpoint yet"
    assert may_open(replace(fresh, max_staleness=-1)) == 64
    assert may_open(replace(fresh, step=0)) == 64


def test_where_nothing_may_be_older_than_its_step_the_rest_of_a_step_is_redundant() -> None:
    strict = replace(STREAM, step=8, max_staleness=0, rate=HALF)
    assert not step_reached(replace(strict, untrained=7))
    assert step_reached(replace(strict, untrained=8))
    for other in ({"max_staleness": 1}, {"step": 0}, {"streaming": False}):
        assert not step_reached(replace(strict, untrained=8, **other))
    assert may_open(strict) > may_open(replace(strict, max_staleness=-1, max_uncommitted=8))
    assert may_open(strict) == math.ceil(HALF.groups_for(8, 1))
    last = replace(strict, step=1, untrained=1)
    assert step_reached(last)
    assert may_open(replace(strict, filtered=False)) == 8


def test_unset_fields_do_not_limit_the_lead() -> None:
    assert may_open(PLAIN) == 50
    assert may_open(replace(PLAIN, streaming=True)) == 30
    assert may_open(replace(PLAIN, target=4)) == 4, "without a filter every group is kept"
    for fields in (
        {"step": 8, "handout_interval_s": 5.0},
        {"step": 8, "group_s": 8.0},
        {"max_staleness": 0},
    ):
        assert replace(PLAIN, streaming=True, **fields).lead == 30
    assert not replace(PLAIN, streaming=True, max_staleness=0).strict
    assert may_open(replace(PLAIN, streaming=True, step=8)) == 30


@pytest.mark.parametrize("rate", [Rate(), HALF, Rate(3.0, 40.0), Rate(250.0, 256.0)])
@pytest.mark.parametrize("kept", [1, 16, 200])
@pytest.mark.parametrize("side", [-1, 1])
def test_the_forecast_ends_a_deviation_of_a_beta_binomial_away(
    rate: Rate, kept: int, side: int
) -> None:
    groups = rate.groups_for(kept, side)
    good, bad = rate.kept + PRIOR, rate.decided - rate.kept + PRIOR
    seen = good + bad
    variance = groups * good * bad * (seen + groups) / (seen * seen * (seen + 1))
    assert groups * good / seen - side * math.sqrt(variance) == pytest.approx(kept)


def test_whole_groups_reach_a_target_for_sure_and_never_overfill_a_stock() -> None:
    below, above = HALF.groups_for(16, -1), HALF.groups_for(16, 1)
    assert may_open(replace(STREAM, max_uncommitted=16, rate=HALF)) == math.floor(below)
    assert may_open(replace(SOME, open_groups=0, target=16, max_open=99, rate=HALF)) == math.ceil(
        above
    )
