"""The gateway's functional core: control rows, requests and time in, changes of the state out, and
what to write and send, collected in `PendingChanges`.

No I/O but reads of the log, no await, no thread: `gateway.py` brings the events and carries the
changes out. What a method answers may be told to others only after their next `take` is
durable.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from prorl.config import RunConfig
from prorl.control import (
    REQUESTS,
    CommitCursor,
    CommitPart,
    ControlRow,
    Done,
    Failed,
    Handout,
    Kind,
    PartPublished,
    Payload,
    Problem,
    Progress,
    Propose,
    Reserve,
    RunRejected,
    Stats,
)
from prorl.errors import ConflictError, NotFoundError, UserError
from prorl.limits import Clock
from prorl.service.core.accept import Acceptance
from prorl.service.core.backend_watch import BackendWatch
from prorl.service.core.changes import Base, LogBatch, PendingChanges
from prorl.service.core.commits import Commits
from prorl.service.core.dataset import Datasets
from prorl.service.core.grants import LeaseGrants, RoomFor, anywhere
from prorl.service.core.groups import Groups
from prorl.service.core.lifecycle import Event, EventKind
from prorl.service.core.outbox import last_seq
from prorl.service.core.reassignment import Reassignments
from prorl.service.core.recover import find_run, load, load_rollout
from prorl.service.core.rollouts import Rollouts
from prorl.service.core.runs import RunLifecycle
from prorl.service.core.state import (
    KEPT_CLOSED,
    GroupRecord,
    RolloutRecord,
    RunRecord,
    State,
    WorkerRecord,
)
from prorl.service.core.versions import Versions
from prorl.service.core.workers import Workers
from prorl.service.log import log_schema as sql
from prorl.service.log.log import ControlLog
from prorl.service.pool.balancer import Balancer
from prorl.timing import CLAIM_GRACE_S, WORKER_GRACE_S, now
from prorl.types import FailureCode, RolloutState


class Core:
    def __init__(
        self,
        log: ControlLog,
        backends: Iterable[str] = (),
        clock: Clock = now,
        wall: Clock = time.time,
        max_queued: int = 1_000_000,
        claim_grace_s: float = CLAIM_GRACE_S,
        refusal_of: Callable[[str], str] = lambda run_id: "",
        on_backends: Callable[[], None] = lambda: None,
    ) -> None:
        self.log, self._clock, self._wall = log, clock, wall
        self.changes = PendingChanges(last_seq(log))
        stored = dict(log.read("SELECT name, state FROM backends ORDER BY added_at"))
        named = dict.fromkeys((*backends, *stored))
        self.state = State(Balancer([n for n in named if stored.get(n) != "removed"]))
        for name in named:
            if stored.get(name) == "draining":
                self.state.balancer.drain(name)
        self.base = base = Base(log, self.state, self.changes, clock, wall)
        self.runs = RunLifecycle(base)
        self.versions = Versions(base)
        self.rollouts = Rollouts(base, self.runs)
        self.grants = LeaseGrants(base, self.rollouts, self.runs)
        self.groups = Groups(base, self.rollouts)
        self.commits = Commits(base, self.rollouts, self.runs)
        self.workers = Workers(base, self.rollouts, self.commits)
        self.watched = BackendWatch(self.state, clock, on_backends)
        self.failovers = Reassignments(base, self.watched, self.rollouts, self._reply)
        self.acceptance = Acceptance(base, max_queued)
        self.datasets = Datasets(base, self.acceptance)
        self._claim_grace_s = claim_grace_s
        self._leases: list[tuple[RolloutRecord, int]] = []
        """Leases of the last incarnation that nobody has claimed yet, with their attempts."""
        # Whoever has them may be on another host, where a broken stream is noticed late; a lease
        # that nobody claims was lost by us on its way, and is nobody's fault.
        for record in load(log, self.state, clock(), refusal_of):
            self.rollouts.await_claim(record, WORKER_GRACE_S, EventKind.RETURN)
            if record.life.state is RolloutState.LEASED:
                self._leases.append((record, record.life.attempt))

    def _give_up_leases(self) -> None:
        """Gives up leases of the incarnation before that nobody has claimed when all workers are
        back.
        """
        if self._leases and self.workers.have_all_reconnected(self._claim_grace_s):
            leases, self._leases = self._leases, []
            for record, attempt in leases:
                current = record.life.state is RolloutState.LEASED
                if current and record.life.attempt == attempt and not record.holders:
                    self.rollouts.cap_wait(record, 0.0, EventKind.RETURN)

    def run(self, run_id: str) -> RunRecord:
        run = self.find_run(run_id)
        if run is None:
            raise NotFoundError(f"unknown run {run_id!r}; make it first, or see `prorl show`")
        return run

    def find_run(self, run_id: str) -> RunRecord | None:
        """Returns a run from memory or from the log. Raises ConflictError for one that this prorl
        cannot read.
        """
        run = find_run(self.log, self.state, run_id)
        if (reason := self.state.refused.get(run_id)) is not None:
            raise ConflictError(f"run {run_id!r} is not served: {reason}")
        return run

    def group(self, run_id: str, group_id: int) -> GroupRecord:
        run = self.run(run_id)
        group = self.groups.find(run, group_id) if 0 <= group_id < run.accepted.next_group else None
        if group is None:
            raise NotFoundError(f"run {run_id!r} has no group {group_id}")
        return self._keep_open(group)

    def _keep_open(self, group: GroupRecord) -> GroupRecord:
        """Keep the group in memory until nothing of it can change, where something still can."""
        if group.is_open and group.group_id not in group.run.groups:
            group.run.add(group)
            self.changes.evict_when_idle(group)
        return group

    def rollout(self, run_id: str, rollout_id: int) -> RolloutRecord:
        run = self.run(run_id)
        exists = 0 <= rollout_id < run.accepted.next_rollout
        record = run.rollouts.get(rollout_id) if exists else None
        record = record or (load_rollout(self.log, run, rollout_id) if exists else None)
        if record is None:
            raise NotFoundError(f"run {run_id!r} has no rollout {rollout_id}")
        self._keep_open(record.group)
        return record

    # ---- requests of clients

    def create_run(self, config: RunConfig) -> bool:
        """Accept a run; False when it was there. Raises ConflictError, UserError."""
        if not config.backends and not self.state.balancer.states:
            hint = (
                "name `backends` in the run, in the service's config, or add one: POST /v1/backends"
            )
            raise UserError(
                f"run {config.run_id!r} has no backend to sample from", "at least one backend", hint
            )
        return self.acceptance.run(config)

    def cancel_run(self, run: RunRecord) -> None:
        """End everything that has not ended, bit by bit (`LeaseGrants.prune`). The run accepts no
        more groups.
        """
        if run.life.state == "open":
            self.rollouts.end_run(run)

    def fail_run(self, run: RunRecord, reason: str) -> None:
        """End a run of which nothing can be stored: whatever it has in hand is stopped."""
        for record in list(run.rollouts.values()):
            for worker in [worker for worker in record.holders if worker.is_store]:
                self.rollouts.remove_holder(record, worker, EventKind.RETURN)
        for group in list(run.groups.values()):
            self.cancel_group(group)
        self.runs.fail(run, reason)

    def cancel_group(self, group: GroupRecord) -> None:
        self.rollouts.cancel_group(group, FailureCode.CANCELLED)

    def cancel_rollout(self, record: RolloutRecord) -> None:
        self.rollouts.apply(record, Event(kind=EventKind.CANCEL, code=FailureCode.CANCELLED))

    def set_backend(self, name: str, state: str) -> None:
        """Put a backend into the pool (`ready`), drain it (`draining`), take it out (`removed`)."""
        balancer = self.state.balancer
        match state:
            case "ready":
                balancer.add(name)
            case "draining":
                balancer.drain(name)
            case _:
                balancer.remove(name)
        self.changes.insert(sql.UPSERT_BACKEND, (name, state, self._wall()))

    # ---- what workers say

    def control(self, worker: WorkerRecord, row: ControlRow) -> None:
        """Handle a row of a worker's control stream, after its hello. Raises UserError for a row
        that no worker sends.
        """
        self.workers.note_seen(worker)
        match row.kind:
            case Kind.STARTED | Kind.PROGRESS | Kind.FAILED | Kind.RELEASED:
                self._event(worker, row)
            case Kind.LEAVING:
                self.workers.note_leaving(worker)
            case Kind.STATS:
                stats = row.read(Stats)
                self.watched.served(self.workers.report(worker, row.stage, stats), stats)
            case Kind.RESERVE:
                reserved = self.commits.reserve(worker, row.read(Reserve).attempts)
                self._reply(worker, row, reserved)
            case Kind.FAILOVER:
                self.failovers.ask(worker, row)
            case kind if kind in REQUESTS:
                self._request(worker, row)
            case _:
                raise UserError(f"a worker said {row.kind.value!r}", "an event or a request")

    def _event(self, worker: WorkerRecord, row: ControlRow) -> None:
        record = self.rollouts.find(row.run_id, row.rollout_id)
        if record is None:
            current = False
        elif row.kind is Kind.STARTED:
            current = self.rollouts.started(worker, record, row.attempt, row.stage)
        elif row.kind is Kind.FAILED:
            failure = row.read(Failed)
            self.rollouts.failed(
                record, row.attempt, row.code, failure.message, failure.num_sampled
            )
            self._end_too_long(record)
            return
        elif row.kind is Kind.RELEASED:
            self.rollouts.released(worker, record, row.attempt)
            return
        else:
            tokens = row.read(Progress).tokens
            current = self.rollouts.progressed(record, row.attempt, tokens)
        if not current:
            self.rollouts.stop(worker, row.key)

    def _end_too_long(self, record: RolloutRecord) -> None:
        """End a run with a prompt that cannot fit: a dataset with one has more of them, and its
        limits are to be changed before it is sampled.
        """
        is_too_long = record.life.code is FailureCode.PROMPT_TOO_LONG
        if is_too_long and not (record.run.config.skip_invalid or record.run.life.cancelled):
            self.rollouts.end_run(
                record.run,
                f"task {record.group.task_id!r}: {record.message}, or leave out such tasks with"
                " skip_invalid (`prorl run --skip-invalid`)",
            )

    def _reply(
        self, worker: WorkerRecord, row: ControlRow, answer: Payload, code: str = ""
    ) -> None:
        self.changes.send(worker, ControlRow.of(answer, re=row.seq, run_id=row.run_id, code=code))
        self.changes.urgent = True

    def _request(self, worker: WorkerRecord, row: ControlRow) -> None:
        run = find_run(self.log, self.state, row.run_id)
        if run is None:
            problem = Problem(message=f"unknown run {row.run_id!r}")
            self._reply(worker, row, problem, "not_found")
            return
        try:
            answer = self._answer(run, row)
        except ConflictError as error:
            self._reply(worker, row, Problem(message=str(error)), "conflict")
        else:
            self._reply(worker, row, answer, "fenced" if isinstance(answer, Problem) else "")
        self.commits.finish(run)

    def _answer(self, run: RunRecord, row: ControlRow) -> Payload:
        match row.kind:
            case Kind.COMMIT:
                return self.commits.commit(run, row.read(CommitPart))
            case Kind.PROPOSE:
                return self.groups.propose(run, row.read(Propose).decisions)
            case Kind.HANDOUT:
                return self.groups.handout(run, row.read(Handout).groups)
            case Kind.PUBLISHED:
                self.commits.published(run, row.read(PartPublished).commit_seq)
            case Kind.DISOWNED:
                self.fail_run(run, row.read(RunRejected).reason)
            case _:
                cursor = row.read(CommitCursor)
                self.groups.cursor(run, cursor.consumer, cursor.seq)
        return Done()

    # ---- time

    def pump(self, room: int, room_for: RoomFor = anywhere) -> None:
        """Give out what there is room for: backends to those that lost theirs, then leases."""
        self.failovers.serve()
        for run in self.state.open.values():
            self.datasets.fill(run, room)
        self.grants.pump(room, room_for)

    def sweep(self) -> None:
        """Do what only time decides: end attempts that no worker claimed, rollouts that waited too
        long, stragglers, and runs that have nothing left to do.
        """
        self._give_up_leases()
        self.rollouts.settle_orphans()
        self.workers.forget()
        self.workers.suspend_leases()
        now = self._clock()
        num_in_hand = sum(run.in_hand for run in self.state.open.values())
        for run in list(self.state.open.values()):
            self.rollouts.cancel_stragglers(run)
            self.grants.expire(run, now, num_in_hand)
            self.commits.finish(run)

    # ---- after a transaction

    def note_durable(self, batch: LogBatch) -> None:
        """Note that a transaction is on disk, and forget the groups and runs that need not stay in
        memory any more.
        """
        self.datasets.note_durable(batch)
        self.groups.note_durable(batch)
        for group in batch.settled:
            if not group.is_evictable or group.run.is_next(group):
                continue
            if self.changes.pending(group):
                self.changes.evict_when_idle(group)
            else:
                group.run.forget(group)
        if self.state.num_closed > KEPT_CLOSED:
            closed = [run for run in self.state.runs.values() if not run.has_work]
            for run in closed[:-KEPT_CLOSED]:
                if not self.changes.marks(run):
                    del self.state.runs[run.run_id]
