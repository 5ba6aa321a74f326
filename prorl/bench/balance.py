"""`prorl bench balance`: how long rollouts take when `prorl.service.balancer` says who serves them,
beside other ways to choose.

Simulated servers, the real balancer and the real paces. A server decodes its requests together,
each slower the more there are; a rollout is turns of heavy-tailed length with tool calls between
them, stays on its server, and another begins when one ends. All see the same rollouts; seeds are
repeats. Rivals: ProRL's heap over all that was ever assigned (a count that never goes down), round
robin, a hash of the task, our own without the paces, and one that knows what each rollout will
sample and how fast servers are: what even that does not reach cannot be had by choosing servers.

Not simulated: prefill, and prefix caches, which favour whoever stays.
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
from prorl.control import Served
from prorl.service.balancer import Balancer
from prorl.service.pace import Paces

SERVERS, ROLLOUTS = 8, 1500
STEP_S, TELL_S = 0.05, 0.5
ALONE_HZ = 60.0
"""Tokens a second of a request that is alone."""
MEAN_TURNS, MEAN_TOKENS, MEAN_TOOL_S, SIGMA = 6.0, 150.0, 2.0, 1.0
BAR = 1.3
Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
HEAP, OURS = "cumulative heap", "ours"


class Pick(Protocol):
    """A way to choose a rollout's server."""

    def begin(self, rollout: int, task: int, tokens: float) -> int: ...
    def heard(self, server: int, tokens: float, seconds: float) -> None: ...
    def end(self, rollout: int) -> None: ...
    def join(self, server: int) -> None: ...
    def tell(self, now: float) -> None: ...


class Cumulative:
    """The server that was given least since it came."""

    def __init__(self, servers: range, speed_S: Floats) -> None:
        self._given, self._speed_S = dict.fromkeys(servers, 0.0), speed_S

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """The smallest count, which grows."""
        server = min(self._given, key=lambda one: (self._given[one], one))
        self._given[server] += 1
        return server

    def heard(self, server: int, tokens: float, seconds: float) -> None:
        """A turn of so many tokens took so long. Not heard."""

    def end(self, rollout: int) -> None:
        """Not heard."""

    def join(self, server: int) -> None:
        """Its count begins at 0."""
        self._given[server] = 0.0

    def tell(self, now: float) -> None:
        """The clock. Not heard."""


class RoundRobin(Cumulative):
    """One after the other."""

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """The next."""
        return list(self._given)[rollout % len(self._given)]


class Hashed(Cumulative):
    """The server with the smallest hash of itself and the task (rendezvous)."""

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """The same one for a task, always."""
        return min(self._given, key=lambda server: _hash(f"{task}/{server}"))


class Knows(Cumulative):
    """The server with the least left to do."""

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """By tokens that will be sampled there, this rollout's too, and the server's speed."""
        server = min(self._given, key=lambda s: ((self._given[s] + tokens) / self._speed_S[s], s))
        self._given[server] += tokens
        return server

    def heard(self, server: int, tokens: float, seconds: float) -> None:
        """So many less."""
        self._given[server] -= tokens


class Counted(Cumulative):
    """Our balancer, by rollouts in flight alone."""

    def __init__(self, servers: range, speed_S: Floats) -> None:
        self._balancer = Balancer([str(server) for server in servers])

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        """The least loaded."""
        return int(self._balancer.acquire(rollout) or 0)

    def end(self, rollout: int) -> None:
        """Its place is free."""
        self._balancer.release(rollout)

    def join(self, server: int) -> None:
        """One more."""
        self._balancer.add(str(server))


class Ours(Counted):
    """With the paces of servers."""

    def __init__(self, servers: range, speed_S: Floats) -> None:
        super().__init__(servers, speed_S)
        self._now = 0.0
        self._paces = Paces(lambda: self._now)

    def heard(self, server: int, tokens: float, seconds: float) -> None:
        """As RUN says it."""
        self._paces.add(str(server), Served(sampled=round(tokens), llm_s=seconds))

    def tell(self, now: float) -> None:
        """As the gateway hears it."""
        self._now = now
        self._balancer.weigh(self._paces.weights())


def _hash(text: str) -> bytes:
    return blake2b(text.encode(), digest_size=8).digest()


