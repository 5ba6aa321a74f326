"""Simulated servers and the rollouts that they serve, whoever chooses the servers.

A server decodes its requests together, each slower the more there are. Suffixes of names: `_S` one
value a server, `_B` one a place, which is where one rollout at a time is served.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from prorl.bench.balance_picks import Floats, Pick

SERVERS = 8
STEP_S, TELL_S = 0.05, 0.5
ALONE_HZ = 60.0
"""Tokens a second of a request that is alone."""
MEAN_TURNS, MEAN_TOKENS, MEAN_TOOL_S, SIGMA = 6.0, 150.0, 2.0, 1.0


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


def _lognormal(draws: np.random.Generator, mean: float, count: int) -> Floats:
    return draws.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, int(count))


def simulate(make: Callable[[range, Floats], Pick], load: Load, work: Work) -> list[float]:
    """Seconds of each rollout, in the order in which they ended."""
    world = _World(make, load, work)
    while len(world.taken) < len(work.tokens):
        world.step()
    return world.taken


class _World:
    """Servers, their places, and the rollouts in them at one moment."""

    def __init__(self, make: Callable[[range, Floats], Pick], load: Load, work: Work) -> None:
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
        """A moment passes: every server decodes, turns end."""
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
            self._end_turn(place)

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

    def _end_turn(self, place: int) -> None:
        """A turn has all its tokens: its tools run, or the rollout ends."""
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
