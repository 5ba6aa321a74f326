"""Who has how much of RUN, and who gives way: loads in, shares and names out. Pure.

Slots are shared by weight, first among tenants, then among a tenant's runs; what one does not want
the others get. A share need not be whole: a run is *due* the whole slots of its share, and one in
any case, so that on few slots runs take turns.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor
from typing import NamedTuple

from prorl.types import AttemptKey

_EPS = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLoad:
    """A run that wants slots of RUN."""

    run_id: str
    tenant: str = "default"
    weight: float = 1.0
    tenant_weight: float = 1.0
    running: int
    """Slots that it has."""
    wanted: int
    """Slots that it could use now, with those that it has."""
    suspended: int = 0
    """Its attempts that stand still and were not told to go on."""
    waking: int = 0
    """Those that were, and wait for a slot."""


class Candidate(NamedTuple):
    """A running attempt that may be made to stand still."""

    run_id: str
    since: float
    """When it got its slot."""
    key: AttemptKey


def fill(total: float, claims: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Share `total` by (weight, wanted); what one does not want goes to the others.

    >>> fill(8, {"a": (1, 100), "b": (1, 2), "c": (2, 100)})
    {'b': 2, 'a': 2.0, 'c': 4.0}
    """
    given: dict[str, float] = {}
    left = dict(claims)
    while left:
        each = max(0.0, total) / sum(weight for weight, _ in left.values())
        full = [name for name, (weight, wanted) in left.items() if wanted <= each * weight]
        if not full:
            return given | {name: each * weight for name, (weight, _) in left.items()}
        for name in full:
            given[name] = left.pop(name)[1]
            total -= given[name]
    return given


def fair_slots(slots: int, loads: Iterable[RunLoad]) -> dict[str, float]:
    """The share of each run."""
    tenants: dict[str, list[RunLoad]] = defaultdict(list)
    for load in loads:
        tenants[load.tenant].append(load)
    of_tenants = fill(
        slots,
        {
            name: (runs[0].tenant_weight, sum(r.wanted for r in runs))
            for name, runs in tenants.items()
        },
    )
    shares: dict[str, float] = {}
    for name, runs in tenants.items():
        shares |= fill(of_tenants[name], {r.run_id: (r.weight, r.wanted) for r in runs})
    return shares


def due(share: float, load: RunLoad) -> int:
    """The whole slots of a share, and one in any case."""
    return min(load.wanted, max(1, floor(share + _EPS)))


def short(slots: int, loads: Sequence[RunLoad]) -> dict[str, int]:
    """Runs that have less than they are due, and how much less."""
    shares = fair_slots(slots, loads)
    missing = {load.run_id: due(shares[load.run_id], load) - load.running for load in loads}
    return {run_id: count for run_id, count in missing.items() if count > 0}


def victims(
    slots: int,
    loads: Sequence[RunLoad],
    starving: Collection[str],
    candidates: Iterable[Candidate],
) -> list[AttemptKey]:
    """Attempts that give way to runs that starve.

    Of the run that is furthest over its share goes the one that has had its slot longest. No run is
    brought below the whole slots of its share.

    >>> loads = [RunLoad(run_id="a", running=2, wanted=9), RunLoad(run_id="b", running=0, wanted=1)]
    >>> held = [Candidate("a", since, AttemptKey("a", since, 1)) for since in (7, 5)]
    >>> [key.rollout_id for key in victims(2, loads, ["b"], held)]
    [5]
    """
    shares = fair_slots(slots, loads)
    running = {load.run_id: load.running for load in loads}
    missing = short(slots, loads)
    free = max(0, slots - sum(running.values()))
    by_run: dict[str, list[Candidate]] = defaultdict(list)
    for candidate in sorted(candidates, key=lambda one: one.since, reverse=True):
        by_run[candidate.run_id].append(candidate)
    chosen: list[AttemptKey] = []
    for _ in range(sum(missing.get(run_id, 0) for run_id in starving) - free):
        over = [r for r, held in by_run.items() if held and running[r] > floor(shares[r] + _EPS)]
        if not over:
            break
        most = max(over, key=lambda r: running[r] - shares[r])
        chosen.append(by_run[most].pop().key)
        running[most] -= 1
    return chosen


def to_wake(slots: int, loads: Sequence[RunLoad]) -> Counter[str]:
    """How many of each run's attempts that stand still go on now.

    First what each run is due, then what nobody is due.
    """
    shares = fair_slots(slots, loads)
    woken: Counter[str] = Counter()
    has = {load.run_id: load.running + load.waking for load in loads}
    for load in loads:
        wanted = due(shares[load.run_id], load) - has[load.run_id]
        woken[load.run_id] = max(0, min(load.suspended, wanted))
        has[load.run_id] += woken[load.run_id]
    free = slots - sum(max(has[one.run_id], due(shares[one.run_id], one)) for one in loads)
    for _ in range(free):
        still = [one for one in loads if one.suspended > woken[one.run_id]]
        if not still:
            break
        least = min(still, key=lambda one: has[one.run_id] / (one.weight * one.tenant_weight))
        woken[least.run_id] += 1
        has[least.run_id] += 1
    return +woken