PICKS: Mapping[str, Callable[[range, Floats], Pick]] = {
    OURS: Ours,
    HEAP: Cumulative,
    "round robin": RoundRobin,
    "hash of the task": Hashed,
    "without paces": Counted,
    "knows the work": Knows,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What the servers are, and what they are asked."""

    each: int = 32
    """Rollouts at a time, a server."""
    slow: int = 0
    """So many servers are slow."""
    speed: float = 0.5
    """Theirs."""
    late: int = 0
    """So many join after a third of the rollouts."""
    together_hz: float = 900.0
    """Tokens a second of all requests of a server together, at most."""
    hard: float = 0.0
    """Sigma of a task's own factor on all turns of its rollouts."""


LOADS = {
    "even": Load(),
    "even_few": Load(each=8),
    "even_full": Load(each=16, together_hz=240.0),
    "hard_tasks": Load(hard=1.0),
    "slow": Load(slow=1),
    "slow_half": Load(slow=4),
    "slow_half_few": Load(each=8, slow=4, speed=1 / 3),
    "slow_half_hard": Load(slow=4, hard=1.0),
    "late": Load(late=1),
    "late_half": Load(late=4),
}


@dataclass(frozen=True, slots=True)
class Work:
    """Rollouts, the same for everybody."""

    tokens: list[Floats]
    tools_s: list[Floats]

    @classmethod
    def draw(cls, load: Load, seed: int, rollouts: int) -> Work:
        """Turns of each rollout; the eight of a task share its factor."""
        draws = np.random.default_rng(seed)
        counts = 1 + draws.geometric(1 / MEAN_TURNS, rollouts)
        factors = draws.lognormal(0.0, load.hard, rollouts // 8 + 1)
        tokens = [_lognormal(draws, MEAN_TOKENS, n) * factors[i // 8] for i, n in enumerate(counts)]
        return cls(tokens, [_lognormal(draws, MEAN_TOOL_S, n) for n in counts])


def simulate(make: Callable[[range, Floats], Pick], load: Load, work: Work) -> list[float]:
    """Seconds of each rollout."""
    rollouts, places = len(work.tokens), load.each * SERVERS
    speed = np.ones(SERVERS)
    speed[: load.slow] = load.speed
    pick = make(range(SERVERS - load.late), speed)
    server_B, owner_B = np.zeros(places, int), np.full(places, -1)
    turn_B, began_B, asked_B = np.zeros(places, int), np.zeros(places), np.zeros(places)
    left_B, free_at_B = np.zeros(places), np.zeros(places)
    taken: list[float] = []
    fresh, now, told = itertools.count(), 0.0, 0.0

    def start(place: int) -> None:
        rollout = next(fresh)
        if rollout == max(places, rollouts // 3):
            for late in range(SERVERS - load.late, SERVERS):
                pick.join(late)
        if rollout >= rollouts:
            owner_B[place], left_B[place], free_at_B[place] = -1, np.inf, np.inf
            return
        tokens = work.tokens[rollout]
        owner_B[place], turn_B[place], began_B[place] = rollout, 0, now
        server_B[place] = pick.begin(rollout, rollout // 8, float(tokens.sum()))
        left_B[place], free_at_B[place], asked_B[place] = tokens[0], now, now

    for place in range(places):
        start(place)
    while len(taken) < rollouts:
        now += STEP_S
        if now - told >= TELL_S:
            told = now
            pick.tell(now)
        decoding_B = (free_at_B <= now) & (owner_B >= 0)
        busy_S = np.bincount(server_B[decoding_B], minlength=SERVERS)
        hz_S = speed * np.minimum(ALONE_HZ, load.together_hz / np.maximum(busy_S, 1))
        left_B[decoding_B] -= STEP_S * hz_S[server_B[decoding_B]]
        for place in np.flatnonzero(decoding_B & (left_B <= 0)).tolist():
            rollout, turn = int(owner_B[place]), int(turn_B[place])
            tokens, tools_s = work.tokens[rollout], work.tools_s[rollout]
            pick.heard(int(server_B[place]), float(tokens[turn]), now - float(asked_B[place]))
            if turn + 1 < len(tokens):
                turn_B[place], left_B[place] = turn + 1, tokens[turn + 1]
                free_at_B[place] = asked_B[place] = now + tools_s[turn + 1]
            else:
                taken.append(now - began_B[place])
                pick.end(rollout)
                start(place)
    return taken


def _lognormal(draws: np.random.Generator, mean: float, count: int) -> Floats:
    return draws.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, int(count))


async def run(quick: bool) -> Report:
    """Simulate; `quick` takes half of the rollouts and one seed."""
    rollouts, seeds = (ROLLOUTS // 2, 1) if quick else (ROLLOUTS, 3)
    rows: list[Figure] = []
    for name, load in LOADS.items():
        began = time.process_time()
        works = [Work.draw(load, seed, rollouts) for seed in range(seeds)]
        p90_s = {
            pick: [float(np.quantile(simulate(make, load, work), 0.9)) for work in works]
            for pick, make in PICKS.items()
        }
        rows += _rows(name, p90_s, time.process_time() - began)
    return Report(bench="balance", machine=machine(), rows=tuple(rows))


def _rows(name: str, p90_s: dict[str, list[float]], cpu_s: float) -> list[Figure]:
    ours = statistics.median(p90_s[OURS])
    known = statistics.median(p90_s[HEAP]) / statistics.median(p90_s["knows the work"])
    rows = []
    for rival, values in p90_s.items():
        if rival == OURS:
            continue
        ratio, note = statistics.median(values) / ours, ""
        if rival == HEAP and ratio >= BAR:
            note = f"bar {BAR}x: met"
        elif rival == HEAP:
            note = f"bar {BAR}x: missed; one that knows the work has {known:.2f}x"
        rows.append(
            Figure(
                what=f"rollout_p90_s.{name}",
                value=ours,
                unit="s",
                repeats=tuple(p90_s[OURS]),
                cpu_s=cpu_s,
                rival=rival,
                rival_value=statistics.median(values),
                rival_command=f"prorl.bench.balance, {rival}",
                ratio=ratio,
                note=note,
            )
        )
    return rows
