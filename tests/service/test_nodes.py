"""Nodes on other hosts: who is told what, what a blip costs, which of two incarnations counts."""

from __future__ import annotations

from itertools import count

import pytest

from prorl.control import ControlRow, Failover, Hello, Kind, Leaving, Released, Stats
from prorl.errors import FencedError, NotFoundError
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core import node_links, workers
from prorl.service.core.core import Core
from prorl.service.core.lifecycle import EventKind
from prorl.service.core.state import RolloutRecord, WorkerRecord
from prorl.service.log.log import ControlLog
from prorl.timing import CLAIM_GRACE_S, GIVE_UP_S, WORKER_GRACE_S, WORKER_SILENCE_S
from prorl.types import AttemptKey, BackendFault, RolloutState
from tests.service.running_gateway import CHAIN, group, roles_of, run_config


class Clock:
    """Time by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def core(log: ControlLog, clock: Clock) -> Core:
    core = Core(log, ["scripted:oracle"], clock, clock)
    core.create_run(run_config())
    return core


SESSIONS = count(1)


def hello(
    core: Core,
    name: str,
    incarnation: str = "a",
    attempts: tuple[AttemptKey, ...] = (),
    home: str = "",
    fatal_attempt: str = "",
    can_resume: bool = False,
) -> WorkerRecord:
    """`NODE/ROLE-i` says hello; without a slash it is a worker of the service's own host. What a
    chain holds is in INIT.
    """
    node, _, worker = name.rpartition("/")
    role = worker.split("-")[0]
    payload = Hello(
        worker=name,
        roles=roles_of(role),
        node=node or "local",
        location=f"at {name}{home}",
        home=home,
        fatal_attempt=fatal_attempt,
        can_resume=can_resume,
        schema_version=SCHEMA_VERSION,
        in_flight={"init" if role == CHAIN else role: attempts},
        incarnation=f"{name} {incarnation}",
        remote=bool(node),
    )
    return core.workers.hello(next(SESSIONS), ControlRow.of(payload))


def leased(core: Core, worker: WorkerRecord) -> RolloutRecord:
    run = core.run("r")
    core.acceptance.groups(run, core.acceptance.check(run, [group("t")], {}))
    core.pump(1)
    ((record, _),) = core.changes.take().granted
    core.rollouts.add_holder(record, worker, "init")
    return record


@pytest.mark.parametrize("nodes", [4, 64])
def test_only_the_store_gets_the_endpoints_of_nodes(core: Core, nodes: int) -> None:
    """The stages of a host find each other by its configuration; joining costs no square."""
    store, num_endpoints = hello(core, "store-0"), 0
    core.changes.take()
    for number in range(nodes):
        assert hello(core, f"n{number}/chain-0").status.endpoints == {}
        outbox = core.changes.take().outbox
        num_endpoints += sum(
            row.kind.value == "endpoints" for rows in outbox.values() for row in rows
        )
    assert store.status.endpoints == {
        "eval": tuple(f"at n{number}/chain-0" for number in range(nodes))
    }
    assert num_endpoints == nodes


@pytest.mark.parametrize("away_s", [5.0, WORKER_GRACE_S - 1])
def test_a_blip_costs_nothing(core: Core, clock: Clock, away_s: float) -> None:
    init = hello(core, "n1/chain-0")
    record = leased(core, init)
    core.workers.handle_disconnect(init)
    clock.now += away_s
    core.rollouts.settle_orphans()
    assert record.life.state is RolloutState.LEASED
    again = hello(core, "n1/chain-0", attempts=(record.key,))
    clock.now += 2 * WORKER_GRACE_S
    core.rollouts.settle_orphans()
    assert (record.life.state, record.life.attempt) == (RolloutState.LEASED, 1)
    assert list(record.holders) == [again]


def test_a_host_that_fell_silent_has_had_its_time(core: Core, clock: Clock) -> None:
    """Its streams do not end: silence is noticed first, the grace is the rest."""
    worker = hello(core, "n1/chain-0")
    record = leased(core, worker)
    core.control(worker, ControlRow.of(Stats(), stage="init", seq=2))
    clock.now += WORKER_SILENCE_S + 0.1
    assert core.workers.silent() == [worker]
    core.workers.handle_disconnect(worker)
    clock.now = GIVE_UP_S - 0.1
    core.sweep()
    assert record.life.state is RolloutState.LEASED
    clock.now = GIVE_UP_S + 0.2
    core.sweep()
    assert (record.life.state, charged(record)) == (RolloutState.QUEUED, (0, 0))


def test_on_the_services_own_host_a_death_is_a_death_at_once(core: Core) -> None:
    """Unless a journal is kept, which the next incarnation reads."""
    record = leased(core, hello(core, "chain-0"))
    core.workers.handle_disconnect(core.state.workers["chain-0"])
    assert record.life.state is RolloutState.QUEUED


noticed_or_not = pytest.mark.parametrize("noticed", [True, False])
"""Whether the gateway knew that the stream was broken when its worker came back."""


def back_without(
    core: Core, name: str, noticed: bool = True, lease_confirmed: bool = False
) -> RolloutRecord:
    """Returns a rollout that a worker had before its stream broke, and does not claim now."""
    worker = hello(core, name)
    record = leased(core, worker)
    if lease_confirmed:
        core.rollouts.started(worker, record, 1, "init")
    if noticed:
        core.workers.handle_disconnect(worker)
    hello(core, name, attempts=())
    return record


@noticed_or_not
@pytest.mark.parametrize("lease_confirmed", [True, False])
def test_attempts_missing_from_a_returning_worker_are_lost(
    core: Core, clock: Clock, lease_confirmed: bool, noticed: bool
) -> None:
    """It lives: what was lost was lost by the line, and is charged to nobody."""
    record = back_without(core, "n1/chain-0", noticed, lease_confirmed)
    clock.now += WORKER_GRACE_S - 1
    core.rollouts.settle_orphans()
    assert record.life.state is RolloutState.LEASED
    clock.now += 1
    core.rollouts.settle_orphans()
    assert (record.life.state, charged(record)) == (RolloutState.QUEUED, (0, 0))


@pytest.mark.parametrize("lease_confirmed", [True, False])
def test_on_the_services_own_host_missing_attempts_are_lost_soon(
    core: Core, clock: Clock, lease_confirmed: bool
) -> None:
    """A lease that never arrived is nobody's fault, here as elsewhere."""
    record = back_without(core, "chain-0", noticed=False, lease_confirmed=lease_confirmed)
    clock.now += CLAIM_GRACE_S
    core.rollouts.settle_orphans()
    assert (record.life.state, charged(record)) == (RolloutState.QUEUED, (0, int(lease_confirmed)))


