"""What the gateway tells the store: runs, and what it must write and decide."""

from __future__ import annotations

from collections.abc import Mapping

from prorl.control.payload import Count, Kind, Payload, Record, Version
from prorl.control.requests import PartFile
from prorl.filters import GroupMember
from prorl.types import FailureClass, FailureCode, RolloutState


class TaskRow(Record, frozen=True, kw_only=True):
    """A row of `tasks`: an accepted group."""

    group_id: Count
    task_id: str
    data_source: str
    env: str
    n: Count
    task: str
    """Canonical JSON."""
    sampling: str
    """JSON of `SamplingParams`."""
    extra: str


class GroupEventRow(Record, frozen=True, kw_only=True):
    """One row of the table `groups`, for the store to write."""

    event_seq: Count
    group_id: Count
    event: str
    """`decided`, `delivered` or `stale`."""
    kept: bool
    reason: str
    delivery_seq: int
    """-1 unless delivered."""
    num_members: Count
    num_valid: Count
    min_version: Version
    mean_reward: float | None
    at: int


class Rows(Payload, frozen=True, kw_only=True):
    """(run): new rows of `tasks` and `groups`."""

    kind = Kind.ROWS
    tasks: tuple[TaskRow, ...] = ()
    events: tuple[GroupEventRow, ...] = ()


class Terminal(Payload, frozen=True, kw_only=True):
    """(run, group): a rollout that ended without a stored trajectory; write its row."""

    kind = Kind.TERMINAL
    rollout_id: Count
    group_id: Count
    sample_index: Count
    rollout_key: str
    attempt: Count
    status: RolloutState
    failure_class: FailureClass
    failure_code: FailureCode
    failure_message: str = ""
    task_id: str
    data_source: str
    env: str
    agent: str
    queue_s: float
    extra: str


class GroupComplete(Payload, frozen=True, kw_only=True):
    """(run, group): every member is terminal; propose a decision."""

    kind = Kind.GROUP_COMPLETE
    group_id: Count
    task_id: str
    members: tuple[GroupMember, ...]


class Stuck(Payload, frozen=True, kw_only=True):
    """(run): it has not moved for a while, or moves again."""

    kind = Kind.STUCK
    reason: str
    """What it waits for, in words; empty when it moves."""


class Unpublished(Record, frozen=True, kw_only=True):
    """A commit of the log that was not published yet."""

    commit_seq: int
    part: str
    files: tuple[PartFile, ...]


class RunNews(Payload, frozen=True, kw_only=True):
    """(run): a run as it stands, before anything else of it and again when it ends.

    What must be written and decided follows from the outbox, in order.
    """

    kind = Kind.RUN
    filter: str
    """A filter's name, or its SQL."""
    delivery: str
    """As in the run's config."""
    group_size: Count
    state: str
    """`open` or `finished`: no group is open any more and everything is stored."""
    cursors: Mapping[str, int] = {}
    unpublished: tuple[Unpublished, ...] = ()
    num_commits: Count = 0
    """That the log knows. Files that neither `unpublished` nor a commit on disk names are orphans.
    """
