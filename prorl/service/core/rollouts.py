"""The only code that changes a rollout's state: events in, the lifecycle's actions out.

It also keeps which workers hold an attempt. A chain of stages holds it from its lease on; a stage
in a process of its own becomes a holder when it starts, the store when it reserves. An attempt
without a holder ends, at once or after a grace (`_orphans`), in one of two ways:

    LOST     its worker died on this host: the rollout is charged (`worker_losses`)
    RETURN   nobody is charged: its worker left in order, or was ended while it left; or the stream
             of another host ended, which may be the line or the host, unless the worker's next
             incarnation on that node says that the process has died
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple
from zlib import crc32

from prorl.control import (
    AttemptRow,
    Cancel,
    ControlRow,
    GroupComplete,
    Kind,
    Rows,
    Terminal,
)
from prorl.filters import GroupMember, find_filter
from prorl.service.core.changes import Base, CorePart
from prorl.service.core.lifecycle import Action, Event, EventKind, step
from prorl.service.core.node_links import NodeLinks
from prorl.service.core.observed import Observed, Phase
from prorl.service.core.runs import RunLifecycle
from prorl.service.core.sampler import LATE
from prorl.service.core.state import (
    IN_HAND,
    GroupRecord,
    RolloutRecord,
    RunRecord,
    WorkerRecord,
)
from prorl.types import FAILURE_CLASS, AttemptKey, FailureCode, RolloutState, Stage

END_BATCH = 250
"""Rollouts that are ended in one go: a run that is cancelled, or has enough, may have ten thousand
in hand, and no step of the loop may cost by that.
"""

_TERMINAL = frozenset(state for state in RolloutState if state.terminal)

_PHASES = {
    RolloutState.QUEUED: Phase.QUEUE,
    RolloutState.LEASED: Phase.INIT,
    RolloutState.RUNNING: Phase.RUN,
    RolloutState.RESERVED: Phase.STORE,
}

MAX_MESSAGE = 2000
"""Characters of a failure's text that the log keeps."""

FIRST_RETRY_S, LAST_RETRY_S = 0.25, 4.0
"""Wait before an attempt that infrastructure failed is tried again: doubled each time, with jitter.
"""

_END_TEXTS = {
    EventKind.LOST: "no worker has it any more",
    EventKind.RETURN: "its worker left or ended, and it begins anew",
}


class Orphan(NamedTuple):
    """An attempt of which no holder is known."""

    attempt: int
    until: float
    """The time when it will be certain, on the loop's clock."""
    end: EventKind
    disconnected: WorkerRecord | None = None
    """The worker of another host whose stream ended: its connection was cut, or its host died."""


_NO_ORPHAN = Orphan(-1, 0.0, EventKind.LOST)


