"""A replay with other groups, another order, another reward: the same each time, never mistaken for
the run.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import msgspec
import pyarrow as pa
import pytest

from prorl.errors import ConflictError, NotFoundError, UserError
from prorl.rows import row_hashes
from prorl.schema import SEQUENCES
from prorl.storage.layout import RunDir
from prorl.storage.locks import locked
from prorl.storage.order import Wanted
from prorl.storage.replay import open_replay
from prorl.storage.scores import SCORE_ROWS, SCORES, add_scores
from prorl.storage.twist import Twist, open_twisted
from tests.storage.compacting import ORDER, run_of_many_parts
from tests.storage.directory import add_events, add_rows, event, new_run
from tests.storage.rows import scored


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
    add_scores(made, "other", pa.Table.from_pylist(rows, schema=SCORE_ROWS), {})
    return made


def test_without_a_twist_it_is_the_replay(run: RunDir) -> None:
    order, index = open_twisted(run.where, Twist())
    plain, stored = open_replay(run.where)
    assert (order.run_id, list(order.groups)) == (plain.run_id, list(plain.groups))
    assert row_hashes(index.read(2)) == row_hashes(stored.read(2))


def test_a_selection_gives_groups_and_order(run: RunDir) -> None:
    twist = Twist(
        select="select distinct group_id from rollouts where group_id < 3 order by 1 desc"
    )
    order, index = open_twisted(run.where, twist)
    assert list(order.groups) == [2, 1, 0]
    assert order.run_id.startswith("demo~")
    assert row_hashes(index.read(1)) == row_hashes(open_replay(run.where)[1].read(1))


def test_a_shuffle_is_a_seeded_permutation(run: RunDir) -> None:
    first, again, other = (
        list(open_twisted(run.where, Twist(seed=seed))[0].groups) for seed in (7, 7, 8)
    )
    assert first == again
    assert sorted(first) == sorted(other) == sorted([*ORDER, 1, 3])
    assert len({tuple(first), tuple(other), (*ORDER, 1, 3)}) == 3


def test_another_reward_is_served_and_filtered_by(run: RunDir) -> None:
    order, index = open_twisted(run.where, Twist(score="other", filter="dapo"))
    assert list(order.groups) == [group for group in ORDER if group % 2 == 0]
    batch = index.read(4)
    assert batch.column("reward").to_pylist() == [0.0, 1.0, 0.0, 1.0]
    assert batch.schema.equals(SEQUENCES)
    _, rescored = open_twisted(run.where, Twist(score="other"))
    assert rescored.read(1).column("rollout_id").to_pylist() == [5, 6, 7], "4 has no verdict"
    assert open_twisted(run.where, Twist(filter="dapo"))[0].delivered == 0, (
        "first rewards are equal"
    )


def test_a_group_too_small_for_the_filter_is_not_asked_about(run: RunDir) -> None:
    only = "select group_id, true as kept, '' as reason from rollouts group by 1"
    rows = [
        {"score": "few", "run_id": "demo", "rollout_id": i, "attempt": 1, "reward": float(i % 2)}
        for i in range(24)
        if i // 4 != 2 or i % 4 == 0
    ]
    add_scores(run, "few", pa.Table.from_pylist(rows, schema=SCORE_ROWS), {})
    order, _ = open_twisted(run.where, Twist(score="few", filter=only))
    assert list(order.groups) == [group for group in (*ORDER, 1, 3) if group != 2]


def test_names_tell_twists_apart(run: RunDir) -> None:
    names = {
        open_twisted(run.where, twist)[0].run_id
        for twist in (Twist(), Twist(seed=1), Twist(seed=2), Twist(score="other"))
    }
    assert len(names) == 4


def test_bad_twists_are_one_line(run: RunDir) -> None:
    with pytest.raises(UserError, match="`group_id`"):
        open_twisted(run.where, Twist(select="select 1 as n"))
    with pytest.raises(NotFoundError, match="there are: other"):
        open_twisted(run.where, Twist(score="nope"))


def test_other_group_sizes(run: RunDir) -> None:
    order, index = open_twisted(run.where, Twist(group_size=2, seed=3))
    _, again = open_twisted(run.where, Twist(group_size=2, seed=3))
    _, other = open_twisted(run.where, Twist(group_size=2, seed=4))
    whole = open_replay(run.where)[1]
    chosen = {}
    for group in order.groups:
        chosen[group] = row_hashes(index.read(group))
        assert len(chosen[group]) == 2
        assert set(chosen[group]) < set(row_hashes(whole.read(group)))
        assert row_hashes(again.read(group)) == chosen[group]
    assert any(row_hashes(other.read(group)) != chosen[group] for group in chosen)
    with pytest.raises(UserError, match="at most 4"):
        open_twisted(run.where, Twist(group_size=5))


def later(run: RunDir) -> list[int]:
    """Three groups more, delivered ten and twenty seconds after the others."""
    add_rows(run, [scored(i) for i in range(200, 212)])
    add_events(
        run,
        *(
            msgspec.structs.replace(made, at=made.at + seconds * 1_000_000)
            for made, seconds in (
                (event(40, 50, "decided"), 5),
                (event(41, 51, "decided"), 5),
                (event(42, 50, "delivered", delivery_seq=4), 10),
                (event(43, 51, "delivered", delivery_seq=5), 20),
            )
        ),
    )
    return [50, 51]


def test_as_of_a_point_in_time(run: RunDir) -> None:
    later(run)
    start = datetime.fromtimestamp(event(0, 0, "decided").at / 1e6, UTC)

    def groups(seconds: float) -> list[int]:
        moment = (start + timedelta(seconds=seconds)).isoformat()
        return list(open_twisted(run.where, Twist(until=moment))[0].groups)

    assert groups(0) == [*ORDER, 1, 3]
    assert groups(6) == [*ORDER, 1, 3, 50, 51], "decided and not delivered yet"
    assert groups(11) == [*ORDER, 50, 1, 3, 51]
    assert groups(99) == list(open_replay(run.where)[0].groups)
    with pytest.raises(UserError, match="ISO 8601"):
        open_twisted(run.where, Twist(until="yesterday"))


async def test_recorded_pace(run: RunDir) -> None:
    later(run)
    only = (
        "select group_id from groups where group_id in (4, 50, 51) and event = 'delivered'"
        " order by delivery_seq"
    )
    order, _ = open_twisted(run.where, Twist(select=only, pace=100.0))
    first = await order.take(Wanted("c", 0, 0, 1 << 30, 0.0))
    assert (first.groups, first.end) == ((4,), False), "the others came later"
    began = time.monotonic()
    found: list[int] = []
    while len(found) < 2:
        given = await order.take(Wanted("c", 1 + len(found), 0, 1 << 30, 5.0))
        found += given.groups
    assert found == [50, 51]
    assert time.monotonic() - began >= 0.1


def test_groups_of_one_task_are_joined_to_larger_ones(tmp_path: Path) -> None:
    run = new_run(tmp_path)
    for i in range(16):
        row = scored(i)
        place = row.schema.get_field_index("task_id")
        task = pa.array([f"t{i // 4 % 2}"])
        add_rows(run, [row.set_column(place, row.schema.field(place), task)])
    for group in range(4):
        add_events(run, event(group, group, "decided"))
    order, index = open_twisted(run.where, Twist(group_size=8))
    assert list(order.groups) == [2, 3], "complete with the second group of their task"
    batch = index.read(2)
    assert sorted(batch.column("rollout_id").to_pylist()) == [0, 1, 2, 3, 8, 9, 10, 11]
    assert set(batch.column("group_id").to_pylist()) == {2}
    assert batch.column("sample_index").to_pylist() == list(range(8))
    assert batch.schema.equals(SEQUENCES)
    _, six = open_twisted(run.where, Twist(group_size=6))
    assert six.read(3).num_rows == 6
    assert row_hashes(six.read(3)) == row_hashes(
        open_twisted(run.where, Twist(group_size=6))[1].read(3)
    )
    with pytest.raises(UserError, match="at most 8"):
        open_twisted(run.where, Twist(group_size=9))


def test_of_two_scorings_at_once_with_one_name_one_is_refused(run: RunDir) -> None:
    rows = pa.Table.from_pylist([], schema=SCORE_ROWS)
    with ThreadPoolExecutor() as threads, locked(run, SCORES, wait=True):
        both = [threads.submit(add_scores, run, "twin", rows, {"by": who}) for who in "ab"]
        time.sleep(0.5)  # both have seen that the name is free, and wait for the lock
    refused = [done.exception() for done in both if done.exception() is not None]
    assert [type(error) for error in refused] == [ConflictError]
