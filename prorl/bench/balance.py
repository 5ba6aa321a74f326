"""Rows of `prorl bench inference`: how long rollouts take by who says which server serves them.

Simulated servers, the real `prorl.service.pool.balancer` and the real paces. A rollout is turns of
heavy-tailed length with tool calls between them, stays on its server, and another begins when one
ends. All see the same rollouts; seeds are repeats. Rivals: ProRL's heap over all that was ever
assigned (a count that never goes down), and one that knows what each rollout will sample and how
fast servers are: what even that does not reach cannot be had by choosing servers.

Not simulated: prefill, and prefix caches, which favour whoever stays.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from prorl.bench.report import Figure, median
from prorl.control import Served
from prorl.service.pool.backend_watch import Paces
from prorl.service.pool.balancer import Balancer

ROLLOUTS = 1500
BAR = 1.3


def rows(quick: bool) -> list[Figure]:
    rollouts, seeds = (ROLLOUTS // 2, 1) if quick else (ROLLOUTS, 3)
    found: list[Figure] = []
    for name, load in LOADS.items():
        began = time.process_time()
        works = [Work.draw(load, seed, rollouts) for seed in range(seeds)]
        p90_s = {
            pick: [float(np.quantile(simulate(make, load, work), 0.9)) for work in works]
            for pick, make in PICKS.items()
        }
        found += _of_load(name, p90_s, time.process_time() - began)
    return found


def _of_load(name: str, p90_s: dict[str, list[float]], cpu_s: float) -> list[Figure]:
    ours = median(f"rollout_p90_s.{name}", p90_s[OURS], "s", cpu_s=cpu_s)
    middles = {pick: statistics.median(values) for pick, values in p90_s.items()}
    best = middles[HEAP] / middles[ALL_KNOWN]
    return [
        replace(
            ours.beside(rival, value, f"prorl.bench.balance, {rival}"),
            note=_note(value / ours.value, best) if rival == HEAP else "",
        )
        for rival, value in middles.items()
        if rival != OURS
    ]


def _note(ratio: float, best: float) -> str:
    """Whether the bar is met; `best`: what one has that knows the work."""
    if ratio >= BAR:
        return f"bar {BAR}x: met"
    return f"bar {BAR}x: missed; one that knows the work has {best:.2f}x"


Floats = np.ndarray[tuple[int], np.dtype[np.float64]]
HEAP, OURS, ALL_KNOWN = "cumulative heap", "ours", "knows the work"


class Cumulative:
    """The server that was given least since it came."""

    def __init__(self, servers: range, speed_S: Floats) -> None:
        self._given, self._speed_S = dict.fromkeys(servers, 0.0), speed_S

    def begin(self, rollout: int, task: int, tokens: float) -> int:
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


class Ours(Cumulative):
    """Our balancer: rollouts in flight, weighted with the paces of servers."""

    def __init__(self, servers: range, speed_S: Floats) -> None:
        self._balancer = Balancer([str(server) for server in servers])
        self._now = 0.0
        self._paces = Paces(lambda: self._now)

    def begin(self, rollout: int, task: int, tokens: float) -> int:
        return int(self._balancer.acquire(rollout) or 0)

    def heard(self, server: int, tokens: float, seconds: float) -> None:
        self._paces.add(str(server), Served(sampled=round(tokens), llm_s=seconds))

    def end(self, rollout: int) -> None:
        self._balancer.release(rollout)

    def join(self, server: int) -> None:
        self._balancer.add(str(server))

    def tell(self, now: float) -> None:
        self._now = now
        self._balancer.weigh(self._paces.weights())


PICKS: Mapping[str, Callable[[range, Floats], Cumulative]] = {
    OURS: Ours,
    HEAP: Cumulative,
    ALL_KNOWN: Knows,
}


SERVERS = 8
STEP_S, TELL_S = 0.05, 0.5
ALONE_HZ = 60.0
"""Tokens a second of a request that is alone."""
MEAN_TURNS, MEAN_TOKENS, MEAN_TOOL_S, SIGMA = 6.0, 150.0, 2.0, 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
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


def _lognormal(draws: np.random.Generator, mean: float, count: int) -> Floats:
    return draws.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, int(count))


def simulate(make: Callable[[range, Floats], Cumulative], load: Load, work: Work) -> list[float]:
    """Seconds of each rollout, in the order in which they ended."""
    world = _World(make, load, work)
    while len(world.taken) < len(work.tokens):
        world.step()
    return world.taken


class _World:
    def __init__(self, make: Callable[[range, Floats], Cumulative], load: Load, work: Work) -> None:
        self._load, self._work = load, work
        self._speed_S = np.ones(SERVERS)
        self._speed_S[: load.slow] = load.speed
        self._pick = make(range(SERVERS - load.late), self._speed_S)
        self._now = self._told = 0.0
        self._num_begun = 0
        self.taken: list[float] = []
        places = load.each * SERVERS
        self._server_B, self._owner_B = np.zeros(places, int), np.full(places, -1)
        self._turn_B, self._left_B = np.zeros(places, int), np.zeros(places)
        self._began_B, self._asked_B = np.zeros(places), np.zeros(places)
        self._free_at_B = np.zeros(places)
        for place in range(places):
            self._begin(place)

    def step(self) -> None:
        self._now += STEP_S
        if self._now - self._told >= TELL_S:
            self._told = self._now
            self._pick.tell(self._now)
        decoding_B = (self._free_at_B <= self._now) & (self._owner_B >= 0)
        busy_S = np.bincount(self._server_B[decoding_B], minlength=SERVERS)
        together_S = self._load.together_hz / np.maximum(busy_S, 1)
        hz_S = self._speed_S * np.minimum(ALONE_HZ, together_S)
        self._left_B[decoding_B] -= STEP_S * hz_S[self._server_B[decoding_B]]
        for place in np.flatnonzero(decoding_B & (self._left_B <= 0)).tolist():
            rollout, turn = int(self._owner_B[place]), int(self._turn_B[place])
            tokens, server = self._work.tokens[rollout], int(self._server_B[place])
            took_s = self._now - float(self._asked_B[place])
            self._pick.heard(server, float(tokens[turn]), took_s)
            if turn + 1 < len(tokens):
                self._turn_B[place], self._left_B[place] = turn + 1, tokens[turn + 1]
                asked = self._now + self._work.tools_s[rollout][turn + 1]
                self._free_at_B[place] = self._asked_B[place] = asked
            else:
                self.taken.append(self._now - self._began_B[place])
                self._pick.end(rollout)
                self._begin(place)

    def _begin(self, place: int) -> None:
        """The next rollout begins at a place; it stays empty when there is none."""
        rollout, now, count = self._num_begun, self._now, len(self._work.tokens)
        self._num_begun += 1
        if rollout == max(len(self._owner_B), count // 3):
            for late in range(SERVERS - self._load.late, SERVERS):
                self._pick.join(late)
        if rollout >= count:
            self._owner_B[place], self._left_B[place], self._free_at_B[place] = -1, np.inf, np.inf
            return
        tokens = self._work.tokens[rollout]
        self._owner_B[place], self._turn_B[place], self._began_B[place] = rollout, 0, now
        self._server_B[place] = self._pick.begin(rollout, rollout // 8, float(tokens.sum()))
        self._left_B[place] = tokens[0]
        self._free_at_B[place] = self._asked_B[place] = now
