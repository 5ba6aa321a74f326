"""The gateway makes rollouts stand still and go on again: a real core and log, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

import pytest

from prorl.control import Claim, ControlRow, Hello, Kind, Started, Suspend, Suspended
from prorl.schema_fields import SCHEMA_VERSION
from prorl.service.core import Core
from prorl.service.log import ControlLog
from prorl.service.preemption import PATIENCE_S
from prorl.service.state import RunRecord, WorkerRecord
from prorl.types import AttemptKey, FailureCode, Json, RolloutState
from tests.service.world import group, no_check, run_config, world

SLOTS, AFTER_S = 4, 60.0


class Floor:
    """A core, one RUN worker of `SLOTS` slots, and what it was told."""

    def __init__(self, log: ControlLog, after_s: float = AFTER_S) -> None:
        self.now, self._log, self._after_s = 1000.0, log, after_s
        self.told: list[tuple[AttemptKey, bool]] = []
        self.restart()

    def restart(self) -> None:
        """A gateway that knows what the log knows."""
        clock = lambda: self.now  # noqa: E731
        self.core = Core(
            self._log, ["scripted:oracle"], clock, clock, preempt_after_s=self._after_s
        )
        self.hello("init")

    def hello(self, role: str, **more: Json) -> WorkerRecord:
        """A worker comes."""
        hello = Hello(worker=role, role=role, schema_version=SCHEMA_VERSION, slots=SLOTS, **more)
        return self.core.workers.hello(1, ControlRow.of(hello))

    def come(self, **more: Json) -> None:
        """RUN comes."""
        self.worker = self.hello("run", resumes=True, **more)
        self.settle()

    def run(self, name: str, count: int, **config: Json) -> RunRecord:
        """A run with rollouts that wait."""
        self.core.create_run(run_config(run_id=name, **config))
        run, acceptance = self.core.run(name), self.core.acceptance
        checked = acceptance.check(run, [group(f"t{n}") for n in range(count)], no_check, {})
        acceptance.check_room(run, checked)
        acceptance.groups(run, checked)
        self.settle()
        return run

    def start(self, count: int) -> None:
        """Lease, and let RUN take what was leased, a second apart."""
        self.core.pump(count)
        for run in self.core.state.open.values():
            for record in list(run.rollouts.values()):
                if record.life.state == "leased":
                    self.now += 1.0
                    self.say(Started(), record.key)
        self.settle()

    def say(self, said: Started | Suspended, key: AttemptKey) -> None:
        """An event of RUN."""
        row = ControlRow.of(said, **key._asdict(), stage="run")
        self.core.control(self.worker, row)

    def settle(self) -> None:
        """Write what happened; hear what RUN is told."""
        batch = self.core.journal.take()
        self._log.write_now(batch.writes)
        self.core.durable(batch)
        rows = [
            row for worker, rows in batch.outbox.items() if worker.role == "run" for row in rows
        ]
        self.told += [
            (row.key, row.read(Suspend).suspended) for row in rows if row.kind is Kind.SUSPEND
        ]

    def look(self, passed_s: float = 0.0) -> list[tuple[int, bool]]:
        """Time passes; who is told what: rollout, and whether to stand still."""
        self.now += passed_s
        self.told.clear()
        self.core.preemption.look()
        self.settle()
        return [(key.rollout_id, suspended) for key, suspended in self.told]

    def stand(self, run: RunRecord, rollouts: Iterable[int], still: bool = True) -> None:
        """RUN says that these stand still, or go on."""
        for number in rollouts:
            self.say(Suspended(suspended=still), run.rollouts[number].key)


@pytest.fixture
def log(tmp_path: Path):  # type: ignore[no-untyped-def]
    log = ControlLog(tmp_path / "control.db")
    yield log
    log.close()


def _full(floor: Floor) -> tuple[RunRecord, RunRecord]:
    """`a` has every slot, and `b` waits."""
    floor.come()
    a = floor.run("a", 12)
    floor.start(SLOTS)
    return a, floor.run("b", 8)


def test_the_longest_held_of_the_run_that_is_over_its_share_stand_still(log: ControlLog) -> None:
    floor = Floor(log)
    a, b = _full(floor)
    assert floor.look() == []
    assert floor.look(AFTER_S - 1) == [], "not before its time"
    assert floor.look(1) == [(0, True), (1, True)]
    assert (len(a.suspended), a.num_preempted, a.in_hand, a.at_work) == (2, 2, 4, 2)
    assert floor.look(1) == [], "what was asked for is on its way"
    assert all(record.life.attempt == 1 for record in a.suspended)
    floor.core.pump(floor.core.preemption.room)
    assert b.at_work == SLOTS // 2, "leases of its own, however many of others wait to be sent"
    share = floor.core.grants.load().share(a)
    assert share == (SLOTS, SLOTS // 2), "what stands still counts neither for tenant nor run"


def test_off_nobody_stands_still(log: ControlLog) -> None:
    floor = Floor(log, after_s=0.0)
    a, _ = _full(floor)
    assert floor.look() == floor.look(10 * AFTER_S) == [] == list(a.suspended)


def test_they_go_on_when_their_run_is_due_or_nobody_else_wants_the_slots(log: ControlLog) -> None:
    floor = Floor(log)
    a, b = _full(floor)
    floor.look()
    floor.look(AFTER_S)
    floor.stand(a, (0, 1))
    assert floor.look(1) == []
    floor.core.pump(8)
    assert not any(r.life.state == "leased" for r in a.rollouts.values()), "none begins meanwhile"
    floor.core.cancel_run(b)
    assert floor.look(1) == [(0, False), (1, False)]
    assert floor.look(1) == [], "once"
    floor.core.pump(1)
    assert [r.life.state for r in a.rollouts.values()].count(RolloutState.LEASED) == 1, "others too"
    floor.stand(a, (0, 1), still=False)
    assert not a.suspended


def test_between_two_stands_there_is_time(log: ControlLog) -> None:
    floor = Floor(log)
    a, b = _full(floor)
    floor.look()
    floor.look(AFTER_S)
    floor.stand(a, (0, 1))
    floor.core.cancel_run(b)
    floor.look()
    floor.stand(a, (0, 1), still=False)
    floor.run("c", 8)
    floor.look()
    assert floor.look(AFTER_S) == [(2, True), (3, True)], "others first: they had theirs longer"


def test_who_has_just_gone_on_keeps_its_slot_for_a_while(log: ControlLog) -> None:
    floor = Floor(log)
    a, _ = _full(floor)
    floor.look()
    floor.now += AFTER_S - 1
    floor.stand(a, range(SLOTS), still=False)
    assert floor.look(1) == []
    assert len(floor.look(AFTER_S - 1)) == SLOTS // 2


def test_what_cannot_go_on_from_a_journal_or_is_judged_keeps_its_slot(log: ControlLog) -> None:
    floor = Floor(log)
    floor.come()
    floor.run("a", 4, journal="off")
    floor.start(SLOTS)
    floor.run("b", 8)
    floor.look()
    assert floor.look(AFTER_S) == []


def test_one_whose_turn_is_long_does_not_hold_the_others_up(log: ControlLog) -> None:
    floor = Floor(log)
    a, _ = _full(floor)
    floor.look()
    floor.look(AFTER_S)
    floor.stand(a, (0,))
    assert floor.look(PATIENCE_S + 1) == [(2, True)]


def test_what_eval_has_is_not_asked(log: ControlLog) -> None:
    floor = Floor(log)
    a, _ = _full(floor)
    scorer = floor.hello("eval")
    for number in (0, 1):
        key = a.rollouts[number].key
        floor.core.control(scorer, ControlRow.of(Started(), **key._asdict(), stage="eval"))
    floor.look()
    assert [rollout for rollout, _ in floor.look(AFTER_S)] == [], "two slots are free"
    assert floor.core.preemption.room == 2


def test_after_a_restart_run_says_who_stands_still(log: ControlLog) -> None:
    floor = Floor(log)
    a, _ = _full(floor)
    floor.look()
    floor.look(AFTER_S)
    floor.stand(a, (0, 1))
    held = tuple(record.key for record in a.rollouts.values() if record.life.state == "running")
    floor.settle()
    floor.restart()
    floor.come(held=held, suspended=held[:2])
    again = floor.core.run("a")
    assert [record.rollout_id for record in again.suspended] == [0, 1]
    assert (again.at_work, floor.look(1)) == (2, [])


def test_runs_next_life_is_asked_again(log: ControlLog) -> None:
    floor = Floor(log)
    a, _ = _full(floor)
    floor.look()
    floor.look(AFTER_S)
    floor.stand(a, (0,))
    keys = [record.key for record in a.rollouts.values() if record.life.state == "running"]
    floor.core.workers.gone(floor.worker)
    floor.told.clear()
    floor.come(incarnation="next", claims=tuple(Claim(*key, 0) for key in keys))
    assert sorted(floor.told) == [(keys[0], True), (keys[1], True)]
    assert [key.attempt for key in keys] == [1] * SLOTS


def test_one_that_ends_while_it_stands_still_is_forgotten(log: ControlLog) -> None:
    floor = Floor(log)
    a, _ = _full(floor)
    floor.look()
    floor.look(AFTER_S)
    floor.stand(a, (0, 1))
    floor.core.cancel_rollout(a.rollouts[0])
    assert [record.rollout_id for record in a.suspended] == [1]
    assert a.rollouts[0].life.code is FailureCode.CANCELLED


def test_a_node_that_leaves_lets_all_go_on(log: ControlLog) -> None:
    floor = Floor(log)
    a, _ = _full(floor)
    floor.look()
    floor.look(AFTER_S)
    floor.stand(a, (0, 1))
    floor.worker.leaving = True
    assert floor.look(1) == [(0, False), (1, False)]


async def test_leases_of_a_run_that_starves_pass_those_that_wait_to_be_sent(tmp_path: Path) -> None:
    async with (
        world(tmp_path, preempt_after_s=0.01) as w,
        w.worker("run") as run,
        w.worker("init") as init,
    ):
        await w.run("a")
        await w.submit(*(group(f"t{n}") for n in range(40)), run_id="a")
        for key in await init.take(8):
            run.say(Started(), key)
        await w.until(lambda view: view["counts"]["running"] == 8, "a")
        await w.run("b")
        await w.submit(*(group(f"t{n}") for n in range(4)), run_id="b")
        async with asyncio.timeout(30):
            while "b" not in w.core.preemption.starving or w.core.run("b").at_work < 4:
                await asyncio.sleep(0.02)
        await w.served.gateway.durable()
        taken = await init.take(8)  # on their way before
        while len(taken) < 12:
            taken += await init.take()
        assert [key.run_id for key in taken[:12]] == ["a"] * 8 + ["b"] * 4
