"""A discrete-event model of one gateway, one store and N nodes, fed with measured costs.

Each RUN slot has one rollout after the other: it asks for a lease, works for a time drawn from the
measured ones, and its row is stored. Gateway and store are one core each and take one thing after
the other: a rollout costs the gateway `gateway_s` of CPU and the store `store_s`, and every node
costs the gateway `node_share` of a core (heartbeats). `handoff_s` is what a rollout waits between
two stages when nobody is busy. What is not modelled: the network (a round trip is hidden by leases
ahead of credit), fsync (shared by all that wait), and model servers, which are assumed to keep up.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

FIRST, LAST = 0.2, 0.7
"""Of a run's rollouts: from the one's end to the other's there is work for every slot."""

Times = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The measured costs that feed the simulation."""

    gateway_s: float
    """CPU seconds of the gateway for a rollout."""
    store_s: float
    """CPU seconds of the store for a rollout."""
    node_share: float = 0.0045
    """CPU seconds a second that a node costs the gateway."""
    base_share: float = 0.0
    """The same of a gateway without nodes."""
    handoff_s: float = 0.0
    """What a slot is empty between two rollouts."""
    gateways: int = 1
    """Each with a store of its own, and an equal part of the nodes: runs are divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    nodes: int
    rate: float
    """Rollouts of the mean length a second."""
    efficiency: float
    """Share of the slots' time that is work: of what so many nodes would do if all was free."""
    gateway_busy: float
    """Share of its core."""
    store_busy: float


def simulate(
    nodes: int, slots: int, times_s: Sequence[float], costs: Costs, *, per_slot: int = 16
) -> Point:
    """Run `nodes` of `slots` slots until each slot has had `per_slot` rollouts on average.

    Equal arguments give an equal point.

    >>> alone = simulate(1, 16, [10.0], Costs(gateway_s=0.002, store_s=0.002))
    >>> 0.98 < alone.efficiency <= 1.0
    True
    """
    mean_s = sum(times_s) / len(times_s)
    starts = _starts(mean_s, nodes, -(-nodes * slots // costs.gateways))
    ended, times = np.array(_stored(starts, nodes, times_s, costs, len(starts) * per_slot)).T
    worked = worked_share(ended, times, len(starts))
    rate = worked * nodes * slots / mean_s
    return Point(
        nodes=nodes,
        rate=rate,
        efficiency=min(1.0, worked),
        gateway_busy=min(1.0, rate / costs.gateways * costs.gateway_s + _shared(nodes, costs)),
        store_busy=min(1.0, rate / costs.gateways * costs.store_s),
    )


def _starts(mean_s: float, nodes: int, slots: int) -> list[float]:
    """When slots are free first: spread over the mean time, as after a service has run a while."""
    spread = random.Random(nodes + 1).uniform
    return [spread(0.0, mean_s) for _ in range(slots)]


def _shared(nodes: int, costs: Costs) -> float:
    """The share of a gateway's core that goes to its nodes and itself, whatever the rate."""
    return costs.base_share + nodes / costs.gateways * costs.node_share


def worked_share(ended: Times, worked: Times, slots: int) -> float:
    """Share of the time of so many slots in which work was done.

    From when `FIRST` of all rollouts had ended until `LAST` had. `ended`: when they did; `worked`:
    how long each was work, both in seconds.
    """
    began, until = np.quantile(ended, (FIRST, LAST), method="nearest")
    inside = np.minimum(ended, until) - np.maximum(ended - worked, began)
    return float(np.maximum(inside, 0.0).sum() / (until - began) / slots)


class _Stored(NamedTuple):
    at: float
    worked_s: float


def _stored(
    free_at: list[float], nodes: int, times_s: Sequence[float], costs: Costs, total: int
) -> list[_Stored]:
    """The first `total` rollouts of many, given when each slot is free for its first one."""
    deal = _dealt(times_s, random.Random(nodes))
    lease_s = costs.gateway_s / max(1e-3, 1.0 - _shared(nodes, costs))
    slots = list(free_at)
    heapq.heapify(slots)
    # Rollouts that work, by their end; a slot is either here or there.
    working: list[_Stored] = []
    gateway_free = store_free = 0.0
    stored: list[_Stored] = []
    while len(stored) < total:
        if slots and (not working or slots[0] <= working[0].at):
            gateway_free = max(gateway_free, heapq.heappop(slots)) + lease_s
            work_s = next(deal)
            heapq.heappush(working, _Stored(gateway_free + costs.handoff_s + work_s, work_s))
        else:
            # A row that the store has not taken holds its place in EVAL: the slot waits for it.
            done = heapq.heappop(working)
            store_free = max(store_free, done.at) + costs.store_s
            stored.append(_Stored(store_free, done.worked_s))
            heapq.heappush(slots, store_free)
    return stored


def _dealt(times_s: Sequence[float], draw: random.Random) -> Iterator[float]:
    """The times in random order, again and again.

    Each comes as often as the others, as it does from servers that are kept equally busy.
    """
    while True:
        yield from draw.sample(times_s, len(times_s))


def saturation(slots: int, times_s: Sequence[float], costs: Costs, floor: float = 0.95) -> int:
    """The most nodes, a power of two up to 1,024, of which each gives `floor` of what one does."""
    best, one = 0, simulate(1, slots, times_s, costs).rate
    for nodes in (2**power for power in range(11)):
        if simulate(nodes, slots, times_s, costs).rate >= floor * nodes * one:
            best = nodes
    return best
