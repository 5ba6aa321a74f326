"""Two runs of the same tasks: by how much the mean reward differs, task by task, and how surely.

The interval of a task holds the true difference in 95 of 100 cases: Newcombe's of two Wilson
intervals where every reward is 0 or 1 (Statistics in Medicine 17, 1998, method 10), Welch's
otherwise. Over all tasks it is that of the mean of the tasks' differences, so that many rollouts of
one task do not count as many tasks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from prorl.types import Json

Ask = Callable[[str], list[dict[str, Json]]]

Z = 1.959964
"""The quantile of a normal distribution for 95 %."""

REWARDS = """
select task_id, count(*) as n, avg(reward) as mean, coalesce(var_samp(reward), 0) as variance,
    bool_and(reward in (0, 1)) as binary
from rollouts where valid and reward is not null group by task_id"""


_OWN = "run_id in (select run_id from rollouts)"
LAST_STEP = f"select max(step) as step from metrics where {_OWN}"
METRICS = f"""
select name, arg_max(value, step) as value from metrics where step <= {{step}} and {_OWN}
group by name order by name limit {{limit}}"""
MAX_METRICS = 60
"""Names of logged metrics that are compared, as many as the curves draw."""


class TaskDifference(NamedTuple):
    task_id: str
    a: float
    b: float
    n_a: int
    n_b: int
    difference: float
    low: float
    high: float
    flipped: bool
    """True if the mean reward is at least one half in one run and below it in the other."""


class Difference(NamedTuple):
    tasks: list[TaskDifference]
    """Flipped ones first, then the largest."""
    mean: float
    low: float
    high: float


def difference(ask_a: Ask, ask_b: Ask) -> Difference:
    """Compares the tasks that both runs have scored; `mean` is nan where there is none."""
    a, b = ({row["task_id"]: row for row in ask(REWARDS)} for ask in (ask_a, ask_b))
    tasks = [_task(a[task], b[task]) for task in a.keys() & b.keys()]
    tasks.sort(key=lambda row: (not row.flipped, -abs(row.difference), row.task_id))
    values = [row.difference for row in tasks]
    mean, low, high = mean_interval(values)
    return Difference(tasks, mean, low, high)


class LoggedMetrics(NamedTuple):
    """The figures that the trainers of two runs logged up to the last step that both have."""

    step: int
    values: dict[str, list[float | None]]
    """A metric's name -> its value in each run, None where it was not logged."""


def logged_metrics(ask_a: Ask, ask_b: Ask) -> LoggedMetrics | None:
    """Returns None where one of the two runs has no metrics."""
    steps = [ask(LAST_STEP)[0]["step"] for ask in (ask_a, ask_b)]
    if None in steps:
        return None
    sql = METRICS.format(step=min(steps), limit=MAX_METRICS)
    a, b = ({row["name"]: row["value"] for row in ask(sql)} for ask in (ask_a, ask_b))
    return LoggedMetrics(min(steps), {name: [a.get(name), b.get(name)] for name in {**a, **b}})


def _task(a: Json, b: Json) -> TaskDifference:
    change = b["mean"] - a["mean"]
    if a["binary"] and b["binary"]:
        low, high = newcombe(a["mean"], a["n"], b["mean"], b["n"])
    else:
        low, high = welch(change, a["variance"], a["n"], b["variance"], b["n"])
    flipped = (a["mean"] >= 0.5) != (b["mean"] >= 0.5)
    return TaskDifference(
        a["task_id"], a["mean"], b["mean"], a["n"], b["n"], change, low, high, flipped
    )


def wilson(share: float, n: int) -> tuple[float, float]:
    """The interval of a share of n.

    >>> [round(bound, 3) for bound in wilson(1.0, 8)]
    [0.676, 1.0]
    """
    scale = 1 + Z * Z / n
    middle = (share + Z * Z / (2 * n)) / scale
    half = Z * math.sqrt(share * (1 - share) / n + Z * Z / (4 * n * n)) / scale
    return max(0.0, middle - half), min(1.0, middle + half)


def newcombe(a: float, n_a: int, b: float, n_b: int) -> tuple[float, float]:
    """The interval of b - a, two shares of n_a and n_b.

    >>> [round(bound, 3) for bound in newcombe(48 / 80, 80, 56 / 70, 70)]
    [0.052, 0.334]
    """
    (low_a, high_a), (low_b, high_b) = wilson(a, n_a), wilson(b, n_b)
    change = b - a
    return (
        change - math.hypot(b - low_b, high_a - a),
        change + math.hypot(high_b - b, a - low_a),
    )


def welch(
    change: float, variance_a: float, n_a: int, variance_b: float, n_b: int
) -> tuple[float, float]:
    """The interval of a difference of two means. Of single values everything is possible."""
    if min(n_a, n_b) < 2:
        return -math.inf, math.inf
    of_a, of_b = variance_a / n_a, variance_b / n_b
    error = of_a + of_b
    if not error:
        return change, change
    freedom = error**2 / (of_a**2 / (n_a - 1) + of_b**2 / (n_b - 1))
    half = student(freedom) * math.sqrt(error)
    return change - half, change + half


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean of values and its interval."""
    if not values:
        return math.nan, math.nan, math.nan
    n, mean = len(values), math.fsum(values) / len(values)
    if n < 2:
        return mean, -math.inf, math.inf
    variance = math.fsum((value - mean) ** 2 for value in values) / (n - 1)
    half = student(n - 1) * math.sqrt(variance / n)
    return mean, mean - half, mean + half


def student(freedom: float) -> float:
    """The 97.5 % point of Student's distribution (Cornish-Fisher; Abramowitz and Stegun 26.7.5). It
    is exact for 1 and 2 degrees of freedom, where the series is too small.

    >>> [round(student(freedom), 2) for freedom in (1, 2, 4, 14, 1e6)]
    [12.71, 4.3, 2.78, 2.14, 1.96]
    """
    if freedom <= 1:
        return 12.7062
    if freedom <= 2:
        return 4.3027
    v = freedom
    return (
        Z
        + (Z**3 + Z) / (4 * v)
        + (5 * Z**5 + 16 * Z**3 + 3 * Z) / (96 * v**2)
        + (3 * Z**7 + 19 * Z**5 + 17 * Z**3 - 15 * Z) / (384 * v**3)
        + (79 * Z**9 + 776 * Z**7 + 1482 * Z**5 - 1920 * Z**3 - 945 * Z) / (92160 * v**4)
    )
