"""The store's side of a rollout's end: reserve, commit, published; and the end of a run.

A commit is one transaction of the log: the part, the rollouts it holds, the rows of ended rollouts,
tasks and group events that it stored. It is all or nothing and unique on (run, rollout): one
superseded attempt in it refuses the whole part.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson

from prorl.control import ControlRow, Kind
from prorl.errors import ConflictError
from prorl.limits import Clock
from prorl.service import log_schema as sql
from prorl.service.journal import Journal
from prorl.service.lifecycle import Event, EventKind
from prorl.service.log import ControlLog
from prorl.service.recover import load_rollout
from prorl.service.rollouts import IN_HAND, Rollouts
from prorl.service.sampler import reached
from prorl.service.state import RolloutRecord, RunRecord, State, WorkerRecord
from prorl.types import FAILURE_CLASS, FailureClass, FailureCode, Json, RolloutState

Refused = list[list[Any]]


class Commits:
    """What the store may write, and what it has written."""

    def __init__(
        self, log: ControlLog, state: State, journal: Journal, rollouts: Rollouts, wall: Clock
    ) -> None:
        self._log, self._state, self._journal, self._rollouts, self._wall = (
            log,
            state,
            journal,
            rollouts,
            wall,
        )

    def reserve(self, store: WorkerRecord, attempts: Iterable[tuple[str, int, int]]) -> Json:
        """Promise that these attempts will be committed if the store lives; a cancellation waits
        for it from here on.
        """
        granted, refused = [], []
        for run_id, rollout_id, attempt in attempts:
            reason = self._reserve(store, run_id, rollout_id, attempt)
            if reason:
                refused.append([run_id, rollout_id, attempt, reason])
            else:
                granted.append([run_id, rollout_id, attempt])
        self._journal.urgent = True
        return {"granted": granted, "refused": refused}

    def _reserve(self, store: WorkerRecord, run_id: str, rollout_id: int, attempt: int) -> str:
        record = self._find(run_id, rollout_id)
        if record is None or record.life.attempt != attempt:
            return "fenced"
        if record.life.state is RolloutState.COMPLETED:
            return "committed"
        if record.life.state is not RolloutState.RESERVED and not self._rollouts.apply(
            record, Event(kind=EventKind.RESERVE, attempt=attempt)
        ):
            return "fenced"
        self._rollouts.hold(record, store)
        return ""

    def _find(self, run_id: str, rollout_id: int) -> RolloutRecord | None:
        run = self._state.runs.get(run_id)
        if run is None:
            return None
        return run.rollouts.get(rollout_id) or load_rollout(self._log, run, rollout_id)

    def commit(self, run: RunRecord, body: Json) -> tuple[str, Json]:
        """Make a part's content count. Returns an error code (empty = done) and the answer."""
        part = str(body["part"])
        known = self._commit_seq(run, part)
        if known is not None:
            return "", {"commit_seq": known}
        rows = [
            (self._find(run.run_id, row["rollout_id"]), row) for row in body.get("rollouts", ())
        ]
        ended = [
            (self._find(run.run_id, rollout_id), rollout_id)
            for rollout_id in body.get("terminals", ())
        ]
        refused = self._refusals(run, rows, ended)
        if refused:
            return "fenced", {"refused": refused}
        for record, row in rows:
            assert record is not None
            self._complete(record, row, part)
        for record, _ in ended:
            assert record is not None
            self._stored(record, part)
        run.events_stored = max(run.events_stored, int(body.get("group_events_upto") or 0))
        self._tasks_stored(run, int(body.get("tasks_upto") or 0))
        commit_seq = run.parts[part] = run.next_commit
        run.next_commit += 1
        self._journal.insert(
            sql.INSERT_PART,
            (run.run_id, commit_seq, part, orjson.dumps(body.get("files", [])).decode(), 0),
        )
        self._journal.run(run)
        self._journal.urgent = True
        return "", {"commit_seq": commit_seq}

    def _commit_seq(self, run: RunRecord, part: str) -> int | None:
        if part in run.parts:
            return run.parts[part]
        rows = self._log.read(
            "SELECT commit_seq FROM parts WHERE run_id = ? AND part = ?", (run.run_id, part)
        )
        return rows[0][0] if rows else None

    def _refusals(
        self,
        run: RunRecord,
        rows: list[tuple[RolloutRecord | None, Json]],
        ended: list[tuple[RolloutRecord | None, int]],
    ) -> Refused:
        refused: Refused = []
        for record, row in rows:
            rollout_id, attempt = row["rollout_id"], row["attempt"]
            if record is None or record.life.attempt != attempt or record.life.state not in IN_HAND:
                done = (
                    record is not None
                    and record.life.attempt == attempt
                    and record.life.state is RolloutState.COMPLETED
                )
                refused.append([run.run_id, rollout_id, attempt, "committed" if done else "fenced"])
            elif FAILURE_CLASS[FailureCode(row.get("failure_code", ""))] not in (
                FailureClass.NONE,
                FailureClass.POLICY,
            ):
                refused.append([run.run_id, rollout_id, attempt, "failed"])
        for record, rollout_id in ended:
            if record is None or not record.life.state.terminal:
                refused.append(
                    [run.run_id, rollout_id, record.life.attempt if record else -1, "open"]
                )
            elif record.part:
                refused.append([run.run_id, rollout_id, record.life.attempt, "committed"])
        return refused

    def _complete(self, record: RolloutRecord, row: Json, part: str) -> None:
        run, attempt = record.run, record.life.attempt
        if record.life.state is not RolloutState.RESERVED:
            # A gateway that restarted, or a store that came back, finds the attempt unreserved but
            # still current.
            self._rollouts.apply(record, Event(kind=EventKind.RESERVE, attempt=attempt))
        reward = row.get("reward")
        record.reward = None if reward is None else float(reward)
        record.numbers = (
            int(row.get("min_version", -1)),
            int(row.get("max_version", -1)),
            int(row.get("num_turns", 0)),
            int(row.get("num_tokens", 0)),
            int(row.get("num_sampled", 0)),
        )
        if record.reward is not None:
            run.reward_sum += record.reward
            run.num_rewards += 1
        self._stored(record, part)
        self._rollouts.apply(
            record,
            Event(
                kind=EventKind.COMMIT,
                attempt=attempt,
                code=FailureCode(row.get("failure_code", "")),
            ),
        )

    def _stored(self, record: RolloutRecord, part: str) -> None:
        record.part = part
        record.run.unstored -= 1
        self._journal.rollout(record)
        if record.group.settled:
            self._journal.settle(record.group)

    def _tasks_stored(self, run: RunRecord, upto: int) -> None:
        before, run.tasks_stored = (
            run.tasks_stored,
            max(run.tasks_stored, min(upto, run.next_group)),
        )
        for group_id in range(before, run.tasks_stored):
            group = run.groups.get(group_id)
            if group is not None and group.settled:
                self._journal.settle(group)

    def published(self, run: RunRecord, commit_seq: int) -> None:
        """commits/<seq>.json is on disk.

        Raises ConflictError for a commit that the log does not know.
        """
        if not 1 <= commit_seq < run.next_commit:
            raise ConflictError(
                f"commit {commit_seq} of run {run.run_id}", f"1 to {run.next_commit - 1}"
            )
        self._journal.insert(sql.PUBLISH_PART, (1, run.run_id, commit_seq))
        run.parts = {part: seq for part, seq in run.parts.items() if seq != commit_seq}

    def finish(self, run: RunRecord) -> bool:
        """End a run that has nothing left to do; whether it ended just now."""
        no_more = run.last or run.cancelled or reached(run.demand)
        stored = (
            not run.unstored
            and not run.parts
            and run.events_stored >= run.next_event
            and run.tasks_stored >= run.next_group
        )
        if run.state != "open" or not no_more or run.undecided or not stored:
            return False
        run.state, run.finished_at = "finished", self._wall()
        self._journal.run(run)
        outcome = "cancelled" if run.cancelled else "finished"
        self._journal.send_store(
            ControlRow(kind=Kind.FINISHED, run_id=run.run_id, payload={"state": outcome})
        )
        self._journal.urgent = True
        return True