@noticed_or_not
@pytest.mark.parametrize("lease_confirmed", [True, False])
def test_what_it_handed_on_while_it_was_away_is_claimed_by_its_neighbour(
    core: Core, clock: Clock, lease_confirmed: bool, noticed: bool
) -> None:
    """A stage apart redials when its own connection tells it to: the chain may be heard seconds
    before.
    """
    record = back_without(core, "n1/chain-0", noticed, lease_confirmed)
    clock.now += WORKER_GRACE_S - 1
    core.rollouts.settle_orphans()
    hello(core, "n1/eval-0", attempts=(record.key,))
    clock.now += 2 * WORKER_GRACE_S
    core.rollouts.settle_orphans()
    assert (record.life.state, record.life.attempt) == (RolloutState.LEASED, 1)
    assert [worker.name for worker in record.holders] == ["n1/eval-0"]


def test_a_lease_into_a_stream_that_breaks_is_charged_to_no_worker_that_lives(
    core: Core, clock: Clock
) -> None:
    """Control and leases have connections of their own: one may break alone."""
    record = leased(core, hello(core, "n1/chain-0"))
    core.rollouts.await_claim(record, WORKER_GRACE_S, EventKind.LOST)  # as the lease edge does
    clock.now += WORKER_GRACE_S
    core.rollouts.settle_orphans()
    assert (record.life.state, charged(record)) == (RolloutState.QUEUED, (0, 0))


