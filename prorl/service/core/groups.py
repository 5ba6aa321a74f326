"""The life of a group after its members have ended: decisions, hand-out, cursors.

Everything here is an event of the group's table (`lifecycle.GROUP_TABLE`); a repeated request gets
what the log holds. `delivery_seq` is dense per run, given in the order in which the store asks
(oldest span version first), and never changes.
"""

from __future__ import annotations

from collections.abc import Iterable

from prorl.control import (
    Decision,
    Delivered,
    Done,
    GroupEventRow,
    HandedOut,
    KeptGroup,
    Kind,
    Rows,
)
from prorl.errors import ConflictError
from prorl.service.core.changes import Base, CorePart, LogBatch
from prorl.service.core.lifecycle import GroupEvent, group_step
from prorl.service.core.recover import load_group
from prorl.service.core.rollouts import Rollouts
from prorl.service.core.sampler import full, reached, step_reached
from prorl.service.core.state import GroupRecord, RunRecord
from prorl.service.log import log_schema as sql
from prorl.types import FailureCode, GroupState, RolloutState

FOLLOWS = 0.1
"""The weight of one more group in how long groups take, and are waited for."""

MOST_REASONS, REASON_CHARS = 16, 80
"""The limits of a filter, which may be anybody's SQL: more reasons are one, longer ones are cut."""


