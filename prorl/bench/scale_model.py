"""A discrete-event model of one gateway, one store and N nodes, fed with measured costs.

    python -m prorl.bench.scale_model        # the table, with the costs below

Each RUN slot has one rollout after the other: it asks for a lease, works for a time drawn from the
measured ones, and its row is stored. Gateway and store are one core each and take one thing after
the other: a rollout costs the gateway `gateway_s` of CPU and the store `store_s`, and every node
costs the gateway `node_share` of a core (heartbeats). What is not modelled: the network (a round
trip is hidden by leases ahead of credit), fsync (shared by all that wait), and model servers, which
are assumed to keep up.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The measured costs that feed the simulation."""

    gateway_s: float
    """CPU seconds of the gateway for a rollout."""
    store_s: float
    """CPU seconds of the store for a rollout."""
    node_share: float = 0.0045
    """CPU seconds a second that a node costs the gateway."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a number of nodes gives."""

    nodes: int
    rate: float
    """Rollouts a second."""
    efficiency: float
    """Of the rate that so many nodes would have if nothing were shared."""
    gateway_busy: float
    """Share of its core."""
    store_busy: float


def simulate(
    nodes: int, slots: int, times_s: Sequence[float], costs: Costs, *, per_slot: int = 8
) -> Point:
    """Run `nodes` of `slots` slots until each slot has had `per_slot` rollouts on average; the
    first quarter is warm-up. Equal arguments give an equal point.

    >>> alone = simulate(1, 16, [10.0], Costs(gateway_s=0.002, store_s=0.002))
    >>> 0.98 < alone.efficiency <= 1.0
    True
    """
    draw = random.Random(nodes).choice
    slowed = max(1e-9, 1.0 - nodes * costs.node_share)  # of its core that is left for rollouts
    lease_s, stored_s = costs.gateway_s / slowed, costs.store_s
    total, warm = nodes * slots * per_slot, nodes * slots * per_slot // 4
    # Slots start spread over the mean time, as they do once a service has run for a while.
    mean_s = sum(times_s) / len(times_s)
    spread = random.Random(nodes + 1).uniform
    ends = [spread(0.0, mean_s) for _ in range(nodes * slots)]
    heapq.heapify(ends)
    gateway_free = store_free = began_s = ended_s = 0.0
    for done in range(total):
        now = heapq.heappop(ends)
        store_free = max(store_free, now) + stored_s
        # A row that the store has not taken holds its place in EVAL: the slot waits for it.
        gateway_free = max(gateway_free, now) + lease_s
        ended_s = max(gateway_free, store_free)
        heapq.heappush(ends, ended_s + draw(times_s))
        if done == warm:
            began_s = ended_s
    took_s = max(ended_s - began_s, 1e-9)
    rate = (total - 1 - warm) / took_s
    return Point(
        nodes=nodes,
        rate=rate,
        efficiency=min(1.0, rate * mean_s / (nodes * slots)),
        gateway_busy=min(1.0, rate * costs.gateway_s + nodes * costs.node_share),
        store_busy=min(1.0, rate * costs.store_s),
    )


def saturation(slots: int, times_s: Sequence[float], costs: Costs, floor: float = 0.95) -> int:
    """The largest power of two up to 1,024 at which efficiency is still at least `floor`."""
    best = 0
    for nodes in (2**power for power in range(11)):
        if simulate(nodes, slots, times_s, costs).efficiency >= floor:
            best = nodes
    return best
