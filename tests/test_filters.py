"""Tests of the named filters, and which members count; `storage/test_filter.py` tests that their
SQL decides so, `service/test_early_end.py` when a verdict is certain.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from prorl.errors import TaskError
from prorl.filters import (
    FILTERS,
    Filter,
    GroupMember,
    find_filter,
    is_named,
)
from prorl.service.core.candidates import check_group_size
from prorl.states import FailureClass, RolloutState

MEMBER: dict[str, Any] = {
    "rollout_id": 1,
    "sample_index": 0,
    "attempt": 1,
    "state": RolloutState.COMPLETED,
    "failure_class": FailureClass.NONE,
    "reward": 0.0,
}
GOOD = GroupMember(**MEMBER, num_trained=1)


def test_a_member_counts_that_completed_by_no_fault_of_ours_and_has_what_trains() -> None:
    assert GOOD.valid
    assert replace(GOOD, failure_class=FailureClass.POLICY).valid
    assert not replace(GOOD, state=RolloutState.FAILED).valid
    assert not replace(GOOD, num_trained=0).valid
    assert not replace(GOOD, failure_class=FailureClass.INFRA).valid
    assert not replace(GOOD, reward=None).valid
    assert not GroupMember(**MEMBER).valid, "tokens that nobody speaks of train nothing"


def test_a_text_is_the_name_of_a_filter_or_its_sql() -> None:
    for name in (*FILTERS, "pass_rate:0.25-0.75"):
        assert is_named(name)
        assert "select" in find_filter(name).sql
    for text in ("select 1", "pass_rate", "pass_rate:0.2", "dapoo"):
        assert not is_named(text)
        assert find_filter(text) == Filter(sql=text)
    window = find_filter("pass_rate:0.25-0.75")
    assert window.rates == (0.25, 0.75)
    assert "rate between 0.25 and 0.75" in window.sql


def test_a_group_of_a_single_rollout_is_enough_only_where_nothing_is_compared() -> None:
    assert [name for name, group_filter in FILTERS.items() if group_filter.min_valid < 2] == [
        "none"
    ]
    assert [name for name, group_filter in FILTERS.items() if not group_filter.drops] == ["none"]


@pytest.mark.parametrize(
    ("rewards", "living", "cannot_be_kept"),
    [
        ([0.0] * 3, 1, False),  # 1 of 4 may still be right: just in
        ([0.0] * 4, 1, True),
        ([1.0] * 3, 1, False),  # 3 of 4 are: just in
        ([1.0] * 4, 1, True),
        ([-9.0, 0.5], 0, False),  # cut to 0 ... 1 before they are added
        ([9.0, 0.5], 0, False),
        ([9.0, 0.6], 0, True),
        ([0.4, 0.0], 0, True),
    ],
)
def test_a_windows_verdict_is_certain_where_the_best_and_the_worst_agree(
    rewards: list[float], living: int, cannot_be_kept: bool
) -> None:
    assert find_filter("pass_rate:0.25-0.75").cannot_be_kept(rewards, living) is cannot_be_kept
    assert not Filter(sql="").cannot_be_kept(rewards, living)


@pytest.mark.parametrize(
    "name", [*(n for n in FILTERS if n != "none"), "pass_rate:0.1-0.9", "select 1"]
)
def test_groups_that_a_filter_always_drops_are_refused(name: str) -> None:
    with pytest.raises(TaskError, match=r"1 rollout of a task under the filter .*at least 2"):
        check_group_size(1, name)
    check_group_size(2, name)
    check_group_size(1, "none")
