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
        yield _gauge("build_info", "1, with the version.", ("version",), {(self._version,): 1})
        waiting = "Free slots of INIT that wait for work."
        yield _gauge("leases_waiting", waiting, (), {(): self._leases_waiting})
        transactions = "Commits of the control log."
        yield _counter("log_transactions", transactions, (), {(): core.log.transactions})
        yield from _of_runs(core.state)
        yield from _of_workers(core.state)
        yield from _of_backends(core)
        yield from _of_rollouts(core.rollouts.observed)


_RUN_GAUGES: tuple[tuple[str, str, Callable[[RunRecord], float]], ...] = (
    ("run_waiting_groups", "Groups that wait to be started.", lambda run: len(run.queues.pool)),
    ("run_open_groups", "Groups that are started and not decided.", lambda run: run.open_groups),
    (
        "run_undelivered_groups",
        "Kept groups that no trainer has taken yet.",
        lambda run: run.delivery.waiting,
    ),
    (
        "run_uncommitted_groups",
        "Groups that the trainer was given and has not committed: how far it is behind.",
        lambda run: run.delivery.next_delivery - run.delivery.cursors.get("primary", 0),
    ),
    (
        "run_stored_bytes",
        "Bytes of its commits, before compaction.",
        lambda run: run.commits.stored_bytes,
    ),
    ("run_policy_version", "Newest published policy version.", lambda run: run.weights.version),
    ("run_unstored_rollouts", "Rollouts whose row no part holds yet.", lambda run: run.unstored),
    (
        "run_stalled",
        "1 while nothing moves; status says why.",
        lambda run: float(bool(run.stalled)),
    ),
    ("run_summed_reward", "Sum of rewards of valid rollouts.", lambda run: run.commits.reward_sum),
    ("run_rewards", "Valid rollouts that have a reward.", lambda run: run.commits.num_rewards),
)

_STEP_COUNTERS = {
    "steps": ("steps", "Steps that its trainer has committed."),
    "step_s": ("step_seconds", "Seconds that these took."),
    "waited_s": (
        "trainer_wait_seconds",
        "Of these: until the step's last group was handed out. Above 10 %: more rollouts; below"
        " 5 %: fewer would do.",
    ),
    "slots_s": ("slot_seconds", "Seconds of RUN's slots, all together, in its steps."),
    "busy_s": ("slot_busy_seconds", "Of these: with a rollout, of whatever run."),
    "worked_s": ("rollout_seconds", "Seconds of its rollouts in RUN and EVAL, in its steps."),
    "wasted_s": ("wasted_seconds", "Of these: ended early, failed, stale, or left over."),
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
    "slots": "Rows that a worker takes at a time.",
    "busy": "Slots that have a row.",
    "queued": "Finished rows that wait for downstream.",
}

_WORKER_COUNTERS = {
    "done": ("rows", "Rows that a worker finished."),
    "failed": ("failures", "Attempts that ended in a worker."),
    "busy_s": ("busy_seconds", "Seconds that slots had a row, of all slots together."),
    "tokens": ("tokens", "Tokens that were sampled."),
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
    yield _gauge("in_flight_rollouts", "Attempts that a worker has in hand.", labels, in_flight)
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
    yield _gauge("backend_up", "1 if it may be given work.", label, up)
    in_flight = {name: view["in_flight"] for name, view in views.items()}
    yield _gauge("backend_in_flight", "Rollouts that it serves.", label, in_flight)
    refused = {name: view["refused_replies"] for name, view in views.items()}
    text = "Replies of it that contradicted the request or themselves."
    yield _counter("backend_refused_replies", text, label, refused)
    busy = {name: view["busy_replies"] for name, view in views.items()}
    text = "Calls that it put off (HTTP 408, 429, 503)."
    yield _counter("backend_busy_replies", text, label, busy)
    yield from _reuse("backend", core.watched.calls)
    waiting = {(): core.failovers.num_waiting}
    yield _gauge("rollouts_without_backend", "Attempts that wait for a backend.", (), waiting)


def _of_rollouts(observed: Observed) -> Iterator[Metric]:
    failures = {(FAILURE_CLASS[code].value, code.value): n for code, n in observed.failures.items()}
    text = "Attempts that failed since the gateway started."
    yield _counter("failures", text, ("failure_class", "code"), failures)
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
    "prompt": "Tokens of prompts.",
    "cached": "Those that a prefix cache had.",
    "reusable": "Tokens of prompts that their rollout had said before.",
    "reused": "Those of them that a prefix cache had.",
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