def test_of_two_incarnations_with_the_same_name_the_newest_counts(core: Core) -> None:
    record = leased(core, hello(core, "n1/chain-0", "first"))
    hello(core, "n1/chain-0", "second")
    assert record.life.state is RolloutState.QUEUED
    with pytest.raises(FencedError, match="another incarnation"):
        hello(core, "n1/chain-0", "first")


def charged(record: RolloutRecord) -> tuple[int, int]:
    return record.life.infra_failures, record.life.worker_losses


@pytest.mark.parametrize("how", ["asked", "said"])
def test_what_a_leaving_worker_gives_back_is_charged_to_nobody(
    core: Core, clock: Clock, how: str
) -> None:
    worker = hello(core, "n1/chain-0")
    record = leased(core, worker)
    if how == "asked":
        core.workers.drain("n1", None)
        (row,) = core.changes.take().outbox[worker][-1:]
        assert row.kind is Kind.DRAIN
    else:
        core.control(worker, ControlRow.of(Leaving(), seq=2))
    core.control(worker, ControlRow.of(Released(), **record.key._asdict(), seq=3))
    clock.now += 2
    core.rollouts.settle_orphans()
    assert (record.life.state, charged(record)) == (RolloutState.QUEUED, (0, 0))


@pytest.mark.parametrize("another_incarnation", [False, True])
def test_so_is_what_it_still_had_when_it_was_ended(
    core: Core, clock: Clock, another_incarnation: bool
) -> None:
    worker = hello(core, "n1/chain-0")
    record = leased(core, worker)
    core.workers.drain("n1", None)
    core.workers.handle_disconnect(worker)
    if another_incarnation:
        hello(core, "n1/chain-0", "second")
    else:
        clock.now += WORKER_GRACE_S + 1
        core.rollouts.settle_orphans()
    assert (record.life.state, charged(record)) == (RolloutState.QUEUED, (0, 0))


@noticed_or_not
@pytest.mark.parametrize(("home", "losses"), [("", 1), ("another", 0)])
def test_a_next_incarnation_says_whether_the_process_died_or_its_host(
    core: Core, noticed: bool, home: str, losses: int
) -> None:
    worker = hello(core, "n1/chain-0")
    record = running(core, worker)
    if noticed:
        core.workers.handle_disconnect(worker)
    hello(core, "n1/chain-0", "second", home=home)
    assert charged(record) == (0, losses)


@noticed_or_not
@pytest.mark.parametrize(
    ("fatal_attempt", "begun", "losses"),
    [
        ("r/0/1", True, 1),
        ("r/0/1", False, 1),
        ("another/0/1", True, 0),
        ("", True, 1),
        ("", False, 0),
    ],
)
def test_a_death_is_charged_to_its_attempt_or_else_to_those_that_run(
    core: Core, noticed: bool, fatal_attempt: str, begun: bool, losses: int
) -> None:
    """`begun`: RUN has begun it; what only INIT has had runs no code that could end a worker."""
    worker = hello(core, "chain-0", can_resume=noticed)
    record = running(core, worker) if begun else leased(core, worker)
    assert record.key == ("r", 0, 1)
    if noticed:
        core.workers.handle_disconnect(worker)
    hello(core, "chain-0", "second", fatal_attempt=fatal_attempt)
    assert charged(record) == (0, losses)


def running(core: Core, worker: WorkerRecord) -> RolloutRecord:
    record = leased(core, worker)
    core.rollouts.started(worker, record, record.life.attempt, "run")
    return record


def black_hole(core: Core, clock: Clock) -> RolloutRecord:
    """A node that comes, takes a lease and falls silent, once."""
    worker = hello(core, "n1/chain-0")
    record = leased(core, worker)
    core.workers.handle_disconnect(worker)
    clock.now += WORKER_GRACE_S + 1
    core.sweep()
    return record


