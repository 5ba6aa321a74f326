"""Tests of early ends: groups whose verdict is certain, stragglers, what a step or a run leaves
over. The gateway's core in virtual time; workers, store and trainer are those of `prorl bench
dapo`.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl.bench.dapo_model import Outcome, Setup, Workload, serve
from prorl.filters import find_filter
from prorl.types import Json

SINGLE_STEP = Setup(slots=4, step=1, steps=1, train_s=5.0)


def played(folder: Path, *groups: tuple[list[float], list[float]], **run: Json) -> Outcome:
    """One step of one group out of these, with rewards and seconds of the members."""
    file = folder / "work"
    rows = [{"rewards": rewards, "seconds": seconds} for rewards, seconds in groups]
    file.write_text("\n".join(map(json.dumps, rows)))
    return serve(
        Workload(n=len(groups[0][0]), file=file), SINGLE_STEP, {"max_open_groups": 1, **run}
    )


def test_a_straggler_is_waited_for_as_long_as_its_grace(tmp_path: Path) -> None:
    slow = ([1.0, 0.0, 1.0, 1.0], [10.0, 20.0, 20.0, 900.0])
    assert played(tmp_path, slow).seconds == 905
    assert played(tmp_path, slow, early_stop_valid=3, straggler_grace_s=70.0).seconds == 20 + 70 + 5
    assert played(tmp_path, slow, early_stop_valid=4, straggler_grace_s=70.0).seconds == 905


@pytest.mark.parametrize(("filter_name", "seconds"), [("dapo", 905), ("pass_rate:0.1-0.7", 25)])
def test_a_group_with_a_certain_verdict_frees_its_slots(
    filter_name: str, seconds: float, tmp_path: Path
) -> None:
    easy, good = ([1.0] * 4, [10.0, 10.0, 10.0, 890.0]), ([1.0, 0.0] * 2, [10.0] * 4)
    assert played(tmp_path, easy, good, filter=filter_name).seconds == seconds


@pytest.mark.parametrize(
    ("name", "rewards", "living", "cannot_be_kept"),
    [
        ("none", [], 1, False),
        ("none", [], 0, True),
        ("dapo", [0.0], 1, False),
        ("dapo", [0.0], 0, True),
        ("dapo", [0.0] * 7, 1, False),
        ("pass_rate:0.2-0.8", [1.0] * 5, 1, True),
        ("select 1", [1.0] * 9, 1, False),
    ],
)
def test_only_what_nobody_can_change_is_certain(
    name: str, rewards: list[float], living: int, cannot_be_kept: bool
) -> None:
    assert find_filter(name).cannot_be_kept(rewards, living) is cannot_be_kept


def test_where_nothing_may_be_stale_a_full_step_ends_what_is_open(tmp_path: Path) -> None:
    fast, slow = ([1.0, 0.0], [10.0, 10.0]), ([1.0, 0.0], [500.0, 500.0])
    outcome = played(tmp_path, fast, slow, max_open_groups=2, max_staleness=0, target_groups=9)
    assert outcome.seconds == 15
    assert outcome.worked_s == 40, "what was open had ended when the step was full"


def test_a_late_group_is_counted_on_once_its_rewards_differ(tmp_path: Path) -> None:
    """Others are begun in the place of one that may still teach nothing."""
    first = {"rewards": [1.0, 0.0, 1.0], "seconds": [10.0] * 3}

    def started(rewards: list[float]) -> int:
        slow = {"rewards": rewards, "seconds": [10.0, 10.0, 900.0]}
        file = tmp_path / "work"
        file.write_text("\n".join(map(json.dumps, [first, *[slow] * 99])))
        setup = Setup(slots=512, step=1, steps=2, train_s=5.0)
        return serve(Workload(n=3, file=file), setup, {"max_open_groups": 64}).started

    assert started([1.0, 0.0, 1.0]) < started([1.0, 1.0, 0.0])