class Groups(CorePart):
    def __init__(self, base: Base, rollouts: Rollouts) -> None:
        super().__init__(base)
        self._rollouts = rollouts

    def find(self, run: RunRecord, group_id: int) -> GroupRecord | None:
        return run.groups.get(group_id) or load_group(self._log, run, group_id)

    def propose(self, run: RunRecord, decisions: Iterable[Decision]) -> Done:
        """Decide complete groups, each by the first that is proposed; the outbox tells which."""
        for decision in decisions:
            group = self.find(run, decision.group_id)
            if group is not None and group.is_open and group.members.pending == 0:
                self._decide(group, decision)
        self._end_redundant(run)
        return Done()

    def _decide(self, group: GroupRecord, decision: Decision) -> None:
        run = group.run
        self._note(group, decision.kept)
        kept, group.decision.reason = decision.kept, decision.reason
        if kept and not any(r.life.state is RolloutState.COMPLETED for r in group.rollouts):
            kept, group.decision.reason = False, "incomplete"
        if kept and full(run.demand):
            kept, group.decision.reason = False, "redundant"
            run.effort.waste(group.n)
        group.decision.num_valid, group.decision.mean_reward = (
            decision.num_valid,
            decision.mean_reward,
        )
        group.decision.min_version = decision.min_version
        self._step(group, GroupEvent.KEEP if kept else GroupEvent.DROP)
        if kept:
            run.delivery.kept += 1
            run.delivery.waiting += 1
        else:
            self._note_dropped(run, group.decision.reason)
        self._changes.insert(sql.DECIDED, (run.run_id, group.group_id))
        if run.config.epochs and (decision.rest or decision.siblings):
            epoch, _, key = group.key.partition("/")
            resting, siblings = int(epoch) + 1 + decision.rest, decision.siblings or None
            self._changes.insert(sql.CURATE_TASK, (resting, siblings, run.run_id, key))
            run.decisions.curating += 1
        self._event(group, "decided", kept)

    @staticmethod
    def _note_dropped(run: RunRecord, reason: str) -> None:
        reasons = run.decisions.drop_reasons
        is_full = len(reasons) >= MOST_REASONS and reason not in reasons
        run.decisions.drop_reasons["other" if is_full else reason[:REASON_CHARS]] += 1

    def note_durable(self, batch: LogBatch) -> None:
        """Notes that the filter's verdicts on tasks are on disk."""
        for _, _, run_id, _ in dict(batch.writes).get(sql.CURATE_TASK, ()):
            self._state.runs[run_id].decisions.curating -= 1

    def _note(self, group: GroupRecord, kept: bool) -> None:
        """Tells the forecast of a decision; of none where we ended the group ourselves."""
        run, now = group.run, self._clock()
        ended = any(r.life.state is RolloutState.CANCELLED for r in group.rollouts)
        if ended and not group.members.cut:
            return
        run.pace.rate = run.pace.rate.after(kept)
        if group.members.opened_at:
            run.pace.group_s = _mean(run.pace.group_s, now - group.members.opened_at)

    def handout(self, run: RunRecord, requested: Iterable[KeptGroup]) -> HandedOut:
        """Give kept groups their place in the delivery order, as asked. Those that are too old go
        stale instead.
        """
        delivered: list[Delivered] = []
        before = run.delivery.next_delivery
        stale: list[int] = []
        for request in requested:
            group = self.find(run, request.group_id)
            if group is None:
                continue
            if group.decision.state is GroupState.KEPT:
                self._hand(group, request.min_version)
            if group.decision.state is GroupState.STALE:
                stale.append(group.group_id)
            elif group.decision.delivery_seq >= 0:
                delivered.append(Delivered(group.group_id, group.decision.delivery_seq))
        if num_handed := run.delivery.next_delivery - before:
            now = self._clock()
            run.effort.hand_out(num_handed, now)
            if run.pace.last_handout_at:
                run.pace.handout_interval_s = _mean(
                    run.pace.handout_interval_s, (now - run.pace.last_handout_at) / num_handed
                )
            run.pace.last_handout_at = now
        self._end_redundant(run)
        return HandedOut(delivered=tuple(delivered), stale=tuple(stale))

    def _hand(self, group: GroupRecord, min_version: int) -> None:
        run = group.run
        oldest = min_version if min_version >= 0 else group.decision.min_version
        allowed = run.config.max_staleness
        run.delivery.waiting -= 1
        if allowed >= 0 and oldest >= 0 and run.weights.version - oldest > allowed:
            run.delivery.kept -= 1
            run.effort.waste(group.n)
            self._step(group, GroupEvent.EXPIRE)
            self._event(group, "stale", True)
            return
        group.decision.delivery_seq = run.delivery.next_delivery
        run.delivery.next_delivery += 1
        self._step(group, GroupEvent.DELIVER)
        self._event(group, "delivered", True)

    def cursor(self, run: RunRecord, consumer: str, seq: int) -> None:
        """Everything below `seq` is trained and durable. A late or repeated commit of less changes
        nothing (a trainer that was rolled back reads by the cursor of its checkpoint). Raises
        ConflictError.
        """
        if not 0 <= seq <= run.delivery.next_delivery:
            raise ConflictError(
                f"cursor {run.run_id}@{seq}",
                f"at most {run.delivery.next_delivery}, where run {run.run_id} is",
                "is this another run's cursor?",
            )
        if seq < run.delivery.cursors.get(consumer, 0):
            return
        run.delivery.cursors[consumer] = seq
        self._changes.mark_run(run)
        self._changes.insert(sql.UPSERT_CURSOR, (run.run_id, consumer, seq, self._wall()))
        if consumer == "primary" and seq > run.delivery.committed:
            self._commit(run, run.delivery.committed, seq)

    def note_trained(self, run: RunRecord, seq: int) -> None:
        """Note that the run's newest weights were trained on every group below `seq`.

        A trainer says so with each publication, which may come more often than its commits; one
        that resumes from an older checkpoint says less than before. Raises ConflictError.
        """
        if not 0 <= seq <= run.delivery.next_delivery:
            raise ConflictError(
                f"weights of run {run.run_id!r} trained up to {seq}",
                f"at most {run.delivery.next_delivery}, the number of delivered groups",
            )
        if seq > run.delivery.trained:
            self._rollouts.stepped(run, seq - run.delivery.trained)
        run.delivery.trained = max(seq, run.delivery.committed)
        self._changes.mark_run(run)

    def _commit(self, run: RunRecord, first: int, end: int) -> None:
        run.delivery.committed = end
        if end > run.delivery.trained:
            self.note_trained(run, end)
        run.decisions.states[GroupState.DELIVERED] -= end - first
        run.decisions.states[GroupState.COMMITTED] += end - first
        self._changes.insert(sql.COMMIT_GROUPS, (run.run_id, first, end))
        for group in run.groups.values():
            if first <= group.decision.delivery_seq < end:
                group.decision.state = group_step(group.decision.state, GroupEvent.COMMIT)
                self._changes.mark_group(group)

    def _end_redundant(self, run: RunRecord) -> None:
        """End groups that are started and not decided, if the run, or its step, has enough. The
        run's pool ends bit by bit (`LeaseGrants.prune`).
        """
        demand = run.demand
        if reached(demand):
            self._rollouts.end_groups(run, FailureCode.REDUNDANT)
        elif step_reached(demand):
            self._rollouts.end_started_groups(run, FailureCode.REDUNDANT)

    def _step(self, group: GroupRecord, event: GroupEvent) -> None:
        run = group.run
        if not group.is_open:
            run.decisions.states[group.decision.state] -= 1
        group.decision.state = group_step(group.decision.state, event)
        run.decisions.states[group.decision.state] += 1
        if group.group_id not in group.run.groups:
            group.run.add(group)  # until this is durable the log would give back what it was
        self._changes.mark_group(group)
        if group.settled:
            self._changes.evict_when_idle(group)

    def _event(self, group: GroupRecord, event: str, kept: bool) -> None:
        run = group.run
        row = GroupEventRow(
            event_seq=run.decisions.next_event,
            group_id=group.group_id,
            event=event,
            kept=kept,
            reason=group.decision.reason,
            delivery_seq=group.decision.delivery_seq,
            num_members=group.n,
            num_valid=group.decision.num_valid,
            min_version=group.decision.min_version,
            mean_reward=group.decision.mean_reward,
            event_at=int(self._wall() * 1e6),
        )
        run.decisions.next_event += 1
        self._changes.append_outbox(run, Kind.ROWS, group.group_id, Rows(events=(row,)))


def _mean(before: float, sample: float) -> float:
    """A running mean of seconds; 0 before the first, and never after it."""
    return max(1e-3, before + FOLLOWS * (sample - before) if before else sample)