class Rollouts(CorePart):
    def __init__(self, base: Base, runs: RunLifecycle) -> None:
        super().__init__(base)
        self._runs = runs
        self.node_links = NodeLinks(base.clock)
        self.observed = Observed()
        self._orphans: dict[RolloutRecord, Orphan] = {}

    def find(self, run_id: str, rollout_id: int) -> RolloutRecord | None:
        run = self._state.runs.get(run_id)
        return run.rollouts.get(rollout_id) if run else None

    def apply(self, record: RolloutRecord, event: Event, message: str = "") -> bool:
        before = record.life
        life, actions = step(before, event)
        if life is not before:
            if event.kind is not EventKind.COMMIT and _began(record) and life.state not in IN_HAND:
                self._append_attempt_row(record, event, message)
            record.life = life
            if message:
                record.message = message[:MAX_MESSAGE]
            fails = event.kind in (EventKind.FAILED, EventKind.COMMIT)
            fails = fails and not FAILURE_CLASS[event.code].trains
            if fails or event.kind is EventKind.LOST:
                self.observed.failures[life.code] += 1
            if fails:
                code, count, first_message = record.run.progress.failure_streak
                same = event.code is code
                record.run.progress.failure_streak = (
                    event.code,
                    count * same + 1,
                    first_message if same else message,
                )
            if life.state is not before.state:
                self._leave_phase(record, _PHASES[before.state])
                self._count(record.run, before.state, -1)
                self._count(record.run, life.state, 1)
                if life.state in _TERMINAL:
                    record.group.members.pending -= 1
            self._changes.mark_rollout(record)
        failed_again = life.infra_failures > before.infra_failures
        retry_s = _retry_delay_s(record) if failed_again else 0.0
        if life.state is RolloutState.COMPLETED and life is not before:
            record.run.progress.failure_streak = (FailureCode.NONE, 0, "")
            for worker in record.holders:
                self.node_links.note_delivery(worker)
        for action in actions:
            self._carry_out(record, action, retry_s)
        return Action.FENCE not in actions

    @staticmethod
    def _count(run: RunRecord, state: RolloutState, change: int) -> None:
        if state is not RolloutState.QUEUED:
            run.progress.states[state] += change

    def _append_attempt_row(self, record: RolloutRecord, event: Event, message: str) -> None:
        """Write a row of `attempts`: the current attempt ends without a row in `rollouts`."""
        code = _END_CODES.get(event.kind) or event.code or record.life.cancel_code
        record.run.progress.failed_attempts[code, record.node] += 1
        row = AttemptRow(
            rollout_id=record.rollout_id,
            group_id=record.group.group_id,
            attempt=record.life.attempt,
            stage=record.stage,
            worker=record.worker,
            node=record.node,
            server=record.backend,
            failure_class=FAILURE_CLASS[code],
            failure_code=code,
            failure_message=message[:MAX_MESSAGE],
            seconds=max(0.0, self._clock() - record.since),
            num_sampled=record.num_sampled,
            ended_at=int(self._wall() * 1e6),
        )
        self._changes.append_outbox(
            record.run, Kind.ROWS, record.group.group_id, Rows(attempts=(row,))
        )

    def _leave_phase(self, record: RolloutRecord, phase: Phase) -> None:
        now = self._clock()
        if phase is Phase.RUN and record.stage == Stage.EVAL:
            phase = Phase.EVAL
        # What began before this gateway did is not known.
        if began := record.entered or record.since:
            self.observed.add_phase(phase, now - began)
            if phase in (Phase.RUN, Phase.EVAL):
                good = record.life.state in (RolloutState.RESERVED, RolloutState.RUNNING)
                record.run.effort.ended(now - began, good)
        record.entered = now

    def stepped(self, run: RunRecord, groups: int) -> None:
        runs = self._state.of_role("run")
        stats = [worker.status.stats["run"] for worker in runs if "run" in worker.status.stats]
        busy_s, slots = sum(load.busy_s for load in stats), sum(load.slots for load in stats)
        run.effort.committed(groups, self._clock(), busy_s, slots)

    def _carry_out(self, record: RolloutRecord, action: Action, retry_s: float = 0.0) -> None:
        match action:
            case Action.GRANT:
                record.lease_confirmed = False
                record.stage = record.worker = record.node = ""
                record.num_sampled = 0
                record.since = self._clock()
                self._changes.grant(record)
            case Action.REQUEUE:
                record.since = self._clock()
                record.group.run.queues.queue_again(record, record.since, retry_s)
            case Action.CANCEL_ATTEMPT:
                for worker in record.holders:
                    self.stop(worker, record.key)
            case Action.RELEASE:
                self._state.balancer.release(record)
                for worker in record.holders:
                    worker.in_flight.discard(record)
                record.holders.clear()
            case Action.STORE_TERMINAL:
                self._changes.append_outbox(
                    record.run,
                    Kind.TERMINAL,
                    record.group.group_id,
                    _terminal(record, self._wall()),
                )
            case Action.CHECK_GROUP:
                self._check_group(record.group)
            case Action.FENCE:
                pass

    def _check_group(self, group: GroupRecord) -> None:
        """Tell the store that the group is complete, now that a member has ended; or end the other
        members where they cannot change what becomes of the group.
        """
        if group.members.pending == 0:
            self.start_group(group)
            row = GroupComplete(
                group_id=group.group_id,
                task_id=group.task_id,
                members=tuple(map(member, group.rollouts)),
            )
            self._changes.append_outbox(group.run, Kind.GROUP_COMPLETE, group.group_id, row)
        elif not group.members.cut:
            valid = [m.reward for m in map(member, group.rollouts) if m.valid]
            rewards = [reward for reward in valid if reward is not None]
            group.members.differs = len(set(rewards)) > 1
            if find_filter(group.run.config.filter).cannot_be_kept(rewards, group.members.pending):
                self._cut(group, FailureCode.REDUNDANT)

    def _cut(self, group: GroupRecord, code: FailureCode) -> None:
        group.members.cut = True
        self.cancel_group(group, code)
        self._changes.urgent = True

    def cancel_stragglers(self, run: RunRecord) -> None:
        """End the last rollouts of groups that have enough valid ones (`early_stop_valid`) and have
        waited `straggler_grace_s` for the rest. Also counts the groups that are late, without those
        whose members differ already: they will be kept.
        """
        now, enough = self._clock(), run.config.early_stop_valid
        began, before = now - LATE * run.pace.group_s, now - run.config.straggler_grace_s
        started = [g for g in run.groups.values() if g.members.opened and g.is_open]
        late = (group.members.opened_at < began and not group.members.differs for group in started)
        run.progress.late_groups = sum(late) if run.pace.group_s else 0
        for group in started if enough else ():
            if (
                group.members.pending == 0
                or group.members.cut
                or group.n - group.members.pending < enough
            ):
                continue
            ended = sorted(max(r.entered, r.since) for r in group.rollouts if member(r).valid)
            if len(ended) >= enough and ended[enough - 1] <= before:
                self._cut(group, FailureCode.STRAGGLER)

    def start_group(self, group: GroupRecord) -> None:
        """The group leaves the pool. One that ended before it was started counts as started, too:
        it waits for its decision.
        """
        if not group.members.opened:
            group.members.opened = True
            group.members.opened_at = self._clock() if group.members.pending else 0.0
            group.run.progress.num_started += 1
            self._changes.mark_group(group)

    def stop(self, worker: WorkerRecord, key: AttemptKey) -> None:
        self._changes.send(worker, ControlRow.of(Cancel(), **key._asdict()))
        self._changes.urgent = True

    # ---- the end of what was started, bit by bit

    def end_run(self, run: RunRecord, problem: str = "") -> None:
        """End everything of a run that has not ended; it takes nothing more. `problem`: why, where
        nobody asked for it.
        """
        self._runs.cancel(run, problem)
        run.queues.forget_endings()  # what was redundant is cancelled from here on
        self.end_groups(run, FailureCode.CANCELLED)

    def end_groups(self, run: RunRecord, code: FailureCode) -> None:
        """End every group of the run that is in memory and open. A piece now, the rest by
        `end_more`; until then the run is given no lease.
        """
        self._end_groups(run, code, run.groups.values())

    def end_started_groups(self, run: RunRecord, code: FailureCode) -> None:
        """Ends groups as `end_groups` does, but those that wait in the pool stay there."""
        self._end_groups(run, code, (g for g in run.groups.values() if g.members.opened))

    def _end_groups(self, run: RunRecord, code: FailureCode, groups: Iterable[GroupRecord]) -> None:
        if not run.queues.ending:
            run.queues.end([group for group in groups if group.is_open], code)
            self.end_more(run, END_BATCH)

    def end_more(self, run: RunRecord, room: int) -> int:
        """End up to `room` rollouts, and the rest of their group. Returns the remaining room."""
        while run.queues.ending and room > 0:
            group, code = run.queues.next_ending()
            room -= self.cancel_group(group, code)
        return room

    def cancel_group(self, group: GroupRecord, code: FailureCode) -> int:
        living = [rollout for rollout in group.rollouts if not rollout.life.state.terminal]
        for rollout in living:
            self.apply(rollout, Event(kind=EventKind.CANCEL, code=code))
        return len(living)

    # ---- holders

    def add_holder(self, record: RolloutRecord, worker: WorkerRecord, stage: str) -> None:
        """Make the worker a holder of the current attempt, which is in this stage there."""
        record.holders.add(worker)
        worker.in_flight.add(record)
        if not worker.is_store:
            record.stage = stage
            record.worker, record.node = worker.name, worker.node
        if record.life.state is not RolloutState.RESERVED or worker.is_store:
            self._orphans.pop(record, None)

    def remove_holder(
        self,
        record: RolloutRecord,
        worker: WorkerRecord,
        end: EventKind = EventKind.LOST,
        grace_s: float = 0.0,
    ) -> None:
        """Note that the worker is no holder any more. Without any holder the attempt ends by `end`
        (LOST or RETURN): at once, or unless a worker claims it within `grace_s`.
        """
        record.holders.discard(worker)
        worker.in_flight.discard(record)
        self.unreserve(record)
        if record.holders or record.life.state not in IN_HAND:
            return
        disconnected = (
            worker
            if worker.remote and end is EventKind.RETURN and not worker.status.leaving
            else None
        )
        end = EventKind.RETURN if worker.status.leaving else end
        if grace_s:
            self._wait_until(record, self._latest(record, grace_s), end, disconnected)
        else:
            self.lost(record, end)

    def await_claim(self, record: RolloutRecord, grace_s: float, end: EventKind) -> None:
        """Wait at least `grace_s` until a worker claims an attempt whose holders are not known;
        without a claim it ends by `end`.
        """
        self._wait_until(record, self._latest(record, grace_s), end)

    def cap_wait(self, record: RolloutRecord, grace_s: float, end: EventKind) -> None:
        """Waits as `await_claim` does, but at most `grace_s`, whatever it was to wait before."""
        self._wait_until(record, self._clock() + grace_s, end)

    def _latest(self, record: RolloutRecord, grace_s: float) -> float:
        return max(self._orphan(record).until, self._clock() + grace_s)

    def _wait_until(
        self,
        record: RolloutRecord,
        until: float,
        end: EventKind,
        disconnected: WorkerRecord | None = None,
    ) -> None:
        earlier = self._orphan(record)
        end = EventKind.RETURN if earlier.end is EventKind.RETURN else end
        self._orphans[record] = Orphan(
            record.life.attempt, until, end, disconnected or earlier.disconnected
        )

    def _orphan(self, record: RolloutRecord) -> Orphan:
        """Returns what is known of the current attempt as an orphan."""
        orphan = self._orphans.get(record, _NO_ORPHAN)
        return orphan if orphan.attempt == record.life.attempt else _NO_ORPHAN

    def lost(self, record: RolloutRecord, end: EventKind = EventKind.LOST) -> None:
        """End the current attempt, which has no holder, by `end`; by RETURN where it was waited for
        as returned.
        """
        returned = self._orphan(record).end is EventKind.RETURN
        self.end_unheld(record, EventKind.RETURN if returned else end)

    def end_unheld(self, record: RolloutRecord, end: EventKind) -> None:
        """End the current attempt by `end`, whatever was waited for, if it has no holder."""
        self.unreserve(record)
        if not record.holders:
            self.apply(record, Event(kind=end, attempt=record.life.attempt), _END_TEXTS[end])

    def unreserve(self, record: RolloutRecord) -> None:
        """End the reservation of an attempt that no store holds any more."""
        if record.life.state is RolloutState.RESERVED and not any(
            worker.is_store for worker in record.holders
        ):
            self.apply(record, Event(kind=EventKind.UNRESERVE, attempt=record.life.attempt))

    def settle_returned(self) -> None:
        """Queue at once what was given back, since the gateway stops: its next incarnation would
        wait for claims, as the log does not say that an attempt was given back.
        """
        for record, orphan in list(self._orphans.items()):
            current = orphan.attempt == record.life.attempt and record.life.state in IN_HAND
            if orphan.end is EventKind.RETURN and current and not record.holders:
                del self._orphans[record]
                self.lost(record, EventKind.RETURN)

    def settle_orphans(self) -> None:
        now = self._clock()
        due = [record for record, orphan in self._orphans.items() if orphan.until <= now]
        for record in due:
            orphan = self._orphans.pop(record)
            if record.life.attempt != orphan.attempt or record.life.state not in IN_HAND:
                continue
            living = [] if record.lease_confirmed else list(record.holders)
            for worker in living:
                self.stop(worker, record.key)
                record.holders.discard(worker)
                worker.in_flight.discard(record)
            if orphan.disconnected is not None and not living:
                self.node_links.note_break(orphan.disconnected)
            # Only the stream broke to a chain that lives: the lease never reached it.
            self.lost(record, EventKind.RETURN if living else orphan.end)

    # ---- where it goes

    def assign(self, record: RolloutRecord, backend: str) -> None:
        """Note that the rollout samples from this backend from now on."""
        if backend != record.backend:
            record.backend = backend
            self._changes.mark_rollout(record)

    def note_unplaced(self, record: RolloutRecord) -> None:
        """Note that no node that is there has what the queued rollout needs."""
        if record.unplaced_at is None:
            record.unplaced_at = self._clock()

    def note_placeable(self, record: RolloutRecord) -> None:
        """Note that a node has what the queued rollout needs."""
        record.unplaced_at = None

    # ---- what workers say

    def progressed(self, record: RolloutRecord, attempt: int, num_sampled: int) -> bool:
        """Count a turn that has ended. Returns False for an attempt that is not current."""
        record.run.progress.turns += 1
        if record.life.attempt != attempt or record.life.state.terminal:
            return False
        record.num_sampled = max(record.num_sampled, num_sampled)
        return True

    def started(
        self, worker: WorkerRecord, record: RolloutRecord, attempt: int, stage: str
    ) -> bool:
        if record.life.attempt != attempt or record.life.state not in IN_HAND:
            return False
        if stage == Stage.RUN and record.life.state is not RolloutState.RESERVED:
            self.apply(record, Event(kind=EventKind.STARTED_RUN, attempt=attempt))
        elif stage == Stage.EVAL and record.life.state is RolloutState.RUNNING:
            self._leave_phase(record, Phase.RUN)
        record.lease_confirmed = True
        self.add_holder(record, worker, stage)
        return True

    def failed(
        self, record: RolloutRecord, attempt: int, code: str, message: str, num_sampled: int = 0
    ) -> bool:
        failure = (
            FailureCode(code)
            if code in FailureCode._value2member_map_ and code
            else FailureCode.STAGE_ERROR
        )
        if record.life.attempt == attempt:
            blamed = failure in (FailureCode.BACKEND_UNAVAILABLE, FailureCode.BACKEND_PROTOCOL)
            record.failed_on = record.backend if blamed else ""
            record.num_sampled = max(record.num_sampled, num_sampled)
        return self.apply(
            record, Event(kind=EventKind.FAILED, attempt=attempt, code=failure), message
        )

    def released(self, worker: WorkerRecord, record: RolloutRecord, attempt: int) -> None:
        """Note that the worker has stopped its part of the attempt, and is no holder any more."""
        if record.life.attempt == attempt and worker in record.holders:
            self.remove_holder(record, worker)


