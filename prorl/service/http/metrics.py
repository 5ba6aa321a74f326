"""`GET /metrics` in Prometheus' text format, read from the state at each scrape. Series are bounded
by what is alive: runs that are open, workers that are connected, backends that are known. What a
finished run was is in its run directory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from prorl.control import CallTotals
from prorl.service.core.core import Core
from prorl.service.core.observed import BUCKETS, Observed
from prorl.service.core.state import RunRecord, State
from prorl.types import FAILURE_CLASS, GroupState, RolloutState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Values = Mapping[Any, float]
"""The values by tuples of labels."""


def exposition(core: Core, leases_waiting: int, version: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Service(core, leases_waiting, version))
    return generate_latest(registry)


class _Service(Collector):
    def __init__(self, core: Core, leases_waiting: int, version: str) -> None:
        self._core, self._leases_waiting, self._version = core, leases_waiting, version

    def collect(self) -> Iterator[Metric]:
        core = self._core
        yield _gauge(
            "build_info",
            "Always 1; the label has the version of prorl.",
            ("version",),
            {(self._version,): 1},
        )
        waiting = "Free slots of INIT that wait for a rollout."
        yield _gauge("leases_waiting", waiting, (), {(): self._leases_waiting})
        transactions = "Commits of the control log."
        yield _counter("log_transactions", transactions, (), {(): core.log.transactions})
        yield from _of_runs(core.state)
        yield from _of_workers(core.state)
        yield from _of_backends(core)
        yield from _of_rollouts(core.rollouts.observed)


_RUN_GAUGES: tuple[tuple[str, str, Callable[[RunRecord], float]], ...] = (
    (
        "run_waiting_groups",
        "Groups of the run that wait to be started.",
        lambda run: len(run.queues.pool),
    ),
    (
        "run_open_groups",
        "Groups that were started and that the filter has not decided.",
        lambda run: run.open_groups,
    ),
    (
        "run_undelivered_groups",
        "Kept groups that were not sent to a trainer yet.",
        lambda run: run.delivery.waiting,
    ),
    (
        "run_uncommitted_groups",
        "Groups that were sent to the trainer and that it has not committed.",
        lambda run: run.delivery.next_delivery - run.delivery.cursors.get("primary", 0),
    ),
    (
        "run_stored_bytes",
        "Bytes that the run has stored, before compaction.",
        lambda run: run.commits.stored_bytes,
    ),
    (
        "run_policy_version",
        "Newest published version of the weights.",
        lambda run: run.weights.version,
    ),
    ("run_unstored_rollouts", "Ended rollouts that are not stored yet.", lambda run: run.unstored),
    (
        "run_stalled",
        "1 while the run is stalled; `prorl status` says why.",
        lambda run: float(bool(run.stalled)),
    ),
    (
        "run_summed_reward",
        "Sum of the rewards of valid rollouts.",
        lambda run: run.commits.reward_sum,
    ),
    ("run_rewards", "Valid rollouts that have a reward.", lambda run: run.commits.num_rewards),
)

_STEP_COUNTERS = {
    "steps": ("steps", "Steps that the trainer has committed."),
    "step_s": ("step_seconds", "Seconds of committed steps."),
    "waited_s": (
        "trainer_wait_seconds",
        "Part of `step_seconds` until the step's last group was sent. Above 10 %: use more slots;"
        " below 5 %: fewer would do.",
    ),
    "slots_s": ("slot_seconds", "Seconds of all slots of RUN during the trainer's steps."),
    "busy_s": (
        "slot_busy_seconds",
        "Part of `slot_seconds` in which slots had a rollout, of any run.",
    ),
    "worked_s": (
        "rollout_seconds",
        "Seconds of the run's rollouts in RUN and EVAL during its steps.",
    ),
    "wasted_s": (
        "wasted_seconds",
        "Part of `rollout_seconds` for rollouts that ended early, failed, were stale or unused.",
    ),
}


def _of_runs(state: State) -> Iterator[Metric]:
    runs = state.open
    by_state, label = ("run", "state"), ("run",)
    rollouts = {
        (run_id, s.value): run.counts[s] for run_id, run in runs.items() for s in RolloutState
    }
    yield _gauge("rollouts", "Rollouts of open runs by state.", by_state, rollouts)
    groups = {
        (run_id, s.value): run.group_states[s] for run_id, run in runs.items() for s in GroupState
    }
    yield _gauge("groups", "Groups of open runs by state.", by_state, groups)
    for name, text, read in _RUN_GAUGES:
        yield _gauge(name, text, label, {(run_id,): read(run) for run_id, run in runs.items()})
    for name, (metric, text) in _STEP_COUNTERS.items():
        spent = {(run_id,): getattr(run.effort.total, name) for run_id, run in runs.items()}
        yield _counter(f"run_{metric}", text, label, spent)
    yield from _reuse("run", {run_id: run.effort.calls for run_id, run in runs.items()})


_WORKER_GAUGES = {
    "slots": "Rollouts that a stage of a worker works on at a time, at most.",
    "busy": "Slots that work on a rollout.",
    "queued": "Finished rollouts that wait for the next stage.",
}

_WORKER_COUNTERS = {
    "done": ("rows", "Rollouts that a stage of a worker has finished."),
    "failed": ("failures", "Attempts that failed in a stage of a worker."),
    "busy_s": ("busy_seconds", "Seconds that slots worked on a rollout, of all slots together."),
    "tokens": ("tokens", "Sampled tokens."),
}


def _of_workers(state: State) -> Iterator[Metric]:
    workers, labels = state.workers.values(), ("stage", "node", "worker")
    connected = Counter((role, worker.node) for worker in workers for role in worker.roles)
    yield _gauge("workers", "Connected workers by stage and node.", ("stage", "node"), connected)
    in_flight = {
        (role, worker.node, worker.name): worker.num_in_flight(role)
        for worker in workers
        for role in worker.roles
    }
    yield _gauge("in_flight_rollouts", "Attempts that are leased to a worker.", labels, in_flight)
    stats = {
        (role, worker.node, worker.name): stats
        for worker in workers
        for role, stats in worker.status.stats.items()
    }
    for name, text in _WORKER_GAUGES.items():
        values = {key: getattr(worker_stats, name) for key, worker_stats in stats.items()}
        yield _gauge(f"stage_{name}", text, labels, values)
    for name, (metric, text) in _WORKER_COUNTERS.items():
        values = {key: getattr(worker_stats, name) for key, worker_stats in stats.items()}
        yield _counter(f"stage_{metric}", text, labels, values)


def _of_backends(core: Core) -> Iterator[Metric]:
    views, label = {(view["name"],): view for view in core.watched.view()}, ("backend",)
    up = {name: float(view["state"] == "ready") for name, view in views.items()}
    yield _gauge("backend_up", "1 if the model server is ready for rollouts.", label, up)
    in_flight = {name: view["in_flight"] for name, view in views.items()}
    yield _gauge("backend_in_flight", "Rollouts that the model server serves.", label, in_flight)
    refused = {name: view["refused_replies"] for name, view in views.items()}
    text = "Replies of the model server that contradict the request or themselves."
    yield _counter("backend_refused_replies", text, label, refused)
    busy = {name: view["busy_replies"] for name, view in views.items()}
    text = "Calls that the model server put off (HTTP 408, 429, 503)."
    yield _counter("backend_busy_replies", text, label, busy)
    yield from _reuse("backend", core.watched.calls)
    waiting = {(): core.failovers.num_waiting}
    yield _gauge("rollouts_without_backend", "Attempts that wait for a model server.", (), waiting)


def _of_rollouts(observed: Observed) -> Iterator[Metric]:
    failures = {(FAILURE_CLASS[code].value, code.value): n for code, n in observed.failures.items()}
    text = "Attempts that failed since the gateway started."
    yield _counter("failures", text, ("failure_class", "failure_code"), failures)
    seconds = HistogramMetricFamily(
        "prorl_rollout_phase_seconds",
        "How long rollouts were in each phase: queue, init, run, eval, store.",
        labels=["phase"],
    )
    ends = [*map(str, BUCKETS), "+Inf"]
    for phase, histogram in observed.phases.items():
        cumulated = list(zip(ends, accumulate(map(float, histogram.counts)), strict=True))
        seconds.add_metric([phase.value], cumulated, histogram.total_s)
    yield seconds


_REUSE = {
    "prompt": "Prompt tokens.",
    "cached": "Prompt tokens that a prefix cache had.",
    "reusable": "Prompt tokens that an earlier call of the same rollout had sent or sampled.",
    "reused": "Reusable prompt tokens that a prefix cache had.",
}


def _reuse(label: str, calls: Mapping[str, CallTotals]) -> Iterator[Metric]:
    for name, text in _REUSE.items():
        tokens = {(key,): float(getattr(sums, name)) for key, sums in calls.items()}
        yield _counter(f"{label}_{name}_tokens", text, (label,), tokens)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    return _filled(GaugeMetricFamily(f"prorl_{name}", text, labels=labels), values)


def _counter(name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
    return _filled(CounterMetricFamily(f"prorl_{name}", text, labels=labels), values)


def _filled(metric: GaugeMetricFamily | CounterMetricFamily, values: Values) -> Metric:
    for labels, value in values.items():
        metric.add_metric(labels, value)
    return metric
