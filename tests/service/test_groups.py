"""Decisions, hand-out, cursors and versions of a run's groups, in time moved by hand."""

from __future__ import annotations

from typing import Any

import pytest

from prorl.control import Decision, Done, GroupEventRow, KeptGroup, Kind, Rows
from prorl.errors import ConflictError
from prorl.service.core.outbox import read_page
from prorl.service.core.recover import load
from prorl.service.core.sampler import Rate
from prorl.service.core.state import RunRecord, State
from prorl.service.log.log import ControlLog
from prorl.types import FailureCode, GroupState, Json, RolloutState
from tests.service.running_gateway import group, run_config
from tests.service.stepped_core import SteppedCore


class World(SteppedCore):
    """A run with all its groups leased; a worker of each role."""

    def __init__(self, log: ControlLog) -> None:
        super().__init__(log, now=100.0)
        self.come("init", "run", "store")

    def begin(self, groups: int, n: int = 1, **config: Json) -> None:
        self.core.create_run(run_config(**{"max_open_groups": 99, **config}))
        bodies = [group(f"t{i}", n=n, key=f"k{i}") for i in range(groups)]
        if self.run.config.epochs:
            self.write()
            self.core.datasets.add(self.run, self.core.acceptance.check(self.run, bodies, {}))
            self.core.runs.end_of_groups(self.run)
            self.write()
        else:
            self.submit(*bodies)
        self.core.pump(n * groups)
        self.write()

    def complete(self, *groups: int) -> None:
        members = [r for g in groups for r in self.core.group("r", g).rollouts]
        self.commit(r for r in members if not r.life.state.terminal)

    def decide(self, *groups: int, kept: bool = True, **more: Any) -> None:
        decisions = [Decision(group_id=g, kept=kept, reason="said", **more) for g in groups]
        assert self.core.groups.propose(self.run, decisions) == Done()

    def hand(self, *groups: int, version: int = 0) -> tuple[list[tuple[int, int]], list[int]]:
        """Returns what the store hands out: (group, place), and who went stale."""
        kept_groups = [KeptGroup(g, version) for g in groups]
        answer = self.core.groups.handout(self.run, kept_groups)
        return [(delivery.group_id, delivery.delivery_seq) for delivery in answer.delivered], list(
            answer.stale
        )

    def state(self, group_id: int) -> GroupState:
        return self.core.group("r", group_id).decision.state

    def remembered(self) -> RunRecord:
        """The run as the next incarnation of the gateway knows it."""
        self.write()
        state = State()
        load(self.log, state, self.now)
        return state.runs["r"]

    def group_events(self) -> list[GroupEventRow]:
        self.write()
        rows = [row for row in read_page(self.log, 0).rows if row.kind is Kind.ROWS]
        return [event for row in rows for event in row.read(Rows).events]


@pytest.fixture
def world(log: ControlLog) -> World:
    return World(log)


def test_only_a_complete_group_is_decided_and_once(world: World) -> None:
    world.begin(2)
    world.complete(0)
    world.decide(0, 1, 7, num_valid=3, mean_reward=0.5, min_version=4)
    world.decide(0, kept=False)
    assert [world.state(g) for g in (0, 1)] == [GroupState.KEPT, GroupState.OPEN]
    run = world.run
    assert (run.delivery.kept, run.delivery.waiting, run.undecided, run.open_groups) == (1, 1, 1, 1)
    assert (run.group_states["kept"], run.group_states["open"]) == (1, 1)
    (event,) = world.group_events()
    assert (event.group_id, event.event, event.kept, event.reason) == (0, "decided", True, "said")
    assert (event.num_members, event.num_valid, event.mean_reward) == (1, 3, 0.5)
    assert (event.min_version, event.delivery_seq, event.event_at) == (4, -1, 100_000_000)


def test_a_kept_group_needs_a_member_and_a_run_that_wants_it(world: World) -> None:
    world.begin(4, n=3, target_groups=2, filter="dapo")
    for record in world.core.group("r", 0).rollouts:
        world.core.cancel_rollout(record)
    world.decide(0)
    assert (world.state(0), world.core.group("r", 0).decision.reason) == (
        GroupState.DROPPED,
        "incomplete",
    )
    world.core.cancel_rollout(world.core.group("r", 1).rollouts[0])
    world.complete(1, 2, 3)
    world.run.effort.ended(10.0, good=True)
    world.decide(1, 2, 3)
    assert [world.state(g) for g in (1, 2)] == [GroupState.KEPT] * 2, "not all need have completed"
    assert (world.state(3), world.core.group("r", 3).decision.reason) == (
        GroupState.DROPPED,
        "redundant",
    )
    assert world.run.effort.wasted_s == 30.0, "its three rollouts were for nothing"


def test_a_run_that_has_enough_ends_what_is_open_and_else_nothing(world: World) -> None:
    world.begin(3, target_groups=1)
    world.complete(0)
    world.decide(0, kept=False)
    world.core.pump(9)
    world.write()
    world.complete(1)
    world.decide(1)
    (rollout,) = world.core.group("r", 2).rollouts
    assert (rollout.life.state, rollout.life.code) == (
        RolloutState.CANCELLED,
        FailureCode.REDUNDANT,
    )


