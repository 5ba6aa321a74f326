"""Tests that settled groups leave memory, and come back from the log the same."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from prorl.control import (
    Decision,
    KeptGroup,
)
from prorl.service.core.recover import load_keys
from prorl.service.core.rollouts import END_BATCH
from prorl.service.core.state import PREFETCH_ROLLOUTS
from prorl.service.log import log_schema as sql
from prorl.service.log.log import ControlLog
from prorl.types import RolloutState
from tests.service.running_gateway import group, run_config
from tests.service.stepped_core import SteppedCore


@pytest.fixture
def hand(log: ControlLog) -> SteppedCore:
    hand = SteppedCore(log)
    hand.core.create_run(run_config())
    hand.come("init", "store")
    return hand


def submit(hand: SteppedCore, run_id: str, count: int, n: int = 1) -> None:
    hand.submit(*(group(str(i), n=n) for i in range(count)), run=hand.core.run(run_id))


def complete(hand: SteppedCore, groups: int) -> None:
    """Submit groups, run them, store and keep them; the last transaction is not taken."""
    run, first = hand.run, hand.run.accepted.next_group
    submit(hand, "r", groups, n=2)
    hand.core.pump(2 * groups)
    hand.commit([record for record, _ in hand.write().granted], run.outbox.end)
    decisions = [Decision(group_id=g, kept=True) for g in range(first, run.accepted.next_group)]
    hand.core.groups.propose(run, decisions)


def test_memory_is_flat_over_many_groups(hand: SteppedCore) -> None:
    core = hand.core
    for _ in range(20):
        complete(hand, 10)
        hand.write()
    run = core.run("r")
    assert (
        len(run.groups),
        len(run.keys),
        len(run.rollouts),
        len(core.state.workers["init"].in_flight),
    ) == (0, 0, 0, 0)
    assert core.group("r", 7).rollouts[1].stored.reward == 1.0
    assert core.rollout("r", 399).group.group_id == 199
    key = core.group("r", 3).key
    assert [group_record.group_id for group_record in load_keys(hand.log, run, [key])] == [3]


def test_a_group_that_changed_while_its_transaction_was_written_is_not_forgotten(
    hand: SteppedCore,
) -> None:
    complete(hand, 1)
    core, run = hand.core, hand.run
    in_flight = core.changes.take()
    assert core.groups.handout(run, [KeptGroup(0, 0)]).delivered == ((0, 0),)
    core.log.write_now(in_flight.writes)
    core.note_durable(in_flight)
    assert core.groups.handout(run, [KeptGroup(0, 0)]).delivered == ((0, 0),), (
        "the log still says that nobody has it"
    )
    hand.write()
    assert not run.groups


def test_the_pool_lives_in_the_log_but_for_its_head(hand: SteppedCore) -> None:
    core = hand.core
    groups = PREFETCH_ROLLOUTS  # twice as many rollouts as may be in memory
    submit(hand, "r", groups, n=2)
    run = core.run("r")
    assert sorted(run.groups) == list(range(PREFETCH_ROLLOUTS // 2))
    assert (len(run.rollouts), len(run.queues.pool)) == (PREFETCH_ROLLOUTS, groups)
    core.pump(3)
    assert [g for g in run.groups.values() if g.members.opened] == [run.groups[0], run.groups[1]]
    hand.restart()
    again = hand.run
    assert (len(again.groups), list(again.queues.pool)) == (0, list(range(groups)))


def test_what_waits_is_read_many_groups_at_a_time(
    hand: SteppedCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(hand, "r", PREFETCH_ROLLOUTS, n=2)
    hand.restart()
    run, reads, read = hand.run, list[str](), hand.log.read

    def counted(statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        reads.append(statement)
        return read(statement, parameters)

    monkeypatch.setattr(hand.log, "read", counted)
    hand.core.pump(PREFETCH_ROLLOUTS)
    assert run.counts[RolloutState.LEASED] == PREFETCH_ROLLOUTS
    assert len(reads) < 8
    assert sorted(run.groups) == list(range(PREFETCH_ROLLOUTS // 2))
    assert [r.rollout_id for g in run.groups.values() for r in g.rollouts] == list(
        range(PREFETCH_ROLLOUTS)
    )


def test_cancelling_a_long_queue_is_cut_into_pieces(hand: SteppedCore) -> None:
    core = hand.core
    submit(hand, "r", 3 * END_BATCH)
    run = core.run("r")
    core.cancel_run(run)
    pieces = 0
    while core.grants.prune():
        pieces += 1
        outbox_rows = dict(hand.write().writes).get(sql.TELL_STORE, [])
        assert len(outbox_rows) <= 4 * END_BATCH, "two pieces, two rows for each rollout"
    hand.write()
    assert 2 <= pieces <= 5
    assert run.counts[RolloutState.CANCELLED] == 3 * END_BATCH


def test_what_is_in_hand_is_cancelled_in_pieces_too_and_gets_no_lease(log: ControlLog) -> None:
    hand = SteppedCore(log)
    core = hand.core
    core.create_run(run_config(max_open_groups=4 * END_BATCH))
    (worker,) = hand.come("init")
    submit(hand, "r", 4 * END_BATCH)
    core.pump(3 * END_BATCH)
    hand.write()
    core.workers.handle_disconnect(worker)
    core.cancel_run(hand.run)
    core.pump(END_BATCH)
    assert hand.run.counts[RolloutState.CANCELLED] == END_BATCH
    assert not hand.write().granted, "they wait again, and nobody gets them any more"
    hand.restart()
    steps = [hand.run.counts[RolloutState.CANCELLED]]
    while hand.core.grants.prune():
        steps.append(hand.run.counts[RolloutState.CANCELLED])
        hand.write()
    assert max(b - a for a, b in pairwise(steps)) <= END_BATCH
    assert hand.run.counts[RolloutState.CANCELLED] == 4 * END_BATCH


def test_waiting_behind_other_runs_uses_up_no_budget(hand: SteppedCore) -> None:
    core = hand.core
    for name in ("busy", "starved"):
        core.create_run(run_config(run_id=name, limits={"queue_s": 60.0}))
    submit(hand, "busy", 1)
    core.pump(1)
    submit(hand, "starved", 5)
    hand.now = 1000.0
    core.sweep()
    core.grants.prune()
    assert core.run("starved").counts[RolloutState.QUEUED] == 5
    core.cancel_run(core.run("busy"))
    core.sweep()
    hand.now = 1061.0
    core.sweep()
    core.grants.prune()
    assert core.run("starved").counts[RolloutState.FAILED] == 5


def test_an_ack_searches_by_its_index(hand: SteppedCore) -> None:
    """240 ms at 100,000 groups, when the partial index's condition was not repeated."""
    core = hand.core
    plan = core.log.read("EXPLAIN QUERY PLAN " + sql.COMMIT_GROUPS, ("r", 0, 8))
    assert "USING INDEX groups_delivery" in plan[0][3]
