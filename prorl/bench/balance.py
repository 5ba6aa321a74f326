"""`prorl bench balance`: how long rollouts take when `prorl.service.balancer` says who serves them,
beside other ways to choose.

Simulated servers, the real balancer. A server decodes its requests together, each slower the more
there are; a rollout is turns of heavy-tailed length with tool calls between them, stays on its
server, and another begins when one ends. Three loads: equal servers, one of half the speed, one
that joins after a third of the rollouts. Rivals: ProRL's heap over all that was ever assigned (a
count that never goes down), round robin, a hash of the task. All see the same rollouts; seeds are
repeats.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np

from prorl.bench.report import Figure, Report, machine
from prorl.service.balancer import Balancer

SERVERS, ROLLOUTS, IN_FLIGHT = 8, 3000, 256
STEP_S = 0.05
ALONE_HZ, TOGETHER_HZ = 60.0, 900.0
"""Tokens a second of a request: alone, and of all together at most."""
MEAN_TURNS, MEAN_TOKENS, MEAN_TOOL_S, SIGMA = 6.0, 150.0, 2.0, 1.0
BAR = 1.3


class Pick(Protocol):
    """A way to choose a rollout's server."""

    def begin(self, rollout: int, task: int) -> int: ...
    def end(self, rollout: int) -> None: ...
    def join(self, server: int) -> None: ...


class InFlight:
    """Our balancer: the server with the least in flight."""

    def __init__(self, servers: range) -> None:
        self._balancer = Balancer([str(server) for server in servers])

    def begin(self, rollout: int, task: int) -> int:
        """The least loaded."""
        return int(self._balancer.acquire(rollout) or 0)

    def end(self, rollout: int) -> None:
        """Its place is free."""
        self._balancer.release(rollout)

    def join(self, server: int) -> None:
        """One more."""
        self._balancer.add(str(server))


class Cumulative:
    """The server that was given least since it came."""

    def __init__(self, servers: range) -> None:
        self._given = dict.fromkeys(servers, 0)

    def begin(self, rollout: int, task: int) -> int:
        """The smallest count, which grows."""
        server = min(self._given, key=lambda one: (self._given[one], one))
        self._given[server] += 1
        return server

    def end(self, rollout: int) -> None:
        """Not heard."""

    def join(self, server: int) -> None:
        """Its count begins at 0."""
        self._given[server] = 0


class RoundRobin(Cumulative):
    """Servers one after the other."""

    def begin(self, rollout: int, task: int) -> int:
        """The next."""
        return list(self._given)[rollout % len(self._given)]


class Hashed(Cumulative):
    """The first server after the task's place on a ring."""

    def begin(self, rollout: int, task: int) -> int:
        """The one with the smallest hash of both (rendezvous)."""
        return min(self._given, key=lambda server: _hash(f"{task}/{server}"))


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


PICKS: Mapping[str, Callable[[range], Pick]] = {
    "in flight": InFlight,
    "cumulative heap": Cumulative,
    "round robin": RoundRobin,
    "hash of the task": Hashed,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The servers and the rollouts of a simulation."""

    slow: int = 0
    """So many have half of the speed."""
    late: int = 0
    """So many join after a third of the rollouts."""


LOADS = {"even": Load(), "slow": Load(slow=1), "late": Load(late=1)}


def simulate(make: Callable[[range], Pick], load: Load, seed: int, rollouts: int) -> list[float]:
    """Run one simulation; returns the seconds that each rollout took."""
    draws = np.random.default_rng(seed)
    turns = 1 + draws.geometric(1 / MEAN_TURNS, rollouts)
    works = [_lognormal(draws, MEAN_TOKENS, count) for count in turns]
    tools = [_lognormal(draws, MEAN_TOOL_S, count) for count in turns]
    speed = np.ones(SERVERS)
    speed[: load.slow] = 0.5
    pick = make(range(SERVERS - load.late))
    server_B = np.zeros(IN_FLIGHT, int)
    owner_B = np.full(IN_FLIGHT, -1)
    turn_B, began_B = np.zeros(IN_FLIGHT, int), np.zeros(IN_FLIGHT)
    left_B, free_at_B = np.zeros(IN_FLIGHT), np.zeros(IN_FLIGHT)
    taken: list[float] = []
    fresh, now = itertools.count(), 0.0

    def start(place: int) -> None:
        rollout = next(fresh)
        if rollout == rollouts // 3:
            for late in range(SERVERS - load.late, SERVERS):
                pick.join(late)
        if rollout >= rollouts:
            owner_B[place], left_B[place], free_at_B[place] = -1, np.inf, np.inf
            return
        owner_B[place], turn_B[place], began_B[place] = rollout, 0, now
        server_B[place] = pick.begin(rollout, rollout // 8)
        left_B[place], free_at_B[place] = works[rollout][0], now

    for place in range(IN_FLIGHT):
        start(place)
    while len(taken) < rollouts:
        now += STEP_S
        decoding_B = (free_at_B <= now) & (owner_B >= 0)
        busy_S = np.bincount(server_B[decoding_B], minlength=SERVERS)
        hz_S = speed * np.minimum(ALONE_HZ, TOGETHER_HZ / np.maximum(busy_S, 1))
        left_B[decoding_B] -= STEP_S * hz_S[server_B[decoding_B]]
        for place in np.flatnonzero(decoding_B & (left_B <= 0)).tolist():
            rollout, turn = int(owner_B[place]), int(turn_B[place]) + 1
            if turn < turns[rollout]:
                turn_B[place], left_B[place] = turn, works[rollout][turn]
                free_at_B[place] = now + tools[rollout][turn]
            else:
                taken.append(now - began_B[place])
                pick.end(rollout)
                start(place)
    return taken


def _lognormal(
    draws: np.random.Generator, mean: float, count: int
) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return draws.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, int(count))


async def run(quick: bool) -> Report:
    """Simulate; `quick` takes a third of the rollouts and one seed less."""
    rollouts, seeds = (ROLLOUTS // 3, 2) if quick else (ROLLOUTS, 3)
    rows = []
    for name, load in LOADS.items():
        p90_s: dict[str, list[float]] = {}
        began = time.process_time()
        for pick, make in PICKS.items():
            runs = (simulate(make, load, seed, rollouts) for seed in range(seeds))
            p90_s[pick] = [float(np.quantile(taken, 0.9)) for taken in runs]
        cpu_s = time.process_time() - began
        ours = statistics.median(p90_s.pop("in flight"))
        for rival, values in p90_s.items():
            ratio = statistics.median(values) / ours
            heap = rival == "cumulative heap"
            rows.append(
                Figure(
                    what=f"rollout_p90_s.{name}",
                    value=ours,
                    unit="s",
                    repeats=tuple(values),
                    cpu_s=cpu_s,
                    rival=rival,
                    rival_value=statistics.median(values),
                    rival_command=f"prorl.bench.balance, {rival}",
                    ratio=ratio,
                    note=f"bar {BAR}x: {'met' if ratio >= BAR else 'missed'}" if heap else "",
                )
            )
    return Report(bench="balance", machine=machine(), rows=tuple(rows))
