"""Core and log against a model: any events in any order, with a crash at any point. Nothing
accepted is lost, nothing ends twice.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from prorl.control import (
    CommitPart,
    Committed,
    CommittedRollout,
    ControlRow,
    Decision,
    Failed,
    Hello,
    KeptGroup,
    Kind,
    Payload,
    Progress,
    Released,
    Reserve,
    Rows,
    Started,
    Terminal,
)
from prorl.errors import ConflictError
from prorl.schema.fields import SCHEMA_VERSION
from prorl.service.core.candidates import GroupBody
from prorl.service.core.core import Core
from prorl.service.core.outbox import read_page
from prorl.service.core.recover import find_run, load
from prorl.service.core.rollouts import LAST_RETRY_S
from prorl.service.core.state import IN_HAND, RolloutRecord, RunRecord, State, WorkerRecord
from prorl.service.log.log import ControlLog
from prorl.types import GroupState, Json, RolloutState
from tests.service.recount import recount
from tests.service.running_gateway import group, run_config

EXAMPLES = int(os.environ.get("PRORL_EXAMPLES", "30"))
PICK = st.integers(0, 1 << 16)
NAMES = ("init-0", "init-1", "run-0", "run-1", "eval-0", "store-0")
CODES = ("sandbox_start", "backend_unavailable", "bad_task", "cancelled", "invalid_row", "nonsense")
KEYS = ("", "", "k1", "k2", "k3")


def facts(run: RunRecord) -> Json:
    """Everything of a run that the log must be able to give back."""
    return {
        "counters": (
            run.life.state,
            run.life.last,
            run.life.cancelled,
            run.accepted.next_group,
            run.accepted.next_rollout,
            run.commits.next_commit,
            run.decisions.next_event,
            run.delivery.next_delivery,
            run.outbox.end,
            run.outbox.stored,
            run.unstored,
            run.open_groups,
            run.undecided,
            run.delivery.kept,
            run.delivery.waiting,
            run.weights.version,
            run.delivery.committed,
        ),
        "cursors": run.delivery.cursors,
        "parts": run.commits.parts,
        "states": {state: count for state, count in run.counts.items() if count},
        "group_states": {str(state): count for state, count in run.group_states.items() if count},
        "rewards": (run.commits.num_rewards, run.commits.reward_sum),
        "groups": {
            g.group_id: (
                g.key,
                g.decision.state,
                g.members.opened,
                g.decision.reason,
                g.decision.delivery_seq,
                g.members.pending,
                [(r.life, r.stored.reward, r.stored.part, r.backend) for r in g.rollouts],
            )
            for g in run.groups.values()
            if g.is_open and g.members.opened
        },
    }


class Machine(RuleBasedStateMachine):
    """Events about one run, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory(prefix="prorl-core-")
        self.log = ControlLog(Path(self.folder.name) / "control.db")
        self.now = 0.0
        self.parts = 0
        self.outbox_upto = 0
        self.seq = 0
        self.durable: dict[int, tuple[RolloutState, int]] = {}
        self.delivered: dict[int, int] = {}
        self.waiting: list[tuple[RolloutRecord, int]] = []
        self.start()

    def teardown(self) -> None:
        self.log.close()
        self.folder.cleanup()

    def start(self) -> None:
        self.core = Core(self.log, ["scripted:oracle"], lambda: self.now, lambda: self.now)
        self.waiting = []
        self.core.create_run(
            run_config(
                target_groups=3,
                filter="dapo",
                max_open_groups=4,
                limits={"queue_s": 50, "max_attempts": 2},
            )
        )

    @initialize()
    def staffed(self) -> None:
        for pick in (0, 2, 4, 5):
            self.hello(pick)
        self.submit(2, "")
        self.submit(1, "k1")
        self.pump(5)
        self.write()
        while self.waiting:
            self.send(0)

    @property
    def run(self) -> RunRecord:
        return self.core.run("r")

    def live(self) -> list[RolloutRecord]:
        return list(self.run.rollouts.values())

    def workers(self) -> list[WorkerRecord]:
        return list(self.core.state.workers.values())

    def row(self, payload: Payload, **fields: Json) -> ControlRow:
        self.seq += 1
        return ControlRow.of(payload, seq=self.seq, **{"run_id": "r", **fields})

    @rule(n=st.integers(2, 3), key=st.sampled_from(KEYS))
    def submit(self, n: int, key: str) -> None:
        body: GroupBody = group(key or "t", n=2 if key else n, key=key)
        before = self.run.accepted.next_group
        try:
            ((accepted, created),) = self.core.acceptance.groups(
                self.run, self.core.acceptance.check(self.run, [body], {})
            )
        except ConflictError:
            assert self.run.life.last or self.run.life.state != "open"
            return
        assert created == (self.run.accepted.next_group > before)
        assert not key or accepted.key == key

    @rule(pick=PICK)
    def hello(self, pick: int) -> None:
        """A worker comes, or comes back on another stream, with some of what it may hold."""
        name = NAMES[pick % len(NAMES)]
        role = name.split("-")[0]
        attempt_keys = tuple(
            r.key for r in self.live() if r.life.state in IN_HAND and (pick >> 3) % 2
        )
        hello = Hello(
            worker=name,
            roles={role: 4},
            schema_version=SCHEMA_VERSION,
            in_flight={role: attempt_keys},
        )
        self.core.workers.hello(pick, ControlRow.of(hello))

    @precondition(lambda self: self.workers())
    @rule(pick=PICK)
    def disconnect(self, pick: int) -> None:
        self.core.workers.handle_disconnect(self.workers()[pick % len(self.workers())])

    @rule(room=st.integers(1, 5))
    def pump(self, room: int) -> None:
        self.core.pump(room)

    @precondition(lambda self: self.waiting and self.core.state.of_role("init"))
    @rule(pick=PICK)
    def send(self, pick: int) -> None:
        record, attempt = self.waiting.pop(pick % len(self.waiting))
        init = self.core.state.of_role("init")
        if record.life.state is RolloutState.LEASED and record.life.attempt == attempt:
            self.core.rollouts.add_holder(record, init[pick % len(init)], "init")

    @precondition(lambda self: self.live() and self.workers())
    @rule(
        pick=PICK,
        who=PICK,
        back=st.sampled_from([0, 0, 0, 1]),
        payload=st.sampled_from([Started(), Failed(), Released(), Progress(turn=1, tokens=2)]),
    )
    def event(self, pick: int, who: int, back: int, payload: Payload) -> None:
        record = self.live()[pick % len(self.live())]
        worker = self.workers()[who % len(self.workers())]
        attempt = record.life.attempt - back
        code = CODES[(pick >> 4) % len(CODES)] if payload.kind is Kind.FAILED else ""
        self.core.control(
            worker,
            self.row(
                payload,
                rollout_id=record.rollout_id,
                attempt=attempt,
                stage=next(iter(worker.roles)),
                code=code,
            ),
        )

    def stores(self) -> list[WorkerRecord]:
        return self.core.state.of_role("store")

    @precondition(lambda self: self.stores() and self.live())
    @rule(picks=st.lists(PICK, max_size=3))
    def reserve(self, picks: list[int]) -> None:
        attempts = tuple(self.live()[pick % len(self.live())].key for pick in picks)
        self.core.control(self.stores()[0], self.row(Reserve(attempts=attempts)))

    @precondition(lambda self: self.stores())
    @rule(
        picks=st.lists(PICK, max_size=3, unique=True), all_ended=st.booleans(), rows=st.booleans()
    )
    def commit(self, picks: list[int], all_ended: bool, rows: bool) -> None:
        reserved = [r for r in self.live() if r.life.state is RolloutState.RESERVED]
        chosen = list(dict.fromkeys(reserved[pick % len(reserved)] for pick in picks if reserved))
        ended = [
            r
            for r in self.live()
            if r.life.state in (RolloutState.FAILED, RolloutState.CANCELLED) and not r.stored.part
        ]
        self.parts += 1
        request = CommitPart(
            part=f"p{self.parts}",
            rollouts=tuple(
                CommittedRollout(rollout_id=r.rollout_id, attempt=r.life.attempt, reward=1.0)
                for r in chosen
            ),
            terminals=tuple(r.rollout_id for r in ended) if all_ended else (),
            outbox_upto=self.outbox_upto if all_ended and rows else 0,
        )
        answer = self.core.commits.commit(self.run, request)
        assert isinstance(answer, Committed), answer
        assert self.core.commits.commit(self.run, request) == answer, "the same part again"
        assert all(r.life.state is RolloutState.COMPLETED for r in chosen)

    @precondition(lambda self: self.stores() and self.run.groups)
    @rule(pick=PICK, everything=st.booleans())
    def complete(self, pick: int, everything: bool) -> None:
        groups = list(self.run.groups.values())
        attempts = tuple(
            r.key for r in groups[pick % len(groups)].rollouts if r.life.state in IN_HAND
        )
        self.core.control(self.stores()[0], self.row(Reserve(attempts=attempts)))
        self.commit(list(range(len(self.live()))), everything, everything)

    @rule(kept=st.booleans(), write=st.booleans())
    def decide_and_deliver(self, kept: bool, write: bool) -> None:
        ended = [g.group_id for g in self.run.groups.values() if not g.members.pending]
        self.core.groups.propose(
            self.run, [Decision(group_id=g, kept=kept, reason="x") for g in ended]
        )
        answers = []
        for _ in range(2):
            answers.append(self.core.groups.handout(self.run, [KeptGroup(g, 0) for g in ended]))
            if write:
                self.write()
        assert answers[0] == answers[1], "the first hand-out stands"

    @precondition(lambda self: self.run.commits.parts)
    @rule()
    def published(self) -> None:
        for seq in list(self.run.commits.parts.values()):
            self.core.commits.published(self.run, seq)
        self.core.commits.finish(self.run)

    @precondition(lambda self: self.run.accepted.next_group)
    @rule(pick=PICK, kept=st.booleans())
    def propose(self, pick: int, kept: bool) -> None:
        group_id = pick % self.run.accepted.next_group
        before = self.core.groups.find(self.run, group_id)
        assert before is not None
        was, pending = before.decision.state, before.members.pending
        self.core.groups.propose(self.run, [Decision(group_id=group_id, kept=kept, reason="x")])
        after = self.core.groups.find(self.run, group_id)
        assert after is not None
        if was is GroupState.OPEN:
            assert after.is_open == (pending > 0)
        else:
            assert after.decision.state is was, "the first decision stands"

    @precondition(lambda self: self.run.accepted.next_group)
    @rule(picks=st.lists(PICK, max_size=4))
    def handout(self, picks: list[int]) -> None:
        kept_groups = [KeptGroup(pick % self.run.accepted.next_group, 0) for pick in picks]
        answer = self.core.groups.handout(self.run, kept_groups)
        for group_id, seq in answer.delivered:
            assert self.core.groups.find(self.run, group_id).decision.delivery_seq == seq  # type: ignore[union-attr]

    @rule(seq=st.integers(0, 4))
    def cursor(self, seq: int) -> None:
        try:
            self.core.groups.cursor(self.run, "primary", seq)
        except ConflictError:
            assert seq > self.run.delivery.next_delivery
        else:
            assert seq <= self.run.delivery.next_delivery

    @precondition(lambda self: self.live())
    @rule(pick=PICK, whole=st.sampled_from(["rollout", "rollout", "group", "run"]))
    def cancel(self, pick: int, whole: str) -> None:
        record = self.live()[pick % len(self.live())]
        if whole == "rollout":
            self.core.cancel_rollout(record)
        elif whole == "group":
            self.core.cancel_group(record.group)
        elif pick % 7 == 0:
            self.core.cancel_run(self.run)

    @precondition(lambda self: self.run.accepted.next_rollout)
    @rule(pick=PICK)
    def cancel_anything(self, pick: int) -> None:
        """A rollout by its id: of the pool, in hand, or long decided."""
        self.core.cancel_rollout(self.core.rollout("r", pick % self.run.accepted.next_rollout))

    @rule(seconds=st.sampled_from([0.1, 3.0, 60.0]))
    def time(self, seconds: float) -> None:
        self.now += seconds
        self.core.sweep()

    @rule()
    def write(self) -> None:
        """A transaction: from here on it is a promise."""
        self.core.grants.prune()
        batch = self.core.changes.take()
        if batch.writes:
            self.log.write_now(batch.writes)
        self.outbox_upto = self.run.outbox.end
        self.core.note_durable(batch)
        self.waiting += batch.granted
        self.check_log()

    @rule(close=st.booleans())
    def crash(self, close: bool) -> None:
        """The gateway dies: pending changes are lost."""
        if close:
            self.log.close()
            self.log = ControlLog(Path(self.folder.name) / "control.db")
        self.start()
        self.outbox_upto = self.run.outbox.end
        self.check_promises()

    def check_log(self) -> None:
        """Asserts that the log gives back what memory holds."""
        state = State()
        load(self.log, state, self.now)
        run = find_run(self.log, state, "r")  # not loaded where it is over and wanted by nobody
        assert run is not None
        assert facts(run) == facts(self.run)
        recount(self.log, run)
        assert facts(run) == facts(self.run), "counters are what rows say"
        pool = list(run.queues.pool)  # ours may name groups that were cancelled in it
        assert [group_id for group_id in self.run.queues.pool if group_id in pool] == pool
        self.check_outbox()
        self.check_promises()

    def check_outbox(self) -> None:
        """Whatever the store has to write or decide is there for the next one to hear."""
        rows = read_page(self.log, 0).rows
        complete = {row.group_id for row in rows if row.kind is Kind.GROUP_COMPLETE}
        ended = {row.read(Terminal).rollout_id for row in rows if row.kind is Kind.TERMINAL}
        tasks = {
            task.group_id for row in rows if row.kind is Kind.ROWS for task in row.read(Rows).tasks
        }
        groups = self.log.read(
            "SELECT group_id FROM groups g WHERE state = 'open' AND NOT EXISTS (SELECT 1 FROM"
            " rollouts r WHERE r.run_id = g.run_id AND r.group_id = g.group_id AND r.state NOT IN"
            " ('completed', 'failed', 'cancelled'))"
        )
        assert {group_id for (group_id,) in groups} == complete
        unstored = self.log.read(
            "SELECT rollout_id FROM rollouts WHERE part = '' AND state IN ('failed', 'cancelled')"
        )
        assert {rollout_id for (rollout_id,) in unstored} <= ended
        if not self.run.outbox.stored:
            assert tasks == set(range(self.run.accepted.next_group))

    def check_promises(self) -> None:
        rows = self.log.read("SELECT rollout_id, state, attempt FROM rollouts WHERE run_id = 'r'")
        stored_states = {
            rollout_id: (RolloutState(state), attempt) for rollout_id, state, attempt in rows
        }
        for rollout_id, (state, attempt) in self.durable.items():
            assert stored_states[rollout_id][1] >= attempt
            assert not state.terminal or stored_states[rollout_id] == (state, attempt)
        self.durable = stored_states
        delivered = dict(
            self.log.read(
                "SELECT group_id, delivery_seq FROM groups WHERE run_id = 'r' AND delivery_seq >= 0"
            )
        )
        assert self.delivered.items() <= delivered.items()
        assert sorted(delivered.values()) == list(range(len(delivered)))
        self.delivered = delivered

    @invariant()
    def nobody_is_forgotten(self) -> None:
        """Every open rollout is somewhere from where it goes on."""
        run = self.run
        assert all(until - self.now <= LAST_RETRY_S for until, _, _ in run.queues.delayed)
        ready, pool = (
            {*run.queues.ready, *(record for _, _, record in run.queues.delayed)},
            set(run.queues.pool),
        )
        buffered = {record for record, _ in [*self.waiting, *self.core.changes._batch.granted]}
        for record in run.rollouts.values():
            state = record.life.state
            if state is RolloutState.QUEUED:
                assert (
                    record in ready
                    if record.group.members.opened
                    else record.group.group_id in pool
                )
            elif state in IN_HAND:
                assert record.holders or record in buffered or record in self.core.rollouts._orphans
            else:
                assert not record.holders
        assert sum(run.counts.values()) == run.accepted.next_rollout
        assert sum(run.group_states.values()) == run.accepted.next_group
        ended = sum(
            g.members.opened and not g.members.pending and g.is_open for g in run.groups.values()
        )
        assert run.open_groups - ended <= run.config.max_open_groups
        in_flight = sum(r.life.state in IN_HAND for r in run.rollouts.values())
        assert self.core.state.balancer.in_flight("scripted:oracle") == in_flight


Machine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestMachine = Machine.TestCase
