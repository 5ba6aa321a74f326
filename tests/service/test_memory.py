"""What is settled leaves memory, and comes back from the log the same."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from prorl.control import (
    CommitPart,
    Committed,
    CommittedRollout,
    ControlRow,
    Decision,
    Hello,
    KeptGroup,
)
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core import counters
from prorl.service.core.core import Core
from prorl.service.core.rollouts import PIECE
from prorl.service.core.state import AHEAD, RunRecord
from prorl.service.log import log_schema as sql
from prorl.service.log.journal import LogBatch
from prorl.service.log.log import ControlLog
from prorl.types import RolloutState
from tests.service.world import group, run_config


@pytest.fixture
def core(tmp_path: Path) -> Iterator[Core]:
    """A core with a run and workers, driven by hand."""
    log = ControlLog(tmp_path / "control.db")
    core = Core(log, ["scripted:oracle"], lambda: 0.0, lambda: 0.0)
    core.create_run(run_config())
    for role in ("init", "store"):
        hello = Hello(worker=role, role=role, schema_version=SCHEMA_VERSION)
        core.workers.hello(1, ControlRow.of(hello))
    yield core
    log.close()


def write(core: Core, batch: LogBatch) -> None:
    """What the gateway does with a batch."""
    core.log.write_now(batch.writes)
    core.durable(batch)


def complete(core: Core, groups: int) -> None:
    """Submit groups, run them, store and keep them; the last transaction is not taken."""
    run, store = core.run("r"), core.state.workers["store"]
    first = run.next_group
    core.acceptance.groups(
        run, core.acceptance.check(run, [group(str(i), n=2) for i in range(groups)], {})
    )
    core.pump(2 * groups)
    batch = core.journal.take()
    write(core, batch)
    for record, _ in batch.granted:
        core.rollouts.hold(record, core.state.workers["init"])
    core.commits.reserve(store, [record.key for record, _ in batch.granted])
    rows = tuple(
        CommittedRollout(rollout_id=record.rollout_id, attempt=1, reward=1.0)
        for record, _ in batch.granted
    )
    asked = CommitPart(part=f"p{first}", rollouts=rows, outbox_upto=run.outbox_end)
    assert isinstance(core.commits.commit(run, asked), Committed)
    core.groups.propose(
        run, [Decision(group_id=g, kept=True) for g in range(first, run.next_group)]
    )


def test_memory_is_flat_over_many_groups(core: Core) -> None:
    for _ in range(20):
        complete(core, 10)
        write(core, core.journal.take())
    run = core.run("r")
    assert (
        len(run.groups),
        len(run.keys),
        len(run.rollouts),
        len(core.state.workers["init"].held),
    ) == (0, 0, 0, 0)
    assert core.group("r", 7).rollouts[1].reward == 1.0
    assert core.rollout("r", 399).group.group_id == 199
    assert core.acceptance.known(run, core.group("r", 3).key) is not None


def test_a_forgotten_group_is_handed_out_once(core: Core) -> None:
    complete(core, 2)
    write(core, core.journal.take())
    run = core.run("r")
    assert not run.groups
    answers = [core.groups.handout(run, [KeptGroup(1, 0)]) for _ in range(2)]
    write(core, core.journal.take())
    answers += [core.groups.handout(run, [KeptGroup(1, 0), KeptGroup(0, 0)])]
    assert [answer.delivered for answer in answers] == [((1, 0),), ((1, 0),), ((1, 0), (0, 1))]


def test_a_group_that_changed_while_its_transaction_was_written_is_not_forgotten(
    core: Core,
) -> None:
    complete(core, 1)
    run = core.run("r")
    in_flight = core.journal.take()
    assert core.groups.handout(run, [KeptGroup(0, 0)]).delivered == ((0, 0),)
    write(core, in_flight)
    assert core.groups.handout(run, [KeptGroup(0, 0)]).delivered == ((0, 0),), (
        "the log still says that nobody has it"
    )
    write(core, core.journal.take())
    assert not run.groups


def submit(core: Core, run_id: str, count: int, n: int = 1) -> None:
    """Accept groups, durably."""
    run = core.run(run_id)
    bodies = [group(str(i), n=n) for i in range(count)]
    core.acceptance.groups(run, core.acceptance.check(run, bodies, {}))
    write(core, core.journal.take())


def test_the_pool_lives_in_the_log_but_for_its_head(core: Core) -> None:
    groups = AHEAD  # twice as many rollouts as may be in memory
    submit(core, "r", groups, n=2)
    run = core.run("r")
    assert sorted(run.groups) == list(range(AHEAD // 2))
    assert (len(run.rollouts), len(run.pool)) == (AHEAD, groups)
    core.pump(3)
    assert [g for g in run.groups.values() if g.opened] == [run.groups[0], run.groups[1]]
    again = Core(core.log, [], lambda: 0.0, lambda: 0.0).run("r")
    assert (len(again.groups), list(again.pool)) == (0, list(range(groups)))


def test_what_waits_is_read_many_groups_at_a_time(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(core, "r", AHEAD, n=2)
    again = Core(core.log, ["scripted:oracle"], lambda: 0.0, lambda: 0.0)
    run = again.run("r")
    reads: list[str] = []
    read = core.log.read

    def counted(statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        reads.append(statement)
        return read(statement, parameters)

    monkeypatch.setattr(core.log, "read", counted)
    again.pump(AHEAD)
    assert run.rollout_states[RolloutState.LEASED] == AHEAD
    assert len(reads) < 8
    assert sorted(run.groups) == list(range(AHEAD // 2))
    assert [r.rollout_id for g in run.groups.values() for r in g.rollouts] == list(range(AHEAD))


def test_cancelling_a_long_queue_is_cut_into_pieces(core: Core) -> None:
    submit(core, "r", 3 * PIECE)
    run = core.run("r")
    core.cancel_run(run)
    pieces = 0
    while core.grants.prune():
        pieces += 1
        batch = core.journal.take()
        told = dict(batch.writes).get(sql.TELL_STORE, [])
        assert len(told) <= 4 * PIECE, "two pieces, two rows for each rollout"
        write(core, batch)
    write(core, core.journal.take())
    assert 2 <= pieces <= 5
    assert run.rollout_states[RolloutState.CANCELLED] == 3 * PIECE


def test_a_restart_goes_on_with_a_cancellation(core: Core) -> None:
    submit(core, "r", 3 * PIECE)
    core.cancel_run(core.run("r"))
    core.grants.prune()
    write(core, core.journal.take())
    again = Core(core.log, [], lambda: 0.0, lambda: 0.0)
    while again.grants.prune():
        write(again, again.journal.take())
    assert again.run("r").rollout_states[RolloutState.CANCELLED] == 3 * PIECE


def test_what_is_in_hand_is_cancelled_in_pieces_too_and_gets_no_lease(tmp_path: Path) -> None:
    log = ControlLog(tmp_path / "control.db")
    core = Core(log, ["scripted:oracle"], lambda: 0.0, lambda: 0.0)
    core.create_run(run_config(max_open_groups=4 * PIECE))
    hello = Hello(worker="init", role="init", schema_version=SCHEMA_VERSION)
    worker = core.workers.hello(1, ControlRow.of(hello))
    submit(core, "r", 4 * PIECE)
    core.pump(3 * PIECE)
    write(core, core.journal.take())
    for record in list(core.run("r").rollouts.values()):
        if record.life.state is RolloutState.LEASED:
            core.rollouts.hold(record, worker)
    core.workers.gone(worker)
    core.cancel_run(core.run("r"))
    core.pump(PIECE)
    batch = core.journal.take()
    assert not batch.granted, "they wait again, and nobody gets them any more"
    assert core.run("r").rollout_states[RolloutState.CANCELLED] == PIECE
    write(core, batch)
    again = Core(log, [], lambda: 0.0, lambda: 0.0)
    steps = [again.run("r").rollout_states[RolloutState.CANCELLED]]
    while again.grants.prune():
        steps.append(again.run("r").rollout_states[RolloutState.CANCELLED])
        write(again, again.journal.take())
    assert max(b - a for a, b in pairwise(steps)) <= PIECE
    assert again.run("r").rollout_states[RolloutState.CANCELLED] == 4 * PIECE
    log.close()


def test_leases_go_to_the_run_with_fewest_in_hand(core: Core) -> None:
    """A run whose rollouts take long does not come to own every slot."""
    core.create_run(run_config(run_id="late"))
    submit(core, "r", 20)
    core.pump(8)
    submit(core, "late", 20)
    core.pump(8)
    assert (core.run("r").in_hand, core.run("late").in_hand) == (8, 8)
    core.pump(4)
    assert (core.run("r").in_hand, core.run("late").in_hand) == (10, 10)


def test_waiting_behind_other_runs_uses_up_no_budget(tmp_path: Path) -> None:
    now = [0.0]
    log = ControlLog(tmp_path / "control.db")
    core = Core(log, ["scripted:oracle"], lambda: now[0], lambda: now[0])
    for name in ("busy", "starved"):
        core.create_run(run_config(run_id=name, limits={"queue_s": 60.0}))
    submit(core, "busy", 1)
    core.pump(1)
    submit(core, "starved", 5)
    now[0] = 1000.0
    core.sweep()
    core.grants.prune()
    assert core.run("starved").rollout_states[RolloutState.QUEUED] == 5
    core.cancel_run(core.run("busy"))
    core.sweep()
    now[0] = 1061.0
    core.sweep()
    core.grants.prune()
    assert core.run("starved").rollout_states[RolloutState.FAILED] == 5
    log.close()


def test_an_ack_searches_by_its_index(core: Core) -> None:
    """240 ms at 100,000 groups, when the partial index's condition was not repeated."""
    plan = core.log.read("EXPLAIN QUERY PLAN " + sql.ACK_GROUPS, ("r", 0, 8))
    assert "USING INDEX groups_delivery" in plan[0][3]


def test_a_restart_counts_nothing(core: Core) -> None:
    complete(core, 3)
    write(core, core.journal.take())
    again = RunRecord(config=core.run("r").config, digest="", created_at=0.0)
    counters.restore(again, core.log.read("SELECT counters FROM runs")[0][0])
    assert counters.dump(again) == counters.dump(core.run("r"))