_END_CODES = {EventKind.LOST: FailureCode.WORKER_LOST, EventKind.RETURN: FailureCode.RETURNED}


def _began(record: RolloutRecord) -> bool:
    """Returns whether a worker has, or had, its current attempt. A lease that was lost on its way
    never began.
    """
    state = record.life.state
    return state in IN_HAND and (
        state is not RolloutState.LEASED or record.lease_confirmed or bool(record.holders)
    )


def _retry_delay_s(record: RolloutRecord) -> float:
    """Returns the seconds until a rollout that infrastructure failed may be leased again.

    What broke needs time, and rollouts that failed together must not come back together: each has a
    jitter of its own, which follows from its key, so that the same events lead to the same times.
    """
    jitter = crc32(repr(record.key).encode()) / (1 << 32)
    longest = min(LAST_RETRY_S, FIRST_RETRY_S * 2.0 ** (record.life.infra_failures - 1))
    return longest * (0.5 + 0.5 * jitter)


def _terminal(record: RolloutRecord, wall: float) -> Terminal:
    group, life = record.group, record.life
    return Terminal(
        rollout_id=record.rollout_id,
        group_id=group.group_id,
        sample_index=record.sample_index,
        rollout_key=record.rollout_key,
        attempt=life.attempt,
        status=life.state,
        failure_class=life.failure_class,
        failure_code=life.code,
        failure_message=record.message,
        task_id=group.task_id,
        data_source=group.data_source,
        env=group.env,
        agent=group.run.config.agent,
        queue_s=max(0.0, wall - group.accepted_at),
        extra=group.extra,
        worker=record.worker,
        node=record.node,
        server=record.backend if life.attempt else "",
    )


def member(record: RolloutRecord) -> GroupMember:
    """Returns the state of a rollout as a member of its group, by which the store decides."""
    life = record.life
    return GroupMember(
        rollout_id=record.rollout_id,
        sample_index=record.sample_index,
        attempt=life.attempt,
        state=life.state,
        failure_class=life.failure_class,
        reward=record.stored.reward if life.state is RolloutState.COMPLETED else None,
        num_trained=record.stored.summary.num_trained,
    )