def test_where_a_kept_group_can_go_stale_the_hand_out_says_what_is_enough(world: World) -> None:
    world.begin(2, n=2, delivery="stream", max_staleness=5, target_groups=1, filter="dapo")
    world.complete(0)
    world.decide(0)
    assert world.core.group("r", 1).members.pending == 2
    world.hand(0)
    assert world.core.group("r", 1).members.pending == 0


def test_a_full_step_of_fresh_groups_ends_what_is_started_and_leaves_what_waits(
    world: World,
) -> None:
    step = {"max_staleness": 0, "groups_per_step": 1, "max_open_groups": 2}
    world.begin(3, n=2, delivery="stream", filter="dapo", **step)
    assert [world.core.group("r", g).members.opened for g in range(3)] == [True, True, False]
    world.complete(0)
    world.decide(0)
    pending = [world.core.group("r", g).members.pending for g in range(3)]
    assert pending == [0, 0, 2], "of a later step"


def test_the_forecast_learns_from_decisions_that_are_the_filters(world: World) -> None:
    world.begin(4, n=2)
    world.now = 130.0
    world.complete(0)
    world.decide(0)
    assert (world.run.pace.rate, world.run.pace.group_s) == (Rate().after(True), 30.0)
    world.now = 140.0
    world.complete(1)
    world.decide(1, kept=False)
    assert world.run.pace.rate == Rate().after(True).after(False)
    assert world.run.pace.group_s == pytest.approx(31.0), "a tenth of the way to 40"
    for g, cut in ((2, False), (3, True)):
        group_record = world.core.group("r", g)
        for record in group_record.rollouts:
            world.core.cancel_rollout(record)
        group_record.members.cut = cut
    before = world.run.pace.rate
    world.decide(2, kept=False)
    assert world.run.pace.rate == before, "we ended it ourselves"
    world.decide(3, kept=False)
    assert world.run.pace.rate == before.after(False), "its verdict was certain"
    restarted = world.core.group("r", 3)
    restarted.members.opened_at = 0.0
    assert world.run.pace.group_s == pytest.approx(31.9)


def test_a_group_without_a_start_time_gives_no_duration(world: World) -> None:
    world.begin(1)
    world.core.group("r", 0).members.opened_at = 0.0
    world.complete(0)
    world.decide(0)
    assert (world.run.pace.group_s, world.run.pace.rate.decided) == (0.0, 1.0)


def test_a_groups_time_is_never_nothing(world: World) -> None:
    world.begin(1)
    world.complete(0)
    world.decide(0)
    assert 0 < world.run.pace.group_s < 0.01, "0 is what nobody knows"


def test_what_is_handed_out_has_its_place_for_good(world: World) -> None:
    world.begin(4)
    world.complete(0, 1, 2)
    world.decide(0, 1, 2)
    assert world.hand(9, 3, 2, 0) == ([(2, 0), (0, 1)], [])
    assert world.hand(0, 1, 2) == ([(0, 1), (1, 2), (2, 0)], [])
    run = world.run
    assert (run.delivery.next_delivery, run.delivery.waiting, run.delivery.kept) == (3, 0, 3)
    events = [(e.event, e.group_id, e.delivery_seq) for e in world.group_events()]
    assert events[3:] == [("delivered", 2, 0), ("delivered", 0, 1), ("delivered", 1, 2)]
    assert [e.event_seq for e in world.group_events()] == list(range(6))


@pytest.mark.parametrize(
    ("allowed", "request_version", "stored", "stale"),
    [
        (1, 3, 9, True),
        (1, 4, 0, False),
        (0, 4, 0, True),
        (0, 5, 0, False),
        (1, -1, 3, True),
        (1, -1, 4, False),
        (1, 0, 9, True),
        (1, -1, -1, False),
        (1, -1, 0, True),
        (-1, 0, 0, False),
    ],
)
def test_what_is_older_than_allowed_goes_stale(
    world: World, allowed: int, request_version: int, stored: int, stale: bool
) -> None:
    """The version of the request counts, else the decision's; a group without a version is of
    any.
    """
    world.begin(1, n=2, delivery="stream", max_staleness=allowed)
    world.complete(0)
    world.decide(0, min_version=stored)
    world.core.versions.publish(world.run, 5)
    world.run.effort.ended(10.0, good=True)
    assert world.hand(0, version=request_version) == (([], [0]) if stale else ([(0, 0)], []))
    run = world.run
    assert (run.delivery.waiting, run.delivery.kept, run.delivery.next_delivery) == (
        0,
        not stale,
        not stale,
    )
    assert run.effort.wasted_s == (20.0 if stale else 0.0)
    event = world.group_events()[-1]
    assert (event.event, event.kept) == ("stale" if stale else "delivered", True)


