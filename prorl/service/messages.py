"""Rows that the gateway sends to the store, built from what it knows: each shape once, for live
messages and for snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from prorl.control import ControlRow, Kind
from prorl.service.state import GroupRecord, RolloutRecord, RunRecord
from prorl.types import FAILURE_CLASS, FailureCode, GroupMember, Json, RolloutState

MAX_ROWS_BYTES = 1 << 20
"""Of task text in one control row."""


def terminal(record: RolloutRecord, wall: float) -> ControlRow:
    """A rollout that ended without a stored trajectory."""
    group, life = record.group, record.life
    payload = {
        "attempt": life.attempt,
        "status": life.state.value,
        "failure_class": life.failure_class.value,
        "failure_code": life.code.value,
        "failure_message": record.message,
        "sample_index": record.sample_index,
        "rollout_key": record.rollout_key,
        "task_id": group.task_id,
        "data_source": group.data_source,
        "env": group.env,
        "agent": group.run.config.agent,
        "queue_s": max(0.0, wall - group.accepted_at),
        "extra": group.extra,
    }
    return ControlRow(
        kind=Kind.TERMINAL,
        run_id=group.run.run_id,
        rollout_id=record.rollout_id,
        group_id=group.group_id,
        attempt=life.attempt,
        payload=payload,
    )


def member(
    rollout_id: int, sample_index: int, attempt: int, state: str, code: str, reward: float | None
) -> GroupMember:
    """State of a group's member as the store decides by."""
    done = state == RolloutState.COMPLETED
    failure = FAILURE_CLASS[FailureCode(code)]
    return GroupMember(
        rollout_id, sample_index, attempt, RolloutState(state), failure, reward if done else None
    )


def group_complete(group: GroupRecord) -> ControlRow:
    """Every member of the group is terminal."""
    members = [
        member(r.rollout_id, r.sample_index, r.life.attempt, r.life.state, r.life.code, r.reward)
        for r in group.rollouts
    ]
    payload = {"members": [list(m) for m in members], "task_id": group.task_id}
    return ControlRow(
        kind=Kind.GROUP_COMPLETE, run_id=group.run.run_id, group_id=group.group_id, payload=payload
    )


def fresh_run(run: RunRecord) -> ControlRow:
    """The snapshot of a run that has just been made."""
    config = run.config
    payload = {
        "run_id": run.run_id,
        "config": config.model_dump(mode="json"),
        "filter_sql": config.filter,
        "group_size": 1,
        "seed": config.seed,
        "state": run.state,
        "tasks": [],
        "unpublished": [],
        "terminals": [],
        "complete": [],
        "kept": [],
        "delivered": [],
        "group_events": [],
        "cursors": {},
        "parts": [],
    }
    return ControlRow(kind=Kind.RUN, run_id=run.run_id, payload=payload)


def task_row(group: GroupRecord) -> dict[str, Json]:
    """A row of the TASKS table."""
    return {
        "group_id": group.group_id,
        "task_id": group.task_id,
        "data_source": group.data_source,
        "env": group.env,
        "n": group.n,
        "task": group.task,
        "sampling": group.sampling,
        "extra": group.extra,
    }


def table_rows(run: RunRecord, table: str, rows: Iterable[dict[str, Json]]) -> list[ControlRow]:
    """New rows of `tasks` or `groups` for a running store, in messages of bounded size."""
    chunks: list[list[dict[str, Json]]] = [[]]
    size = 0
    for row in rows:
        size += len(row.get("task", "")) + 256
        if size > MAX_ROWS_BYTES and chunks[-1]:
            chunks.append([])
            size = len(row.get("task", "")) + 256
        chunks[-1].append(row)
    return [
        ControlRow(kind=Kind.ROWS, run_id=run.run_id, payload={"table": table, "rows": chunk})
        for chunk in chunks
        if chunk
    ]


def event_row(values: tuple[Any, ...]) -> dict[str, Json]:
    """A row of the GROUPS table from the values of `EVENT_COLUMNS`. `at` is in microseconds."""
    (
        _,
        event_seq,
        group_id,
        event,
        kept,
        reason,
        delivery_seq,
        num_members,
        num_valid,
        min_version,
        mean_reward,
        at,
    ) = values
    return {
        "event_seq": event_seq,
        "group_id": group_id,
        "event": event,
        "kept": bool(kept),
        "reason": reason,
        "delivery_seq": delivery_seq,
        "num_members": num_members,
        "num_valid": num_valid,
        "min_version": min_version,
        "mean_reward": mean_reward,
        "at": at,
    }
