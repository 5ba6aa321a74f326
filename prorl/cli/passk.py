"""pass@k of a stored run, with an interval: SQL over its rollouts, then two formulas.

    pass@k of a task with c right of n:  1 - C(n - c, k) / C(n, k)
    (unbiased; Chen et al. 2021, arXiv 2107.03374)

The interval is Wilson's 95 % score interval over tasks. For n > 1 it is too wide rather than too
narrow: a task's estimate varies less than the coin that Wilson assumes. Masked rollouts
(infrastructure, tasks) do not count; how many there were is stated.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from prorl.types import Json

Z = 1.959964
"""Of a two-sided 95 % interval."""

PER_TASK = """
select data_source,
    coalesce(json_extract_string(nullif(extra, ''), '$.mode'), 'sampled') as mode, group_id,
    count(*) filter (valid) as n, count(*) filter (valid and reward >= {threshold}) as right_,
    count(*) filter (not valid) as masked
from rollouts group by all order by data_source, mode desc, group_id
"""


class Estimate(NamedTuple):
    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


class Passed(NamedTuple):
    data_source: str
    mode: str
    """`sampled` or `greedy`."""
    tasks: int
    n: int
    """Rollouts of each task that count, at least."""
    masked: int
    at: dict[int, Estimate]
    """pass@k by k."""

    def to_json(self) -> dict[str, Json]:
        return {**self._asdict(), "at": {str(k): one._asdict() for k, one in self.at.items()}}


def pass_at_k(n: int, right: int, k: int) -> float:
    """Probability that one of k rollouts drawn without replacement from n is right.

    >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 4), pass_at_k(4, 2, 2)
    (0.25, 1.0, 0.8333333333333334)
    """
    return 1.0 - math.comb(n - right, k) / math.comb(n, k)


def wilson(mean: float, count: int) -> Estimate:
    """Wilson's score interval of a share over `count` draws.

    >>> print(wilson(0.5, 100), wilson(1.0, 100))
    0.500 [0.404, 0.596] 1.000 [0.963, 1.000]
    >>> wilson(0.0, 96).low
    0.0
    """
    if not count:
        return Estimate(math.nan, 0.0, 1.0)
    shrink = 1 + Z * Z / count
    middle = (mean + Z * Z / (2 * count)) / shrink
    half = Z / shrink * math.sqrt(max(0.0, mean * (1 - mean)) / count + Z * Z / (4 * count * count))
    # at shares 0 and 1 rounding would leave the share itself out
    low, high = min(mean, middle - half), max(mean, middle + half)
    return Estimate(mean, max(0.0, low), min(1.0, high))


def estimate(tasks: Sequence[tuple[int, int]]) -> dict[int, Estimate]:
    """pass@1, 2, 4 ... n from (n, right) of each task, n the smallest of them.

    >>> {k: round(one.value, 3) for k, one in estimate([(4, 0), (4, 2)]).items()}
    {1: 0.25, 2: 0.417, 4: 0.5}
    """
    n = min((n for n, _ in tasks), default=0)
    found = {}
    for k in _steps(n):
        found[k] = wilson(
            sum(pass_at_k(n_task, right, k) for n_task, right in tasks) / len(tasks), len(tasks)
        )
    return found


def _steps(n: int) -> Iterator[int]:
    k = 1
    while k < n:
        yield k
        k *= 2
    if n:
        yield n


def evaluation(directory: Path, threshold: float = 1.0) -> list[Passed]:
    """Every (data source, mode) of a stored run, without tasks of which no rollout counts."""
    from prorl.storage.read.catalog import StoredRun

    rows = StoredRun(directory).sql(PER_TASK.format(threshold=float(threshold))).to_pylist()
    found = []
    for source, mode in dict.fromkeys((row["data_source"], row["mode"]) for row in rows):
        here = [row for row in rows if (row["data_source"], row["mode"]) == (source, mode)]
        tasks = [(row["n"], row["right_"]) for row in here if row["n"]]
        masked = sum(row["masked"] for row in here)
        found.append(
            Passed(
                source,
                mode,
                len(tasks),
                min((n for n, _ in tasks), default=0),
                masked,
                estimate(tasks),
            )
        )
    return found