def test_a_node_with_a_flapping_connection_gets_no_leases_and_a_reason(
    core: Core, clock: Clock
) -> None:
    for place in range(node_links.BREAKS):
        record = black_hole(core, clock)
        assert charged(record) == (0, 0)
        core.sweep()
        assert (
            not hello(core, "n1/chain-0").status.lease_block_reason
            or place == node_links.BREAKS - 1
        )
    worker = hello(core, "n1/chain-0")
    core.sweep()
    assert "its line broke 3 times and nothing came through" in worker.status.lease_block_reason
    clock.now += node_links.FIRST_BLOCK_S
    core.sweep()
    assert not worker.status.lease_block_reason, "it is tried again"
    black_hole(core, clock)
    worker = hello(core, "n1/chain-0")
    clock.now += node_links.FIRST_BLOCK_S
    core.sweep()
    assert worker.status.lease_block_reason, "and is blocked longer when that was in vain"
    core.rollouts.node_links.note_delivery(worker)
    core.sweep()
    assert not worker.status.lease_block_reason, "a row of it in the store is a line that works"


def test_finished_attempts_of_an_unreachable_node_are_leased_to_others(
    core: Core, clock: Clock
) -> None:
    """Heartbeats pass where its rows do not, so that no stream of control ever ends."""
    chain, grader = hello(core, "n1/chain-0"), hello(core, "n1/eval-0")
    hello(core, "store-0")
    record = running(core, chain)
    core.rollouts.started(grader, record, record.life.attempt, "eval")

    def stalled(for_s: float) -> None:
        core.control(grader, ControlRow.of(Stats(stalled_s=for_s), stage="eval", seq=2))
        core.sweep()

    stalled(10 * GIVE_UP_S)
    assert record.life.state is RolloutState.RUNNING, "both ends have just come"
    clock.now += GIVE_UP_S + 1
    stalled(GIVE_UP_S - 1)
    assert (record.life.state, chain.status.lease_block_reason) == (RolloutState.RUNNING, "")
    core.changes.take()
    stalled(GIVE_UP_S + 1)
    assert (record.life.state, charged(record)) == (RolloutState.QUEUED, (0, 0))
    outbox = core.changes.take().outbox
    assert all(outbox[worker][-1].kind is Kind.CANCEL for worker in (chain, grader))
    assert "its line broke" in chain.status.lease_block_reason
    assert list(core.workers.blocked_absent_nodes()) == []
    core.workers.handle_disconnect(chain)
    assert [node for node, _ in core.workers.blocked_absent_nodes()] == ["n1"], (
        "its streams may all be cut"
    )
    stalled(0.0)
    assert list(core.workers.blocked_absent_nodes()) == []


def test_a_store_that_is_away_is_no_line_that_broke(core: Core, clock: Clock) -> None:
    chain = hello(core, "n1/chain-0")
    record = running(core, chain)
    core.rollouts.started(chain, record, record.life.attempt, "eval")
    clock.now += 10 * GIVE_UP_S
    core.control(chain, ControlRow.of(Stats(stalled_s=10 * GIVE_UP_S), stage="eval", seq=2))
    core.sweep()
    assert (record.life.state, chain.status.lease_block_reason) == (RolloutState.RUNNING, "")


def test_a_node_that_is_not_there_is_named_with_those_that_are(core: Core) -> None:
    hello(core, "n1/chain-0")
    with pytest.raises(NotFoundError, match=r"no node 'n2' works here; those that do: n1"):
        core.workers.drain("n2", None)


