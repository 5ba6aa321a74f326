"""A replay with other groups, another order, another reward: the same each time, never mistaken for
the run.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest

from prorl.analysis.replay_transform import ReplayTransform, open_transformed
from prorl.errors import ConflictError, NotFoundError, UserError
from prorl.filters import FILTERS
from prorl.schema import SCORES, SEQUENCES
from prorl.schema.rows import row_hashes
from prorl.storage.files.appended import add_scores
from prorl.storage.files.layout import RunDir
from prorl.storage.serve.replay import open_replay
from tests.storage.compactable_run import ORDER, run_of_many_parts


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """Six groups of four, all rewards 1; a scoring that gives every second member of even groups 0
    and has no verdict for the first member of group 1.
    """
    made = run_of_many_parts(tmp_path)
    rows = [
        {
            "score": "other",
            "run_id": "demo",
            "rollout_id": i,
            "attempt": 1,
            "reward": None if i == 4 else float(i % 2) if i // 4 % 2 == 0 else 1.0,
        }
        for i in range(24)
    ]
    add_scores(made, "other", pa.Table.from_pylist(rows, schema=SCORES))
    return made


def test_without_a_transform_it_is_the_replay(run: RunDir) -> None:
    order, index = open_transformed(run.where, ReplayTransform())
    plain, stored = open_replay(run.where)
    assert (order.run_id, list(order.groups)) == (plain.run_id, list(plain.groups))
    assert row_hashes(index.read(2)) == row_hashes(stored.read(2))


def test_a_selection_gives_groups_and_order(run: RunDir) -> None:
    transform = ReplayTransform(
        select="select distinct group_id from rollouts where group_id < 3 order by 1 desc"
    )
    order, index = open_transformed(run.where, transform)
    assert list(order.groups) == [2, 1, 0]
    assert order.run_id.startswith("demo~")
    assert row_hashes(index.read(1)) == row_hashes(open_replay(run.where)[1].read(1))


@pytest.mark.parametrize("name", FILTERS)
def test_every_named_filter_sees_what_it_asks_for(run: RunDir, name: str) -> None:
    assert set(open_transformed(run.where, ReplayTransform(filter=name))[0].groups) <= set(
        open_transformed(run.where, ReplayTransform(filter="none"))[0].groups
    )


def test_a_shuffle_is_a_seeded_permutation(run: RunDir) -> None:
    first, again, other = (
        list(open_transformed(run.where, ReplayTransform(seed=seed))[0].groups)
        for seed in (7, 7, 8)
    )
    assert first == again
    assert sorted(first) == sorted(other) == sorted([*ORDER, 1, 3])
    assert len({tuple(first), tuple(other), (*ORDER, 1, 3)}) == 3


def test_another_reward_is_served_and_filtered_by(run: RunDir) -> None:
    order, index = open_transformed(run.where, ReplayTransform(score="other", filter="dapo"))
    assert list(order.groups) == [group for group in ORDER if group % 2 == 0]
    batch = index.read(4)
    assert batch.column("reward").to_pylist() == [0.0, 1.0, 0.0, 1.0]
    assert batch.schema.equals(SEQUENCES)
    _, rescored = open_transformed(run.where, ReplayTransform(score="other"))
    assert rescored.read(1).column("rollout_id").to_pylist() == [5, 6, 7], "4 has no verdict"
    assert open_transformed(run.where, ReplayTransform(filter="dapo"))[0].delivered == 0, (
        "first rewards are equal"
    )


def test_a_group_too_small_for_the_filter_is_not_filtered(run: RunDir) -> None:
    only = "select group_id, true as kept, '' as reason from rollouts group by 1"
    rows = [
        {"score": "few", "run_id": "demo", "rollout_id": i, "attempt": 1, "reward": float(i % 2)}
        for i in range(24)
        if i // 4 != 2 or i % 4 == 0
    ]
    add_scores(run, "few", pa.Table.from_pylist(rows, schema=SCORES))
    order, _ = open_transformed(run.where, ReplayTransform(score="few", filter=only))
    assert list(order.groups) == [group for group in (*ORDER, 1, 3) if group != 2]


def test_names_tell_transforms_apart(run: RunDir) -> None:
    names = {
        open_transformed(run.where, transform)[0].run_id
        for transform in (
            ReplayTransform(),
            ReplayTransform(seed=1),
            ReplayTransform(seed=2),
            ReplayTransform(score="other"),
        )
    }
    assert len(names) == 4


def test_bad_transforms_are_refused_in_a_single_line(run: RunDir) -> None:
    with pytest.raises(UserError, match="`group_id`"):
        open_transformed(run.where, ReplayTransform(select="select 1 as n"))
    with pytest.raises(NotFoundError, match="there are: other"):
        open_transformed(run.where, ReplayTransform(score="nope"))


def test_of_two_simultaneous_scorings_with_the_same_name_the_second_is_refused(run: RunDir) -> None:
    rows = SCORES.empty_table()
    with ThreadPoolExecutor() as threads, run.locked("scores", wait=True):
        both = [threads.submit(add_scores, run, "twin", rows) for _ in "ab"]
        time.sleep(0.5)  # both have seen that the name is free, and wait for the lock
    refused = [done.exception() for done in both if done.exception() is not None]
    assert [type(error) for error in refused] == [ConflictError]
