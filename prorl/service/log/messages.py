"""What the gateway tells the store and the workers, built from what it knows."""

from __future__ import annotations

from prorl.control import (
    ControlRow,
    GroupComplete,
    Terminal,
    VersionPublished,
)
from prorl.filters import GroupMember
from prorl.service.core.state import GroupRecord, RolloutRecord, RunRecord
from prorl.types import RolloutState, RunWeights


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
        num_trained=record.summary.num_trained,
    )


def group_complete(group: GroupRecord) -> GroupComplete:
    """Every member of the group is terminal."""
    return GroupComplete(
        group_id=group.group_id,
        task_id=group.task_id,
        members=tuple(member(rollout) for rollout in group.rollouts),
    )


def version_row(run: RunRecord) -> ControlRow:
    """The run's newest version, for every worker."""
    weights = RunWeights(run.tag, run.start, run.published, run.announced)
    return ControlRow.of(VersionPublished(version=run.version, weights=weights), run_id=run.run_id)