@pytest.mark.parametrize(
    ("runs", "others", "after_s", "state"),
    [
        (False, True, CLAIM_GRACE_S, RolloutState.QUEUED),
        (False, False, WORKER_GRACE_S - 1, RolloutState.LEASED),
        (False, False, WORKER_GRACE_S, RolloutState.QUEUED),
        (True, True, WORKER_GRACE_S - 1, RolloutState.RUNNING),
        (True, True, WORKER_GRACE_S, RolloutState.QUEUED),
    ],
)
def test_what_nobody_claims_after_a_restart(
    log: ControlLog, clock: Clock, runs: bool, others: bool, after_s: float, state: RolloutState
) -> None:
    """Attempts that were lost with the gateway are nobody's fault; who runs one may be far away,
    and a lease waits until workers have come.
    """
    core = restarted(log, clock, runs)
    if others:
        hello(core, "n2/chain-0")
    record = core.run("r").rollouts[0]
    clock.now += after_s
    core.sweep()
    assert (record.life.state, charged(record)) == (state, (0, 0))


def test_after_a_restart_leases_wait_for_their_holders_as_long_as_workers_come(
    log: ControlLog, clock: Clock
) -> None:
    """With many nodes on a busy machine that takes longer than with one."""
    core = restarted(log, clock)
    record = core.run("r").rollouts[0]
    for number in range(6):
        clock.now += CLAIM_GRACE_S - 0.1
        core.sweep()
        hello(core, f"n{2 + number}/chain-0")
    hello(core, "n1/chain-0", attempts=(record.key,))
    clock.now += 2 * WORKER_GRACE_S
    core.sweep()
    assert (record.life.state, record.life.attempt) == (RolloutState.LEASED, 1)


def restarted(log: ControlLog, clock: Clock, runs: bool = False) -> Core:
    """The next incarnation of a gateway that had leased one rollout, which may already run."""
    before = Core(log, ["scripted:oracle"], clock, clock)
    before.create_run(run_config())
    run = before.run("r")
    before.acceptance.groups(run, before.acceptance.check(run, [group("t")], {}))
    before.pump(1)
    if runs:
        worker = hello(before, "n1/chain-0")
        before.rollouts.started(worker, run.rollouts[0], 1, "run")
    log.write_now(before.changes.take().writes)
    return Core(log, ["scripted:oracle"], clock, clock)


def test_of_names_that_never_come_back_little_is_remembered(
    core: Core, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that a batch system places have a new name each time."""
    monkeypatch.setattr(workers, "REMEMBERED_INCARNATIONS", 8)
    here = hello(core, "n0/chain-0")
    for number in range(1, 40):
        core.workers.handle_disconnect(hello(core, f"n{number}/chain-0"))
        clock.now += WORKER_GRACE_S + 1
        core.sweep()
    assert len(core.workers._incarnations) <= 9
    assert not core.workers._away
    hello(core, "n0/chain-0", "second")
    with pytest.raises(FencedError, match="another incarnation"):
        hello(core, "n0/chain-0", here.incarnation.split()[1])


def test_who_comes_back_after_its_grace_takes_nothing_from_others(core: Core, clock: Clock) -> None:
    record = leased(core, hello(core, "n1/chain-0"))
    core.workers.handle_disconnect(core.state.workers["n1/chain-0"])
    clock.now += WORKER_GRACE_S + 1
    core.sweep()
    clock.now += 60
    core.pump(1)
    assert record.life.state is RolloutState.LEASED, "again, on its way to somebody"
    hello(core, "n1/chain-0", "second")
    assert record.life.state is RolloutState.LEASED


def test_an_attempt_that_no_backend_suits_holds_up_no_other(core: Core) -> None:
    """One has seen version 2, which nobody serves; the other takes any."""
    run = hello(core, "chain-0")
    picky, easy = leased(core, run), leased(core, run)
    core.state.serves["scripted:oracle"] = ("r", 1)
    for seq, (record, version) in enumerate([(picky, 2), (easy, 0)], 2):
        lost = Failover(
            attempt=record.key,
            backend="scripted:oracle",
            trouble=BackendFault.REFUSED,
            min_version=version,
        )
        core.control(run, ControlRow.of(lost, seq=seq))
    (answer,) = (row for row in core.changes.take().outbox[run] if row.re)
    assert answer.re == 3
    assert core.failovers.num_waiting == 1