def test_how_long_the_trainer_takes_is_a_mean_over_the_groups_it_took(world: World) -> None:
    world.begin(6)
    world.complete(*range(6))
    world.decide(*range(6))
    world.hand(0)
    assert (world.run.pace.handout_interval_s, world.run.pace.last_handout_at) == (0.0, 100.0), (
        "one says nothing"
    )
    world.now = 120.0
    world.hand(0)
    assert world.run.pace.last_handout_at == 100.0, "asked again, took nothing"
    world.hand(1, 2)
    assert world.run.pace.handout_interval_s == 10.0
    world.now = 140.0
    world.hand(3)
    assert world.run.pace.handout_interval_s == pytest.approx(11.0)
    assert list(world.run.effort.handed) == [100.0, 120.0, 120.0, 140.0]


def test_a_cursor_only_moves_on_and_the_primarys_acknowledges(world: World) -> None:
    world.begin(3)
    world.complete(0, 1, 2)
    world.decide(0, 1, 2)
    world.hand(0, 1, 2)
    run, cursor = world.run, world.core.groups.cursor
    for wrong in (-1, 4):
        with pytest.raises(ConflictError, match="is this another run's cursor"):
            cursor(run, "primary", wrong)
    cursor(run, "other", 3)
    assert (run.delivery.committed, run.group_states["committed"]) == (0, 0)
    cursor(run, "primary", 1)
    cursor(run, "primary", 0)
    cursor(run, "primary", 1)
    assert (run.delivery.committed, run.delivery.cursors) == (1, {"other": 3, "primary": 1})
    states = [world.state(g) for g in range(3)]
    assert states == [GroupState.COMMITTED, GroupState.DELIVERED, GroupState.DELIVERED]
    cursor(run, "primary", 3)
    assert (run.group_states["delivered"], run.group_states["committed"]) == (0, 3)
    world.write()
    assert world.log.read("SELECT consumer, seq, at FROM cursors ORDER BY consumer") == [
        ("other", 3, 100.0),
        ("primary", 3, 100.0),
    ]
    assert world.log.read("SELECT DISTINCT state FROM groups") == [("committed",)]
    cursor(run, "other", 3)
    assert world.remembered().delivery.cursors == run.delivery.cursors


def test_what_memory_has_forgotten_is_acknowledged_too(world: World) -> None:
    world.begin(3)
    world.complete(0, 1, 2)
    world.decide(0, 1, 2)
    world.hand(0, 1, 2)
    world.write()
    assert not world.run.groups
    world.core.groups.cursor(world.run, "primary", 2)
    again = world.remembered()
    assert (again.delivery.committed, again.group_states) == (2, world.run.group_states)
    states = [world.state(g) for g in range(3)]
    assert states == [GroupState.COMMITTED, GroupState.COMMITTED, GroupState.DELIVERED]


def test_an_id_of_weights_is_the_next_and_never_used_again(world: World) -> None:
    world.begin(0)
    run, give = world.run, world.core.versions.give
    assert give(run, 0, "a") == 1
    assert give(run, 2, "b") == 2
    world.write()
    assert (give(run, 1, "a"), give(run, 2, "b"), run.weights.allocated_version) == (1, 2, 2)
    for version, path, expected in (
        (1, "b", "is used"),
        (2, "a", "is used"),
        (4, "d", "one above"),
    ):
        with pytest.raises(ConflictError, match=expected):
            give(run, version, path)
    assert give(run, 0, "c") == 3
    world.write()
    rows = world.log.read("SELECT version, note, at FROM versions ORDER BY version")
    assert rows == [(1, "a", 100.0), (2, "b", 100.0), (3, "c", 100.0)]
    assert world.remembered().weights.allocated_version == 3


def test_weights_serve_once_and_never_older_ones(world: World) -> None:
    world.begin(0)
    run, versions = world.run, world.core.versions
    for path in "abc":
        versions.give(run, 0, path)
    world.write()
    assert [versions.publish(run, version) for version in (0, 2, 2, 1, 3)] == [
        False,
        True,
        False,
        False,
        True,
    ]
    assert run.weights.version == 3
    world.write()
    rows = world.log.read("SELECT version FROM versions WHERE published ORDER BY version")
    assert rows == [(2,), (3,)]
    assert world.remembered().weights.version == 3


@pytest.mark.parametrize(
    ("more", "resting", "n"),
    [({"rest": 2}, 3, 1), ({"siblings": 4}, 1, 4), ({"rest": 1, "siblings": 2}, 2, 2), ({}, 0, 1)],
)
def test_a_decision_curates_its_task_from_the_next_epoch_on(
    world: World, more: dict[str, int], resting: int, n: int
) -> None:
    world.begin(1, epochs=3)
    world.complete(0)
    world.decide(0, kept=False, **more)
    assert world.run.decisions.curating == bool(more)
    world.write()
    assert world.log.read("SELECT key, resting, n FROM dataset") == [("k0", resting, n)]


def test_only_a_run_that_feeds_itself_is_curated(world: World) -> None:
    world.begin(1)
    world.complete(0)
    world.decide(0, kept=False, rest=2)
    assert world.run.decisions.curating == 0
