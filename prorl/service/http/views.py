"""What HTTP shows of the state, as JSON values.

Counts are the log's; gauges (busy, queued) are what workers said last.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Iterable

from prorl.config import Listener, ServiceConfig
from prorl.control import Stats
from prorl.graph import GRAPH
from prorl.service import shapes
from prorl.service.core.core import Core
from prorl.service.core.observed import Spent
from prorl.service.core.state import GroupRecord, RolloutRecord, RunRecord, State, WorkerRecord
from prorl.types import GroupState, RolloutState

LONGEST = 10
"""Attempts that status names: who looks for a straggler needs the first few."""

_GAUGES = tuple(name for name in Stats.__struct_fields__ if name not in ("backends", "runs"))


def run_summary(run: RunRecord) -> shapes.RunSummary:
    """A line of `GET /v1/runs`."""
    return {
        "run_id": run.run_id,
        "state": "cancelled" if run.cancelled and run.state == "finished" else run.state,
        "counts": {state.value: run.rollout_states[state] for state in RolloutState},
        "groups": {state.value: run.group_states[state] for state in GroupState}
        | {"pool": len(run.pool)},
        "stuck": run.stuck,
        "reward_mean": run.reward_sum / run.num_rewards if run.num_rewards else None,
        "num_rewards": run.num_rewards,
        "cached_share": run.calls.cached_share,
        "reused_share": run.calls.reused_share,
        "steps": _steps(run.effort.recent),
        "created_at": run.created_at,
        "started_at": run.started_at or None,
        "finished_at": run.finished_at or None,
    }


def _steps(spent: Spent) -> shapes.Steps | None:
    if not spent.steps:
        return None
    return {
        "steps": spent.steps,
        "trainer_waited": spent.waited_s / max(1e-9, spent.step_s),
        "servers_idle": 1 - spent.busy_s / spent.slots_s if spent.slots_s else None,
        "wasted": min(1.0, spent.wasted_s / spent.worked_s) if spent.worked_s else 0.0,
    }


def run_view(core: Core, run: RunRecord, outside: Listener | None = None) -> shapes.RunView:
    """The answer to `GET /v1/runs/{run}`. `outside`: what is shown to a caller of another host."""
    store = core.state.store
    location = outside.store if outside is not None else store.location if store else ""
    return {
        **run_summary(run),
        "config": run.config.model_dump(mode="json"),
        "last": run.last,
        "cancelled": run.cancelled,
        "paused": run.paused,
        "tasks": run.num_tasks,
        "fed": run.fed,
        "skipped": run.skipped,
        "unstored": run.unstored,
        "delivered": run.next_delivery,
        "cursors": dict(run.cursors),
        "version": run.version,
        "start": list(run.start),
        "commits": run.next_commit - 1,
        "flight": location if store else "",
        "served": store is not None and run.wanted,
        "stages": stages(core.state),
    }


def group_view(group: GroupRecord) -> shapes.GroupView:
    """The answer to `GET /v1/runs/{run}/groups/{group}`."""
    return {
        "run_id": group.run.run_id,
        "group_id": group.group_id,
        "key": group.key,
        "task_id": group.task_id,
        "data_source": group.data_source,
        "env": group.env,
        "n": group.n,
        "state": group.state.value,
        "reason": group.reason,
        "num_valid": group.num_valid,
        "mean_reward": group.mean_reward,
        "min_version": group.min_version,
        "delivery_seq": group.delivery_seq,
        "rollouts": [rollout_view(rollout) for rollout in group.rollouts],
    }


def rollout_view(record: RolloutRecord) -> shapes.RolloutView:
    """The answer to `GET /v1/runs/{run}/rollouts/{rollout}`."""
    return {
        "rollout_id": record.rollout_id,
        "group_id": record.group.group_id,
        "sample_index": record.sample_index,
        "rollout_key": record.rollout_key,
        "task_id": record.group.task_id,
        "state": record.life.state.value,
        "attempt": record.life.attempt,
        "infra_failures": record.life.infra_failures,
        "worker_losses": record.life.worker_losses,
        "failure_class": record.life.failure_class.value,
        "failure_code": record.life.code.value,
        "failure_message": record.message,
        "reward": record.reward,
        "backend": record.backend,
        "holders": sorted(worker.name for worker in record.holders),
        "part": record.part,
        "min_version": record.summary.min_version,
        "max_version": record.summary.max_version,
        "num_turns": record.summary.num_turns,
        "num_tokens": record.summary.num_tokens,
        "num_sampled": record.summary.num_sampled,
        "num_trained": record.summary.num_trained,
    }


def stages(state: State) -> dict[str, dict[str, float]]:
    return {name: _stage(state, name) for name in GRAPH.names}


def _stage(state: State, stage: str) -> dict[str, float]:
    workers = state.of_role(stage)
    said = [worker.stats for worker in workers if worker.stats]
    gauges = {name: sum(getattr(stats, name) for stats in said) for name in _GAUGES}
    gauges["slots"] = sum(worker.slots for worker in workers)
    gauges["workers"] = len(workers)
    gauges["busy_share"] = gauges["busy"] / gauges["slots"] if gauges["slots"] else 0.0
    return gauges


def bottleneck(state: State) -> str:
    """The stage that holds the others back.

    Its busy share and queue (in multiples of its slots) are largest.
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
) -> shapes.Status:
    """`GET /v1/status`. `now` on the loop's clock; `runs`: besides the open ones; `listener`: what
    other hosts are shown.
    """
    state = core.state
    return {
        "pid": os.getpid(),
        "workers": [_worker(worker) for worker in state.workers.values()],
        "endpoints": state.endpoints(),
        "outside": {"store": listener.store, "gateway": listener.gateway} if listener else {},
        "stages": stages(state),
        "bottleneck": bottleneck(state),
        "backends": core.watched.view(),
        "waiting_for_backend": core.failovers.num_waiting,
        "runs": [run_summary(run) for run in (*state.open.values(), *runs)],
        "leases_waiting": leases_waiting,
        "longest_held": _longest_held(state, now),
        "commits": state.num_commits,
        "log_transactions": core.log.transactions,
        "warnings": warnings,
    }


def node_settings(config: ServiceConfig) -> shapes.NodeSettings:
    """`GET /v1/node`: what every RUN of a service must agree on, wherever it is.

    JSON values of `ServiceConfig`; the model servers' key goes to nodes only.
    """
    return {
        "model": config.model,
        "models": config.models,
        "tokenizer": config.tokenizer,
        "backend_key": config.backend_key,
        "gateway": config.listener.gateway if config.listener else "",
    }


def _worker(w: WorkerRecord) -> shapes.WorkerView:
    return {
        "worker": w.name,
        "role": w.role,
        "node": w.node,
        "pid": w.pid,
        "location": w.location,
        "slots": w.slots,
        "held": len(w.held),
        "leaving": w.leaving,
        "held_back": w.held_back,
        "stats": {name: getattr(w.stats, name) for name in _GAUGES} if w.stats else {},
    }


def _longest_held(state: State, now: float) -> list[shapes.Holding]:
    held = {record for worker in state.workers.values() for record in worker.held}
    return [
        {
            "run_id": record.run.run_id,
            "rollout_id": record.rollout_id,
            "task_id": record.group.task_id,
            "attempt": record.life.attempt,
            "held_s": now - record.since,
            "holders": sorted(worker.name for worker in record.holders),
            "backend": record.backend,
        }
        for record in heapq.nsmallest(LONGEST, held, key=lambda record: record.since)
    ]
