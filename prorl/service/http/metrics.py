"""`GET /metrics` in Prometheus' text format, read from the state at each scrape.

Series are bounded by what is alive: runs that are open, workers that are connected, backends that
are known. What a finished run was is in its run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from prorl.control import Served
from prorl.service.core.core import Core
from prorl.service.core.observed import BUCKETS, Observed
from prorl.service.core.state import RunRecord, State, WorkerRecord
from prorl.types import FAILURE_CLASS, GroupState, RolloutState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Value = tuple[tuple[str, ...], float]
"""Labels, and what was measured."""


def exposition(core: Core, leases_waiting: int, version: str) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Service(core, leases_waiting, version))
    return generate_latest(registry)


class _Service(Collector):
    def __init__(self, core: Core, leases_waiting: int, version: str) -> None:
        self._core, self._leases_waiting, self._version = core, leases_waiting, version

    def collect(self) -> Iterator[Metric]:
        core, state = self._core, self._core.state
        yield _gauge("build_info", "1, with the version.", ("version",), [((self._version,), 1)])
        yield _gauge(
            "leases_waiting",
            "Free slots of INIT that wait for work.",
            (),
            [((), self._leases_waiting)],
        )
        yield _counter(
            "log_transactions", "Commits of the control log.", (), [((), core.log.transactions)]
        )
        yield from _of_runs(state)
        yield from _of_workers(state)
        yield from _of_backends(core)
        yield from _of_rollouts(core.rollouts.observed)


def _of_runs(state: State) -> Iterator[Metric]:
    runs = list(state.open.values())
    yield _gauge(
        "rollouts",
        "Rollouts of open runs by state.",
        ("run", "state"),
        [((run.run_id, s.value), run.rollout_states[s]) for run in runs for s in RolloutState],
    )
    yield _gauge(
        "groups",
        "Groups of open runs by state.",
        ("run", "state"),
        [((run.run_id, s.value), run.group_states[s]) for run in runs for s in GroupState],
    )
    for name, text, read in _RUN_GAUGES:
        yield _gauge(name, text, ("run",), [((run.run_id,), read(run)) for run in runs])
    for name, (metric, text) in _STEP_COUNTERS.items():
        values = [((run.run_id,), getattr(run.effort.total, name)) for run in runs]
        yield _counter(f"run_{metric}", text, ("run",), values)
    yield from _reuse("run", "run", {run.run_id: run.calls for run in runs})


_RUN_GAUGES: tuple[tuple[str, str, Callable[[RunRecord], float]], ...] = (
    ("run_pool_groups", "Groups that wait to be started.", lambda run: len(run.pool)),
    ("run_open_groups", "Groups that are started and not decided.", lambda run: run.open_groups),
    ("run_unread_groups", "Kept groups that no trainer has taken yet.", lambda run: run.waiting),
    (
        "run_uncommitted_groups",
        "Groups that the trainer was given and has not committed: how far it is behind.",
        lambda run: run.next_delivery - run.cursors.get("primary", 0),
    ),
    ("run_stored_bytes", "Bytes of its commits, before compaction.", lambda run: run.stored_bytes),
    ("run_policy_version", "Newest published policy version.", lambda run: run.version),
    ("run_unstored_rollouts", "Rollouts whose row no part holds yet.", lambda run: run.unstored),
    ("run_stuck", "1 while nothing moves; status says why.", lambda run: float(bool(run.stuck))),
    ("run_reward_sum", "Sum of rewards of valid rollouts.", lambda run: run.reward_sum),
    ("run_rewards", "Valid rollouts that have a reward.", lambda run: run.num_rewards),
)

_STEP_COUNTERS = {
    "steps": ("steps", "Steps that its trainer has committed."),
    "step_s": ("step_seconds", "Seconds that these took."),
    "waited_s": (
        "trainer_waited_seconds",
        "Of these: until the step's last group was handed out. Above 10 %: more rollouts; below"
        " 5 %: fewer would do.",
    ),
    "slots_s": ("slot_seconds", "Seconds of RUN's slots, all together, in its steps."),
    "busy_s": ("slot_busy_seconds", "Of these: with a rollout, of whatever run."),
    "worked_s": ("worked_seconds", "Seconds of its rollouts in RUN and EVAL, in its steps."),
    "wasted_s": ("wasted_seconds", "Of these: ended early, failed, stale, or left over."),
}


def _of_workers(state: State) -> Iterator[Metric]:
    workers = [worker for worker in state.workers.values() if worker.stats is not None]
    labels = ("stage", "node", "worker")
    yield _gauge(
        "workers",
        "Connected workers by stage and node.",
        ("stage", "node"),
        [(key, count) for key, count in _count(state.workers.values()).items()],
    )
    yield _gauge(
        "held_rollouts",
        "Attempts that a worker has in hand.",
        labels,
        [(_labels(worker), len(worker.held)) for worker in state.workers.values()],
    )
    for name, text in _GAUGES.items():
        values = [(_labels(worker), getattr(worker.stats, name)) for worker in workers]
        yield _gauge(f"stage_{name}", text, labels, values)
    for name, (metric, text) in _COUNTERS.items():
        values = [(_labels(worker), getattr(worker.stats, name)) for worker in workers]
        yield _counter(f"stage_{metric}", text, labels, values)


_GAUGES = {
    "slots": "Rows that a worker takes at a time.",
    "busy": "Slots that have a row.",
    "queued": "Finished rows that wait for downstream.",
}

_COUNTERS = {
    "done": ("rows", "Rows that a worker finished."),
    "failed": ("failures", "Attempts that ended in a worker."),
    "busy_s": ("busy_seconds", "Seconds that slots had a row, of all slots together."),
    "tokens": ("tokens", "Tokens that were sampled."),
}


def _of_backends(core: Core) -> Iterator[Metric]:
    views = core.watched.view()
    yield _gauge(
        "backend_up",
        "1 if it may be given work.",
        ("backend",),
        [((view["name"],), float(view["state"] == "ready")) for view in views],
    )
    yield _gauge(
        "backend_in_flight",
        "Rollouts that it serves.",
        ("backend",),
        [((view["name"],), view["in_flight"]) for view in views],
    )
    yield _counter(
        "backend_refused_replies",
        "Replies of it that contradicted the request or themselves.",
        ("backend",),
        [((view["name"],), view["refused_replies"]) for view in views],
    )
    yield _counter(
        "backend_busy_replies",
        "Calls that it put off (HTTP 408, 429, 503).",
        ("backend",),
        [((view["name"],), view["busy_replies"]) for view in views],
    )
    yield from _reuse("backend", "backend", core.watched.calls)
    yield _gauge(
        "rollouts_without_backend",
        "Attempts that wait for a backend.",
        (),
        [((), core.failovers.num_waiting)],
    )


def _of_rollouts(observed: Observed) -> Iterator[Metric]:
    yield _counter(
        "failures",
        "Attempts that failed since the gateway started.",
        ("failure_class", "code"),
        [((FAILURE_CLASS[code].value, code.value), n) for code, n in observed.failures.items()],
    )
    seconds = HistogramMetricFamily(
        "prorl_rollout_phase_seconds",
        "How long rollouts were in each phase: queue, init, run, eval, store.",
        labels=["phase"],
    )
    for phase, histogram in observed.phases.items():
        seconds.add_metric([phase.value], _cumulated(histogram.counts), histogram.total_s)
    yield seconds


def _cumulated(counts: list[int]) -> list[tuple[str, float]]:
    ends, total, pairs = [*map(str, BUCKETS), "+Inf"], 0, []
    for end, count in zip(ends, counts, strict=True):
        total += count
        pairs.append((end, float(total)))
    return pairs


def _reuse(prefix: str, label: str, calls: Mapping[str, Served]) -> Iterator[Metric]:
    """Prompts and their prefix caches."""
    for name, text in _REUSE.items():
        values = [((key,), float(getattr(sums, name))) for key, sums in calls.items()]
        yield _counter(f"{prefix}_{name}_tokens", text, (label,), values)


_REUSE = {
    "prompt": "Tokens of prompts.",
    "cached": "Those that a prefix cache had.",
    "repeated": "Tokens of prompts that their rollout had said before.",
    "reused": "Those of them that a prefix cache had.",
}


def _count(workers: Iterable[WorkerRecord]) -> Mapping[tuple[str, ...], int]:
    counts: dict[tuple[str, ...], int] = {}
    for worker in workers:
        key = worker.role, worker.node
        counts[key] = counts.get(key, 0) + 1
    return counts


def _labels(worker: WorkerRecord) -> tuple[str, ...]:
    return worker.role, worker.node, worker.name


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Iterable[Value]) -> Metric:
    return _filled(GaugeMetricFamily(f"prorl_{name}", text, labels=labels), values)


def _counter(name: str, text: str, labels: tuple[str, ...], values: Iterable[Value]) -> Metric:
    return _filled(CounterMetricFamily(f"prorl_{name}", text, labels=labels), values)


def _filled(
    metric: GaugeMetricFamily | CounterMetricFamily, values: Iterable[Value]
) -> GaugeMetricFamily | CounterMetricFamily:
    for labels, value in values:
        metric.add_metric(labels, value)
    return metric
