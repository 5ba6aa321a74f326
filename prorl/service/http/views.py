"""The JSON values by which HTTP shows the state. Counts are the log's; gauges (busy, queued) are
what workers said last.
"""

from __future__ import annotations

import heapq
import os
import time
from collections.abc import Iterable, Mapping
from typing import Annotated, Any

from pydantic import AliasPath, BaseModel, BeforeValidator, ConfigDict, Field
from typing_extensions import TypedDict

from prorl.config import Listener, RunConfig
from prorl.control import Stats
from prorl.graph import GRAPH
from prorl.service import shapes
from prorl.service.core.core import Core
from prorl.service.core.observed import StepSeconds
from prorl.service.core.state import RunRecord, State

LONGEST = 10
"""Attempts that status names: who looks for a straggler needs the first few."""

RECENT_S = 60.0
"""Status lists a run that ended for so long: people and trackers look every few seconds."""

_GAUGES = tuple(
    name
    for name in Stats.__struct_fields__
    if name not in ("backends", "runs", "sources", "waits_for")
)


class View(BaseModel):
    """Holds what is shown of a record: of each field, its attribute of that name or at a path."""

    model_config = ConfigDict(from_attributes=True)


def at(path: str, **more: Any) -> Any:
    return Field(validation_alias=AliasPath(*path.split(".")), **more)


def _steps(spent: StepSeconds) -> shapes.StepShares | None:
    if not spent.steps:
        return None
    return {
        "steps": spent.steps,
        "trainer_wait_share": spent.waited_s / max(1e-9, spent.step_s),
        "idle_slot_share": 1 - spent.busy_s / spent.slots_s if spent.slots_s else None,
        "wasted_share": min(1.0, spent.wasted_s / spent.worked_s) if spent.worked_s else 0.0,
    }


Time = Annotated[float | None, BeforeValidator(lambda seconds: seconds or None)]


class RunSummary(View):
    run_id: str
    state: str = at("display_state")
    counts: Mapping[str, int]
    """Rollouts by state."""
    groups: Mapping[str, int] = at("group_counts")
    """Groups by state, and how many wait in the `pool`."""
    dropped: Mapping[str, int] = at("decisions.drop_reasons")
    """Groups that were not kept, by the filter's reason."""
    failures: Mapping[str, int] = at("attempt_counts")
    """Attempts that ended without a result since the service began, by "code on node", or by code
    where no node had them.
    """
    stalled: str = at("stalled")
    """The reason why a run does not move, or why it was refused or has failed."""
    track: tuple[str, ...] = at("config.track")
    """Trackers that get its curves or traces."""
    idle: str = at("idle")
    """The notice that an open run has no work left, and how to give it some."""
    mean_reward: float | None
    num_rewards: int = at("commits.num_rewards")
    uncommitted_groups: int
    """Kept groups of a stream that its trainer has not committed."""
    cached_share: float | None = at("effort.calls.cached_share")
    reused_share: float | None = at("effort.calls.reused_share")
    steps: Annotated[shapes.StepShares | None, BeforeValidator(_steps)] = at("effort.recent")
    created_at: float
    started_at: Time = at("life.started_at")
    finished_at: Time = at("life.finished_at")


class RunView(RunSummary):
    """The answer to `GET /v1/runs/{run}`."""

    config: RunConfig
    last: bool = at("life.last")
    """No more groups will come."""
    cancelled: bool = at("life.cancelled")
    paused: bool = at("life.paused")
    tasks: int = at("dataset.num_tasks")
    """The tasks of the dataset of a run that feeds itself."""
    fed: int = at("dataset.fed")
    """Turns of these, over all epochs: a group each, or none if the task sits out."""
    skipped: int = at("dataset.skipped")
    """Turns without a group."""
    unstored: int
    delivered: int = at("delivery.next_delivery")
    cursors: Mapping[str, int] = at("delivery.cursors")
    version: int = at("weights.version")
    allocated_version: int = at("weights.allocated_version")
    """The highest id that was given to weights, published or not: the next one is one above."""
    trained: int = at("delivery.trained")
    """Delivered groups that the newest weights were trained on, as publications say."""
    start: tuple[str, ...] = at("weights.start")
    commits: int = at("num_commits")
    flight: str = ""
    """The location where its trainer reads; empty without a store."""
    served: bool = False
    stages: Mapping[str, Mapping[str, float]] = {}


