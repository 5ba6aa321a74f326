"""pass@k of a stored run, with an interval: SQL over its view `passk`, then one formula.

The interval is Wilson's 95 % score interval over tasks. For n > 1 it is too wide rather than too
narrow: a task's estimate varies less than the coin that Wilson assumes. Masked rollouts
(infrastructure, tasks) do not count; how many there were is stated.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

from prorl.types import Json

Z = 1.959964
"""The quantile of a two-sided 95 % interval."""

_SETS = """
with members as (
    select data_source, group_id,
        coalesce(json_extract_string(nullif(extra, ''), '$.mode'), 'sampled') as mode,
        count(*) filter (valid) as n, count(*) filter (not valid) as masked
    from rollouts group by all),
sets as (
    select data_source, mode, count(*) filter (n > 0) as tasks,
        coalesce(min(n) filter (n > 0), 0) as n, sum(masked)::bigint as masked
    from members group by all)
select sets.*, k, avg(pass_at_k) as share
from sets join members m using (data_source, mode)
    left join passk p on p.group_id = m.group_id and p.k <= sets.n
group by all order by data_source, mode desc, k"""


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
        return {
            **self._asdict(),
            "at": {str(k): estimate._asdict() for k, estimate in self.at.items()},
        }


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


def evaluation(directory: Path) -> list[Passed]:
    """Returns each (data source, mode) of a run, without tasks of which no rollout counts."""
    from prorl.storage.read.catalog import StoredRun

    sets: dict[tuple[str, str], Passed] = {}
    for row in StoredRun(directory).sql(_SETS).to_pylist():
        k, share = row.pop("k"), row.pop("share")
        passed = sets.setdefault((row["data_source"], row["mode"]), Passed(**row, at={}))
        if k is not None:
            passed.at[k] = wilson(share, passed.tasks)
    return list(sets.values())
