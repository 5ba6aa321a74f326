"""What each route answers when all is well: mypy checks it where it is made, OpenAPI shows it."""

from __future__ import annotations

from collections.abc import Mapping

from typing_extensions import TypedDict

from prorl.types import Json


class Deleted(TypedDict):
    run_id: str
    deleted: bool


class Steps(TypedDict):
    """Shares of the last steps of a trainer, since the gateway started."""

    steps: int
    trainer_waited: float
    """Of the time: until the step's last group was handed out."""
    servers_idle: float | None
    """Of RUN's slots, whoever's rollouts are in the others; None without one."""
    wasted: float
    """Of the rollouts' seconds: ended early, failed, stale or left over."""


class RunSummary(TypedDict):
    run_id: str
    state: str
    counts: Mapping[str, int]
    """Rollouts by state."""
    groups: Mapping[str, int]
    """Groups by state, and how many wait in the `pool`."""
    stuck: str
    """What a run that does not move waits for, or why it was refused or has failed."""
    reward_mean: float | None
    num_rewards: int
    cached_share: float | None
    reused_share: float | None
    steps: Steps | None
    created_at: float
    started_at: float | None
    finished_at: float | None


class RunView(RunSummary):
    config: Mapping[str, Json]
    last: bool
    """No more groups will come."""
    cancelled: bool
    paused: bool
    tasks: int
    """Of the dataset of a run that feeds itself."""
    fed: int
    """Turns of these, over all epochs: a group each, or none if the task sits out."""
    skipped: int
    """Turns without a group."""
    unstored: int
    delivered: int
    cursors: Mapping[str, int]
    version: int
    start: list[str]
    commits: int
    flight: str
    """Where its trainer reads; empty without a store."""
    served: bool
    stages: Mapping[str, Mapping[str, float]]


class Runs(TypedDict):
    runs: list[RunSummary]


class AcceptedGroup(TypedDict):
    group_id: int
    key: str
    first_rollout_id: int
    n: int
    state: str
    created: bool


class Accepted(TypedDict):
    run_id: str
    groups: list[AcceptedGroup]
    tasks: int
    """Of the dataset of a run that feeds itself."""


class RolloutView(TypedDict):
    rollout_id: int
    group_id: int
    sample_index: int
    rollout_key: str
    task_id: str
    state: str
    attempt: int
    infra_failures: int
    worker_losses: int
    failure_class: str
    failure_code: str
    failure_message: str
    reward: float | None
    backend: str
    holders: list[str]
    part: str
    min_version: int
    max_version: int
    num_turns: int
    num_tokens: int
    num_sampled: int
    num_trained: int


class GroupView(TypedDict):
    run_id: str
    group_id: int
    key: str
    task_id: str
    data_source: str
    env: str
    n: int
    state: str
    reason: str
    num_valid: int
    mean_reward: float | None
    min_version: int
    delivery_seq: int
    rollouts: list[RolloutView]


class VersionPublished(TypedDict):
    run_id: str
    version: int
    failed: Mapping[str, str]
    """Why, by backend."""
    pending: bool
    """Backends still load them."""


class WorkerView(TypedDict):
    worker: str
    role: str
    node: str
    pid: int
    location: str
    slots: int
    held: int
    leaving: bool
    held_back: str
    """Why it gets no leases now."""
    stats: Mapping[str, float]


class BackendView(TypedDict):
    name: str
    state: str
    in_flight: int
    in_pool: bool
    reason: str
    busy_replies: int
    refused_replies: int
    cached_share: float | None
    reused_share: float | None


class Backends(TypedDict):
    backends: list[BackendView]


class Held(TypedDict):
    failed: Mapping[str, str]
    """Why, by backend."""


class BackendState(TypedDict):
    name: str
    state: str


class Holding(TypedDict):
    """An attempt that somebody works on."""

    run_id: str
    rollout_id: int
    task_id: str
    attempt: int
    held_s: float
    """Since it was leased."""
    holders: list[str]
    backend: str


class Status(TypedDict):
    pid: int
    """The gateway's."""
    workers: list[WorkerView]
    endpoints: Mapping[str, tuple[str, ...]]
    outside: Mapping[str, str]
    """Where callers of other hosts find the store and the gateway."""
    stages: Mapping[str, Mapping[str, float]]
    bottleneck: str
    backends: list[BackendView]
    waiting_for_backend: int
    runs: list[RunSummary]
    leases_waiting: int
    longest_held: list[Holding]
    """The first ten."""
    commits: int
    log_transactions: int
    warnings: list[str]


class NodeSettings(TypedDict):
    model: str
    models: Mapping[str, str]
    tokenizer: str
    backend_key: str
    gateway: str


class Certificate(TypedDict):
    certificate: str
    authority: str


class Drained(TypedDict):
    node: str
    workers: list[str]
    held: int


class Health(TypedDict):
    ok: bool
