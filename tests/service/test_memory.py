"""What is settled leaves memory, and comes back from the log the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

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
from prorl.schema import SCHEMA_VERSION
from prorl.service.core import Core
from prorl.service.journal import Batch
from prorl.service.log import ControlLog
from tests.service.world import group, no_check, run_config


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


def write(core: Core, batch: Batch) -> None:
    """What the gateway does with a batch."""
    core.log.write_now(batch.writes)
    core.durable(batch)


def complete(core: Core, groups: int) -> None:
    """Submit groups, run them, store and keep them; the last transaction is not taken."""
    run, store = core.run("r"), core.state.workers["store"]
    first = run.next_group
    core.acceptance.groups(
        run, core.acceptance.check(run, [group(str(i), n=2) for i in range(groups)], no_check, {})
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
    asked = CommitPart(part=f"p{first}", rollouts=rows, tasks_upto=run.next_group)
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
    answers = [core.groups.handout(run, [KeptGroup(1, 0, 1)]) for _ in range(2)]
    write(core, core.journal.take())
    answers += [core.groups.handout(run, [KeptGroup(1, 0, 1), KeptGroup(0, 0, 1)])]
    assert [answer.delivered for answer in answers] == [((1, 0),), ((1, 0),), ((1, 0), (0, 1))]


def test_a_group_that_changed_while_its_transaction_was_written_is_not_forgotten(
    core: Core,
) -> None:
    complete(core, 1)
    run = core.run("r")
    in_flight = core.journal.take()
    assert core.groups.handout(run, [KeptGroup(0, 0, 1)]).delivered == ((0, 0),)
    write(core, in_flight)
    assert core.groups.handout(run, [KeptGroup(0, 0, 1)]).delivered == ((0, 0),), (
        "the log still says that nobody has it"
    )
    write(core, core.journal.take())
    assert not run.groups
