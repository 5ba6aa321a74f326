"""The store's side of a rollout's end: reserve, commit, published; and the end of a run.

A commit is one transaction of the log: the part, the rollouts it holds, the rows of ended rollouts,
tasks and group events that it stored. It is all or nothing and unique on (run, rollout): one
superseded attempt in it refuses the whole part.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from prorl.control import (
    CommitPart,
    Committed,
    CommittedRollout,
    Problem,
    Refusal,
    RefusalReason,
    Reserved,
)
from prorl.errors import ConflictError
from prorl.service.core.changes import Base, CorePart
from prorl.service.core.lifecycle import Event, EventKind
from prorl.service.core.recover import find_run, load_rollout
from prorl.service.core.rollouts import Rollouts
from prorl.service.core.runs import RunLifecycle
from prorl.service.core.sampler import reached
from prorl.service.core.state import IN_HAND, RolloutRecord, RunRecord, WorkerRecord
from prorl.service.log import log_schema as sql
from prorl.types import FAILURE_CLASS, UNSCORED, AttemptKey, FailureCode, RolloutState

FIRST_ROLLOUTS = 8
"""The number of first rollouts that end the run when none could be scored: enough to tell a reward
that always raises from one that sometimes does, few enough to waste little.
"""


def is_committed(record: RolloutRecord) -> bool:
    """Returns whether its current attempt is stored, with a reward or without."""
    life = record.life
    unscored = (
        life.state is RolloutState.FAILED and life.code in UNSCORED and bool(record.stored.part)
    )
    return life.state is RolloutState.COMPLETED or unscored


class Commits(CorePart):
    def __init__(self, base: Base, rollouts: Rollouts, runs: RunLifecycle) -> None:
        super().__init__(base)
        self._rollouts, self._runs = rollouts, runs

    def reserve(self, store: WorkerRecord, attempts: Iterable[AttemptKey]) -> Reserved:
        """Promise that these attempts will be committed if the store lives. A cancellation waits
        for it from here on.
        """
        granted: list[AttemptKey] = []
        refused: list[Refusal] = []
        for key in attempts:
            reason = self._reserve(store, key)
            if reason:
                refused.append(Refusal(key, reason))
            else:
                granted.append(key)
        return Reserved(granted=tuple(granted), refused=tuple(refused))

    def _reserve(self, store: WorkerRecord, key: AttemptKey) -> RefusalReason | None:
        record = self._find(key.run_id, key.rollout_id)
        if (
            record is None
            or record.life.attempt != key.attempt
            or record.run.life.state == "failed"
        ):
            return RefusalReason.FENCED
        if is_committed(record):
            return RefusalReason.COMMITTED
        if record.life.state is not RolloutState.RESERVED and not self._rollouts.apply(
            record, Event(kind=EventKind.RESERVE, attempt=key.attempt)
        ):
            return RefusalReason.FENCED
        self._rollouts.add_holder(record, store, "store")
        return None

    def _find(self, run_id: str, rollout_id: int) -> RolloutRecord | None:
        run = find_run(self._log, self._state, run_id)
        if run is None:
            return None
        return run.rollouts.get(rollout_id) or load_rollout(self._log, run, rollout_id)

    def commit(self, run: RunRecord, request: CommitPart) -> Committed | Problem:
        """Make a part's content count; `Problem` with what stands in the way, if anything does."""
        part = request.part
        commit_seq = self._commit_seq(run, part)
        if commit_seq is not None:
            return Committed(commit_seq=commit_seq)
        rows = [(self._find(run.run_id, row.rollout_id), row) for row in request.rollouts]
        ended = [
            (self._find(run.run_id, rollout_id), rollout_id) for rollout_id in request.terminals
        ]
        refused = self._refusals(run, rows, ended)
        if refused:
            return Problem(refused=tuple(refused))
        for record, row in rows:
            assert record is not None
            self._complete(record, row, part)
        self._end_unscored(run)
        for record, _ in ended:
            assert record is not None
            self._stored(record, part)
        self._changes.note_stored(run, request.outbox_upto)
        return Committed(commit_seq=self._insert(run, request))

    def _insert(self, run: RunRecord, request: CommitPart) -> int:
        run.commits.stored_bytes += sum(file.bytes for file in request.files)
        commit_seq = run.commits.parts[request.part] = run.commits.next_commit
        run.commits.next_commit += 1
        self._state.num_commits += 1
        files = msgspec.json.encode(request.files).decode()
        self._changes.insert(sql.INSERT_PART, (run.run_id, commit_seq, request.part, files, 0))
        self._changes.mark_run(run)
        return commit_seq

    def _commit_seq(self, run: RunRecord, part: str) -> int | None:
        if part in run.commits.parts:
            return run.commits.parts[part]
        rows = self._log.read(
            "SELECT commit_seq FROM parts WHERE run_id = ? AND part = ?", (run.run_id, part)
        )
        return rows[0][0] if rows else None

    def _refusals(
        self,
        run: RunRecord,
        rows: list[tuple[RolloutRecord | None, CommittedRollout]],
        ended: list[tuple[RolloutRecord | None, int]],
    ) -> list[Refusal]:
        refused: list[Refusal] = []
        for record, row in rows:
            key = AttemptKey(run.run_id, row.rollout_id, row.attempt)
            if record is None or record.key != key:
                refused.append(Refusal(key, RefusalReason.FENCED))
            elif is_committed(record):
                refused.append(Refusal(key, RefusalReason.COMMITTED))
            elif record.life.state not in IN_HAND:
                refused.append(Refusal(key, RefusalReason.FENCED))
            elif not (FAILURE_CLASS[row.failure_code].trains or row.failure_code in UNSCORED):
                refused.append(Refusal(key, RefusalReason.FAILED))
        for record, rollout_id in ended:
            key = record.key if record else AttemptKey(run.run_id, rollout_id, -1)
            if record is None or not record.life.state.terminal:
                refused.append(Refusal(key, RefusalReason.OPEN))
            elif record.stored.part:
                refused.append(Refusal(key, RefusalReason.COMMITTED))
        return refused

    def _complete(self, record: RolloutRecord, row: CommittedRollout, part: str) -> None:
        run, attempt = record.run, record.life.attempt
        if record.life.state is not RolloutState.RESERVED:
            # A gateway that restarted, or a store that came back, finds the attempt unreserved but
            # still current.
            self._rollouts.apply(record, Event(kind=EventKind.RESERVE, attempt=attempt))
        record.stored.reward, record.stored.summary = row.reward, row.summary
        if record.stored.reward is not None:
            run.commits.reward_sum += record.stored.reward
            run.commits.num_rewards += 1
        self._stored(record, part)
        self._rollouts.apply(
            record,
            Event(kind=EventKind.COMMIT, attempt=attempt, code=row.failure_code),
            row.failure_message if row.failure_code in UNSCORED else "",
        )
        if row.failure_code is FailureCode.GRADER_ERROR:
            run.commits.unscored = run.commits.unscored or "\n".join(
                filter(None, (record.message, row.trace))
            )

    def _end_unscored(self, run: RunRecord) -> None:
        """End a run whose grader has failed for all of its first rollouts: a reward that always
        raises would have every other one sampled in vain.
        """
        code, count, _ = run.progress.failure_streak
        never = not run.progress.states[RolloutState.COMPLETED]
        if code is FailureCode.GRADER_ERROR and count >= FIRST_ROLLOUTS and never:
            self._rollouts.end_run(
                run,
                f"its reward failed for each of its first {count} rollouts; expected a number;"
                f" `prorl check` tries a reward; the first: {run.commits.unscored}",
            )

    def _stored(self, record: RolloutRecord, part: str) -> None:
        record.stored.part = part
        record.run.commits.num_rows += 1
        self._changes.mark_rollout(record)
        if record.group.settled:
            self._changes.evict_when_idle(record.group)

    def published(self, run: RunRecord, commit_seq: int) -> None:
        """Note that commits/<seq>.json is on disk. Raises ConflictError for a commit that the log
        does not know.
        """
        if not 1 <= commit_seq < run.commits.next_commit:
            raise ConflictError(
                f"commit {commit_seq} of run {run.run_id}", f"1 to {run.commits.next_commit - 1}"
            )
        self._changes.insert(sql.PUBLISH_PART, (1, run.run_id, commit_seq))
        self._changes.mark_run(run)
        run.commits.parts = {
            part: seq for part, seq in run.commits.parts.items() if seq != commit_seq
        }

    def finish(self, run: RunRecord) -> bool:
        """End a run that has nothing left to do; whether it ended just now."""
        no_more = (run.life.last and not run.feeds) or run.life.cancelled or reached(run.demand)
        stored = not run.unstored and not run.commits.parts and run.outbox.stored >= run.outbox.end
        if run.life.state != "open" or not no_more or run.undecided or not stored:
            return False
        self._runs.finish(run)
        return True
