"""The rows that wait to be written for one run, and when they must be: the writer's bounded inbox.

Bounded by credit: rows come from an `Inlet`, which grants no more than its slots; terminal rows,
tasks and group events come from the gateway, as many as it has. Rows are keyed by their attempt, so
that one that is sent twice waits once; what the gateway says twice is known by its seq.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from prorl.control import (
    AttemptRow,
    CommitPart,
    CommittedRollout,
    GroupEventRow,
    PartFile,
    TaskRow,
    Terminal,
    TrajectorySummary,
)
from prorl.schema import TABLES
from prorl.schema.rows import Row, stack
from prorl.storage.write.convert import (
    attempt_rows,
    event_rows,
    tables,
    task_rows,
    terminal_rows,
)
from prorl.types import AttemptKey, FailureCode

Ack = Callable[[], None]


@dataclass(slots=True, kw_only=True)
class WaitingRow:
    """A SCORED row and everybody who waits for its fate."""

    key: AttemptKey
    row: Row
    acks: list[Ack]

    @property
    def order(self) -> tuple[int, int]:
        """The order of the rows of a part: by group, then sample."""
        return self.row.value("group_id"), self.row.value("sample_index")

    def ack(self) -> None:
        for ack in self.acks:
            ack()


@dataclass(slots=True)
class PendingPart:
    rows: dict[AttemptKey, WaitingRow] = field(default_factory=dict)
    terminals: dict[int, Terminal] = field(default_factory=dict)
    events: dict[int, GroupEventRow] = field(default_factory=dict)
    """The events by event_seq."""
    tasks: dict[int, TaskRow] = field(default_factory=dict)
    """The tasks by group."""
    attempts: dict[tuple[int, int], AttemptRow] = field(default_factory=dict)
    """The attempts by rollout and attempt."""
    outbox_upto: int = 0
    """Rows of the outbox up to this seq are in here, or in an earlier part."""
    num_bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.rows or self.terminals or self.events or self.tasks or self.attempts)

    def knows(self, key: AttemptKey) -> WaitingRow | None:
        return self.rows.get(key)


def part_tables(batch: PendingPart) -> dict[str, pa.Table]:
    """The rows of every table that has any, in the order of `TABLES`; copies tokens once."""
    by_table: dict[str, list[pa.Table]] = {name: [] for name in TABLES}
    if batch.rows:
        ordered = sorted(batch.rows.values(), key=lambda waiting: waiting.order)
        for name, rows in tables(stack([waiting.row for waiting in ordered])).items():
            by_table[name].append(pa.Table.from_batches([rows]))
    if batch.terminals:
        by_table["rollouts"].append(terminal_rows(batch.terminals.values()))
    if batch.events:
        by_table["groups"].append(event_rows(batch.events[seq] for seq in sorted(batch.events)))
    if batch.tasks:
        by_table["tasks"].append(task_rows(batch.tasks[group] for group in sorted(batch.tasks)))
    if batch.attempts:
        by_table["attempts"].append(attempt_rows(batch.attempts.values()))
    joined = {name: pa.concat_tables(parts) for name, parts in by_table.items() if parts}
    return {name: rows for name, rows in joined.items() if rows.num_rows}


_SUMMARY = TrajectorySummary.__struct_fields__
_COMMITTED = ("rollout_id", "attempt", "reward", "failure_code", "failure_message", *_SUMMARY)


def commit_request(
    part: str, files: Iterable[PartFile], batch: PendingPart, rows: Mapping[str, pa.Table]
) -> CommitPart:
    rollouts = rows["rollouts"].select(_COMMITTED).to_pylist() if batch.rows else []
    traces = {
        (key.rollout_id, key.attempt): waiting.row.value("grader_log")
        for key, waiting in batch.rows.items()
        if waiting.row.value("eval_failure_code")
    }
    return CommitPart(
        part=part,
        files=tuple(files),
        rollouts=tuple(
            CommittedRollout(
                rollout_id=row["rollout_id"],
                attempt=row["attempt"],
                reward=row["reward"],
                failure_code=FailureCode(row["failure_code"]),
                failure_message=row["failure_message"] if row["failure_code"] else "",
                trace=traces.get((row["rollout_id"], row["attempt"]), ""),
                summary=TrajectorySummary(**{name: row[name] for name in _SUMMARY}),
            )
            for row in rollouts
            if row["rollout_id"] not in batch.terminals
        ),
        terminals=tuple(batch.terminals),
        outbox_upto=batch.outbox_upto,
    )


class GroupCounts:
    """Counts the members of each group that have come, so that a group's last one is written at
    once where a trainer waits.
    """

    def __init__(self, default_size: int) -> None:
        self._default = default_size
        self._sizes: dict[int, int] = {}
        self._members: dict[int, set[int]] = {}

    def expect(self, group_id: int, size: int) -> None:
        self._sizes[group_id] = size

    def arrived(self, group_id: int, sample_index: int) -> bool:
        """Count a member that has come. Returns whether the group is whole now."""
        members = self._members.setdefault(group_id, set())
        members.add(sample_index)
        if len(members) < self._sizes.get(group_id, self._default):
            return False
        self._members.pop(group_id)
        self._sizes.pop(group_id, None)
        return True
