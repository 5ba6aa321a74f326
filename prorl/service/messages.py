"""Rows that the gateway sends to the store, built from what it knows.

Each shape once, for live messages and for snapshots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from prorl.control import (
    ControlRow,
    GroupComplete,
    GroupEventRow,
    Rows,
    RunSnapshot,
    TaskRow,
    Terminal,
    VersionPublished,
)
from prorl.members import GroupMember
from prorl.service.state import GroupRecord, RolloutRecord, RunRecord
from prorl.types import RolloutState, RunWeights

MAX_ROWS_BYTES = 1 << 20
"""Of task text in one control row."""


def terminal(record: RolloutRecord, wall: float) -> Terminal:
    """A rollout that ended without a stored trajectory."""
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
    )


def terminal_row(record: RolloutRecord, wall: float) -> ControlRow:
    """The row of a rollout's end, as a running store is told."""
    return ControlRow.of(
        terminal(record, wall),
        run_id=record.run.run_id,
        rollout_id=record.rollout_id,
        group_id=record.group.group_id,
        attempt=record.life.attempt,
    )


def member(record: RolloutRecord) -> GroupMember:
    """State of a group's member as the store decides by."""
    life = record.life
    return GroupMember(
        rollout_id=record.rollout_id,
        sample_index=record.sample_index,
        attempt=life.attempt,
        state=life.state,
        failure_class=life.failure_class,
        reward=record.reward if life.state is RolloutState.COMPLETED else None,
        num_sampled=record.summary.num_sampled,
    )


def group_complete(group: GroupRecord) -> GroupComplete:
    """Every member of the group is terminal."""
    return GroupComplete(
        group_id=group.group_id,
        task_id=group.task_id,
        members=tuple(member(rollout) for rollout in group.rollouts),
    )


def group_complete_row(group: GroupRecord) -> ControlRow:
    """The row of a group's end, as a running store is told."""
    return ControlRow.of(group_complete(group), run_id=group.run.run_id, group_id=group.group_id)


def version_row(run: RunRecord) -> ControlRow:
    """The run's newest version, for every worker."""
    weights = RunWeights(run.tag, run.start, run.published)
    return ControlRow.of(VersionPublished(version=run.version, weights=weights), run_id=run.run_id)


def fresh_run(run: RunRecord) -> ControlRow:
    """The snapshot of a run that has just been made."""
    config = run.config
    snapshot = RunSnapshot(
        run_id=run.run_id,
        filter=config.filter,
        delivery=config.delivery,
        group_size=1,
        state=run.state,
    )
    return ControlRow.of(snapshot, run_id=run.run_id)


def task_row(group: GroupRecord) -> TaskRow:
    """A row of the TASKS table."""
    return TaskRow(
        group_id=group.group_id,
        task_id=group.task_id,
        data_source=group.data_source,
        env=group.env,
        n=group.n,
        task=group.task,
        sampling=group.sampling,
        extra=group.extra,
    )


def task_chunks(groups: Iterable[GroupRecord]) -> Iterator[tuple[TaskRow, ...]]:
    """Rows of `tasks` in chunks that fit a message each."""
    chunk: list[TaskRow] = []
    size = 0
    for row in map(task_row, groups):
        size += len(row.task) + 256
        if size > MAX_ROWS_BYTES and chunk:
            yield tuple(chunk)
            chunk, size = [], len(row.task) + 256
        chunk.append(row)
    if chunk:
        yield tuple(chunk)


def task_rows(run: RunRecord, groups: Iterable[GroupRecord]) -> list[ControlRow]:
    """New rows of `tasks` for a running store, in messages of bounded size."""
    return [ControlRow.of(Rows(tasks=chunk), run_id=run.run_id) for chunk in task_chunks(groups)]


def event_row(values: tuple[Any, ...]) -> GroupEventRow:
    """A row of the GROUPS table from the values of `EVENT_COLUMNS`."""
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
    return GroupEventRow(
        event_seq=event_seq,
        group_id=group_id,
        event=event,
        kept=bool(kept),
        reason=reason,
        delivery_seq=delivery_seq,
        num_members=num_members,
        num_valid=num_valid,
        min_version=min_version,
        mean_reward=mean_reward,
        at=at,
    )