def run_view(core: Core, run: RunRecord, outside: Listener | None = None) -> RunView:
    """`outside`: what is shown to a caller of another host."""
    store = core.state.store
    view = RunView.model_validate(run)
    view.stages = stages(core.state)
    if store is not None:
        view.flight = store.location if outside is None else outside.store
        view.served = run.has_work
    return view


class RolloutView(View):
    rollout_id: int
    group_id: int = at("group.group_id")
    sample_index: int
    rollout_key: str
    task_id: str = at("group.task_id")
    state: str = at("life.state")
    attempt: int = at("life.attempt")
    infra_failures: int = at("life.infra_failures")
    worker_losses: int = at("life.worker_losses")
    failure_class: str = at("life.failure_class")
    failure_code: str = at("life.code")
    failure_message: str = at("message")
    reward: float | None = at("stored.reward")
    backend: str
    holders: list[str] = at("holder_names")
    part: str = at("stored.part")
    min_version: int = at("stored.summary.min_version")
    max_version: int = at("stored.summary.max_version")
    num_turns: int = at("stored.summary.num_turns")
    num_tokens: int = at("stored.summary.num_tokens")
    num_sampled: int = at("stored.summary.num_sampled")
    num_trained: int = at("stored.summary.num_trained")


class GroupView(View):
    run_id: str = at("run.run_id")
    group_id: int
    key: str
    task_id: str
    data_source: str
    env: str
    n: int
    state: str = at("decision.state")
    reason: str = at("decision.reason")
    num_valid: int = at("decision.num_valid")
    mean_reward: float | None = at("decision.mean_reward")
    min_version: int = at("decision.min_version")
    delivery_seq: int = at("decision.delivery_seq")
    rollouts: list[RolloutView]


class AcceptedGroup(View):
    group_id: int
    key: str
    first_rollout_id: int = at("first_rollout")
    n: int
    state: str = at("decision.state")
    created: bool = False


class WorkerView(TypedDict):
    """One role of a worker: a chain has a line for each of its stages."""

    worker: str
    """Its process; on other hosts behind the node's name."""
    role: str
    node: str
    host: str
    """Its machine's own name."""
    pid: int
    location: str
    slots: int
    in_flight: int
    """Attempts that are in this stage of it."""
    leaving: bool
    lease_block_reason: str
    """The reason why it gets no leases now."""
    stats: Mapping[str, float]


class Holding(View):
    """An attempt that somebody works on."""

    run_id: str = at("run.run_id")
    rollout_id: int
    task_id: str = at("group.task_id")
    attempt: int = at("life.attempt")
    leased_s: float = at("since")
    """Since it was leased."""
    holders: list[str] = at("holder_names")
    backend: str


class NodeSettings(View):
    """Holds what every RUN of a service must agree on, anywhere; the key goes to nodes only."""

    model: str
    models: Mapping[str, str]
    tokenizer: str
    backend_key: str
    gateway: str = at("listener.gateway", default="")


class RunList(TypedDict):
    runs: list[RunSummary]


class Accepted(TypedDict):
    run_id: str
    groups: list[AcceptedGroup]
    tasks: int
    """The tasks of the dataset of a run that feeds itself."""
    notes: list[str]
    """The notes about these tasks for people: that they ask for more network than they get."""


class EdgeView(TypedDict):
    """An edge as the worker that reads it sees it."""

    edge: str
    """The name of an edge of `prorl.graph`: lease, ready, ran or scored."""
    worker: str
    endpoint: str
    """The endpoint where it is served."""
    in_memory: bool
    """Both ends are one process: rows do not go through the socket."""


class Status(TypedDict):
    pid: int
    """The gateway's."""
    supervisor_pid: int
    """The process that started the gateway, and starts it again when it dies."""
    host: str
    """Its machine's own name."""
    workers: list[WorkerView]
    endpoints: Mapping[str, tuple[str, ...]]
    outside: Mapping[str, str]
    """The locations where callers of other hosts find the store and the gateway."""
    edges: list[EdgeView]
    stages: Mapping[str, Mapping[str, float]]
    bottleneck: str
    backends: list[shapes.BackendView]
    waiting_for_backend: int
    runs: list[RunSummary]
    ended_runs: list[RunSummary]
    """Runs that ended within the last minute and are not among `runs`."""
    leases_waiting: int
    oldest_attempts: list[Holding]
    """The first ten."""
    commits: int
    log_transactions: int
    warnings: list[str]


