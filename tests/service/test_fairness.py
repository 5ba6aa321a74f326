"""Shares of RUN's slots, and who gives way."""

from __future__ import annotations

from collections import Counter
from math import floor

from hypothesis import given
from hypothesis import strategies as st

from prorl.service.fairness import (
    Candidate,
    RunLoad,
    due,
    fair_slots,
    short,
    to_wake,
    victims,
)
from prorl.types import AttemptKey

SLOTS = st.integers(1, 40)


@st.composite
def loads(draw: st.DrawFn) -> tuple[int, list[RunLoad]]:
    """Slots, and runs of up to three tenants that have some of them."""
    slots, left, found = draw(SLOTS), 0, list[RunLoad]()
    left = slots
    for number in range(draw(st.integers(1, 5))):
        running = draw(st.integers(0, left))
        left -= running
        still, waking = draw(st.integers(0, 4)), draw(st.integers(0, 2))
        tenant = draw(st.sampled_from("xyz"))
        found.append(
            RunLoad(
                run_id=str(number),
                tenant=tenant,
                tenant_weight={"x": 1.0, "y": 2.5, "z": 1.0}[tenant],
                weight=draw(st.sampled_from((0.5, 1.0, 3.0))),
                running=running,
                suspended=still,
                waking=waking,
                wanted=max(1, running + still + waking + draw(st.integers(0, 50))),
            )
        )
    return slots, found


def _candidates(runs: list[RunLoad]) -> list[Candidate]:
    return [
        Candidate(run.run_id, float(number), AttemptKey(run.run_id, number, 1))
        for run in runs
        for number in range(run.running)
    ]


@given(loads())
def test_shares_add_up_and_nobody_is_given_more_than_is_wanted(
    seen: tuple[int, list[RunLoad]],
) -> None:
    slots, runs = seen
    shares = fair_slots(slots, runs)
    wanted = sum(run.wanted for run in runs)
    assert abs(sum(shares.values()) - min(slots, wanted)) < 1e-6
    assert all(shares[run.run_id] <= run.wanted + 1e-6 for run in runs)


@given(loads())
def test_who_gives_way_keeps_whole_slots_of_its_share_and_no_more_go_than_are_missing(
    seen: tuple[int, list[RunLoad]],
) -> None:
    slots, runs = seen
    missing, shares = short(slots, runs), fair_slots(slots, runs)
    chosen = victims(slots, runs, missing, _candidates(runs))
    assert len(chosen) == len(set(chosen))
    free = slots - sum(run.running for run in runs)
    assert len(chosen) <= max(0, sum(missing.values()) - free)
    gone = Counter(key.run_id for key in chosen)
    for run in runs:
        left = run.running - gone[run.run_id]
        assert not gone[run.run_id] or left >= floor(shares[run.run_id])
        numbers = sorted(key.rollout_id for key in chosen if key.run_id == run.run_id)
        assert numbers == list(range(len(numbers))), "those that had their slots longest"


@given(loads())
def test_nobody_gives_way_twice_over(seen: tuple[int, list[RunLoad]]) -> None:
    """What was freed and not taken yet is enough: no more is freed for it."""
    slots, runs = seen
    starving = short(slots, runs)
    chosen = victims(slots, runs, starving, _candidates(runs))
    gone = Counter(key.run_id for key in chosen)
    after = [
        RunLoad(
            run_id=run.run_id,
            tenant=run.tenant,
            tenant_weight=run.tenant_weight,
            weight=run.weight,
            running=run.running - gone[run.run_id],
            suspended=run.suspended + gone[run.run_id],
            waking=run.waking,
            wanted=run.wanted,
        )
        for run in runs
    ]
    assert victims(slots, after, starving, _candidates(after)) == []
    woken = to_wake(slots, after)
    over = [run for run in after if gone[run.run_id] and woken[run.run_id]]
    shares = fair_slots(slots, after)
    for run in over:  # only into what nobody is due
        has = run.running + run.waking + woken[run.run_id]
        others = sum(
            max(o.running + o.waking + woken[o.run_id], due(shares[o.run_id], o))
            for o in after
            if o is not run
        )
        assert has <= due(shares[run.run_id], run) or has + others <= slots


def test_two_runs_take_turns_on_one_slot_and_leave_an_odd_one_alone() -> None:
    a = RunLoad(run_id="a", running=1, wanted=5)
    b = RunLoad(run_id="b", running=0, wanted=5)
    assert short(1, [a, b]) == {"b": 1}
    assert victims(1, [a, b], ["b"], _candidates([a])) == [AttemptKey("a", 0, 1)]
    two = RunLoad(run_id="a", running=2, wanted=5)
    one = RunLoad(run_id="b", running=1, wanted=5)
    assert short(3, [two, one]) == {}, "one and a half each"


def test_what_stands_still_goes_on_when_the_others_want_no_more() -> None:
    a = RunLoad(run_id="a", running=2, wanted=6, suspended=4)
    b = RunLoad(run_id="b", running=2, wanted=9)
    assert to_wake(4, [a, b]) == {}
    assert to_wake(4, [a]) == {"a": 2}
    few = RunLoad(run_id="b", running=1, wanted=1)
    assert to_wake(4, [a, few]) == {"a": 1}
