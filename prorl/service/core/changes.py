"""State that has changed in memory and is not on disk yet, and what may be said once it is.

Everything that happens between two transactions lands here; `take` turns it into one transaction
and the effects that wait for it. A rollout that changed five times costs one UPDATE.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from prorl.control import ControlRow, Payload
from prorl.limits import Clock
from prorl.service.core.state import GroupRecord, RolloutRecord, RunRecord, State, WorkerRecord
from prorl.service.log import log_schema as sql
from prorl.service.log.log import ControlLog, Write


@dataclass(slots=True, kw_only=True)
class LogBatch:
    writes: list[Write] = field(default_factory=list)
    outbox: dict[WorkerRecord, list[ControlRow]] = field(default_factory=dict)
    """Control rows by session: what was meant for one never reaches another."""
    runs: dict[RunRecord, None] = field(default_factory=dict)
    granted: list[tuple[RolloutRecord, int]] = field(default_factory=list)
    settled: list[GroupRecord] = field(default_factory=list)


class PendingChanges:
    def __init__(self, last_seq: int = 0) -> None:
        """`last_seq`: the last row that the outbox was ever given."""
        self._last_seq = last_seq
        self._inserts: defaultdict[str, list[Sequence[Any]]] = defaultdict(list)
        self._rollouts: dict[RolloutRecord, None] = {}
        self._groups: dict[GroupRecord, None] = {}
        self._runs: dict[RunRecord, None] = {}
        self._batch = LogBatch()
        self.urgent = False
        """True if a worker waits for what is in it; who waits for durability says so itself
        (`Gateway.durable`).
        """

    @property
    def empty(self) -> bool:
        batch = self._batch
        quiet = not (batch.outbox or batch.runs or batch.granted or batch.settled)
        return quiet and not (self._inserts or self._rollouts or self._groups or self._runs)

    def insert(self, statement: str, row: Sequence[Any]) -> None:
        self._inserts[statement].append(row)

    def mark_rollout(self, record: RolloutRecord) -> None:
        self._rollouts[record] = None

    def mark_group(self, record: GroupRecord) -> None:
        self._groups[record] = None

    def mark_run(self, record: RunRecord) -> None:
        """Update its row and counts in the next transaction. A change of a group or rollout of it
        does so too.
        """
        self._runs[record] = None

    def send(self, worker: WorkerRecord, row: ControlRow) -> None:
        """Send a row to a worker once everything that happened before is durable."""
        self._batch.outbox.setdefault(worker, []).append(row)

    def append_outbox(self, run: RunRecord, kind: str, ref: int, payload: Payload | None) -> None:
        """Put a row into the outbox, with everything so far; `ref`: the group that it is about."""
        self._last_seq += 1
        text = "" if payload is None else msgspec.json.encode(payload).decode()
        self.insert(sql.TELL_STORE, (self._last_seq, run.run_id, kind, ref, text))
        run.outbox.end = self._last_seq
        self.mark_run(run)

    def note_stored(self, run: RunRecord, seq: int) -> None:
        """Remove the rows of the outbox up to `seq`: the store has written what they ask for."""
        if seq > run.outbox.stored:
            run.outbox.stored = seq
            self.insert(sql.STORED, (run.run_id, seq))

    def tell_run(self, run: RunRecord) -> None:
        """Tell the store of a run that was made, or has ended, once that is durable."""
        self._batch.runs[run] = None

    def grant(self, record: RolloutRecord) -> None:
        self._batch.granted.append((record, record.life.attempt))

    def evict_when_idle(self, record: GroupRecord) -> None:
        self._batch.settled.append(record)

    def marks(self, run: RunRecord) -> bool:
        of_groups = any(group.run is run for group in self._groups)
        return run in self._runs or of_groups or any(r.run is run for r in self._rollouts)

    def pending(self, record: GroupRecord) -> bool:
        """Returns whether the group or a member has changes that are not in a transaction yet."""
        return record in self._groups or any(
            rollout in self._rollouts for rollout in record.rollouts
        )

    def take(self) -> LogBatch:
        batch, self._batch = self._batch, LogBatch()
        # New rows first: a row may have been made and changed since the last transaction.
        batch.writes.extend(
            sorted(self._inserts.items(), key=lambda item: not item[0].startswith("INSERT INTO"))
        )
        self._runs |= dict.fromkeys(rollout.run for rollout in self._rollouts)
        self._runs |= dict.fromkeys(group.run for group in self._groups)
        updates = [
            (
                sql.UPDATE_ROLLOUT,
                [(*rollout_row(r), r.run.run_id, r.rollout_id) for r in self._rollouts],
            ),
            (
                sql.UPDATE_GROUP,
                [(*group_row(g), g.run.run_id, g.group_id) for g in self._groups],
            ),
            (sql.UPDATE_RUN, [(*run_row(r), r.run_id) for r in self._runs]),
        ]
        batch.writes.extend((statement, rows) for statement, rows in updates if rows)
        self._inserts, self._rollouts, self._groups, self._runs = defaultdict(list), {}, {}, {}
        self.urgent = False
        return batch


@dataclass(frozen=True, slots=True)
class Base:
    """Holds what every part of the core works with."""

    log: ControlLog
    state: State
    changes: PendingChanges
    clock: Clock
    """The loop's."""
    wall: Clock


class CorePart:
    def __init__(self, base: Base) -> None:
        self._log, self._state, self._changes = base.log, base.state, base.changes
        self._clock, self._wall = base.clock, base.wall


def rollout_row(record: RolloutRecord) -> tuple[Any, ...]:
    """Values of `ROLLOUT_CHANGES`. Enums are text already; SQLite wants their plain value."""
    life = record.life
    return (
        life.state.value,
        life.attempt,
        life.infra_failures,
        life.worker_losses,
        life.code.value,
        life.cancel_code.value,
        record.message,
        record.backend,
        record.stored.reward,
        record.stored.part,
        *msgspec.structs.astuple(record.stored.summary),
    )


def group_row(record: GroupRecord) -> tuple[Any, ...]:
    """Values of `GROUP_CHANGES`."""
    decision = record.decision
    return (
        decision.state.value,
        record.members.opened,
        decision.reason,
        decision.num_valid,
        decision.mean_reward,
        decision.min_version,
        decision.delivery_seq,
    )


def run_row(record: RunRecord) -> tuple[Any, ...]:
    life = record.life
    return (
        life.state,
        int(life.last),
        int(life.cancelled),
        life.started_at,
        life.finished_at,
        record.counters,
        int(record.has_work),
    )