def stages(state: State) -> dict[str, dict[str, float]]:
    return {name: _stage(state, name) for name in GRAPH.names}


def workers(state: State) -> list[WorkerView]:
    return [
        {
            "worker": worker.name,
            "role": role,
            "node": worker.node,
            "host": worker.host,
            "pid": worker.pid,
            "location": worker.location,
            "slots": slots,
            "in_flight": worker.num_in_flight(role),
            "leaving": worker.status.leaving,
            "lease_block_reason": worker.status.lease_block_reason,
            "stats": {name: getattr(worker.status.stats[role], name) for name in _GAUGES}
            if role in worker.status.stats
            else {},
        }
        for worker in state.workers.values()
        for role, slots in worker.roles.items()
    ]


def edges(state: State) -> list[EdgeView]:
    return [
        {
            "edge": GRAPH.takes(role),
            "worker": worker.name,
            "endpoint": endpoint,
            "in_memory": in_memory,
        }
        for worker in state.workers.values()
        for role, stats in worker.status.stats.items()
        for endpoint, in_memory in stats.sources.items()
    ]


def _stage(state: State, stage: str) -> dict[str, float]:
    workers = state.of_role(stage)
    latest = [worker.status.stats[stage] for worker in workers if stage in worker.status.stats]
    gauges = {name: sum(getattr(stats, name) for stats in latest) for name in _GAUGES}
    gauges["slots"] = sum(worker.roles[stage] for worker in workers)
    gauges["workers"] = len(workers)
    gauges["busy_share"] = gauges["busy"] / gauges["slots"] if gauges["slots"] else 0.0
    return gauges


def bottleneck(state: State) -> str:
    """The stage that limits the others: the one with the largest busy share and queue (in
    multiples of its slots).
    """
    load = {
        name: g["busy_share"] + g["queued"] / max(1, g["slots"])
        for name, g in stages(state).items()
    }
    name = max(load, key=lambda stage: load[stage])
    return name if load[name] > 0 else ""


def status(
    core: Core,
    leases_waiting: int,
    now: float,
    runs: Iterable[RunRecord],
    warnings: list[str],
    listener: Listener | None = None,
) -> Status:
    """`GET /v1/status`. `now` on the loop's clock; `runs`: besides the open ones and
    those whose trainer is behind; `listener`: what
    other hosts are shown.
    """
    state = core.state
    owing = [
        run for run in state.runs.values() if run.life.state != "open" and run.uncommitted_groups
    ]
    since = time.time() - RECENT_S
    recent = [
        run
        for run in state.runs.values()
        if run.life.state != "open" and not run.uncommitted_groups and run.life.finished_at > since
    ]
    return {
        "pid": os.getpid(),
        "supervisor_pid": os.getppid(),
        "host": os.uname().nodename,
        "workers": workers(state),
        "endpoints": state.endpoints(),
        "outside": {"store": listener.store, "gateway": listener.gateway} if listener else {},
        "edges": edges(state),
        "stages": stages(state),
        "bottleneck": bottleneck(state),
        "backends": core.watched.view(),
        "waiting_for_backend": core.failovers.num_waiting,
        "runs": [RunSummary.model_validate(run) for run in (*state.open.values(), *owing, *runs)],
        "ended_runs": [RunSummary.model_validate(run) for run in recent],
        "leases_waiting": leases_waiting,
        "oldest_attempts": _oldest_attempts(state, now),
        "commits": state.num_commits,
        "log_transactions": core.log.transactions,
        "warnings": warnings,
    }


def _oldest_attempts(state: State, now: float) -> list[Holding]:
    in_flight = {record for worker in state.workers.values() for record in worker.in_flight}
    longest = heapq.nsmallest(LONGEST, in_flight, key=lambda record: record.since)
    views = [Holding.model_validate(record) for record in longest]
    for view in views:
        view.leased_s = now - view.leased_s
    return views
