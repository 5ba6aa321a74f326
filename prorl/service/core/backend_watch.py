"""The model servers as the gateway knows them: who is watched, who is ill, whom RUN must give up.

    evidence (probes, RUN's reports) -> Health -> Balancer, and what RUN is told

Pure but for the callbacks. Servers that only a run names are watched as the pool is. Those that are
not HTTP (scripts) are never ill.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

from prorl.backends.catalogue import is_server
from prorl.control import CallTotals, Stats
from prorl.limits import Clock
from prorl.service.core.state import State
from prorl.service.pool.balancer import Balancer
from prorl.service.pool.health import HealthVerdict, ServerHealth
from prorl.service.shapes import BackendView
from prorl.types import BackendFault

BUSY_S = 30.0
"""A server that put a call off is called busy for so long."""

POWER = 2.0
NEGLIGIBLE_RATIO = 1.25
"""Ratios up to here are chance."""
MOST = 8.0
"""No server counts as slower than this."""
FADE_S = 30.0
TOKENS = 2000
"""So many tokens later a measurement counts a third."""
MIN_TOKENS = 500
"""Fewer say nothing."""

log = logging.getLogger("prorl.service")


class _Pace(NamedTuple):
    seconds: float
    tokens: float
    at: float


class Paces:
    """Holds the seconds that a token of each server takes, as RUN's calls have it, and what follows
    from it.

    A rollout on a server that takes twice as long for a token weighs as four on one that does not
    (`POWER`): so many fewer are there. What was measured fades with `FADE_S`: one that is given
    nothing is tried again. Pure but for the clock.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._paces: dict[str, _Pace] = {}

    def add(self, name: str, calls: CallTotals) -> None:
        if calls.sampled:
            before = self._paces.get(name, _Pace(0.0, 0.0, 0.0))
            kept = math.exp(-calls.sampled / TOKENS)
            self._paces[name] = _Pace(
                kept * before.seconds + calls.llm_s,
                kept * before.tokens + calls.sampled,
                self._clock(),
            )

    def forget(self, name: str) -> None:
        self._paces.pop(name, None)

    def weights(self) -> Mapping[str, float]:
        """Returns what a rollout weighs on each server that is known: 1 on the fastest."""
        paces = {
            name: measured.seconds / measured.tokens
            for name, measured in self._paces.items()
            if measured.tokens >= MIN_TOKENS and measured.seconds > 0
        }
        fastest = min(paces.values(), default=1.0)
        now = self._clock()
        return {
            name: self._weight(pace / fastest, now - self._paces[name].at)
            for name, pace in paces.items()
        }

    @staticmethod
    def _weight(ratio: float, age_s: float) -> float:
        if ratio < NEGLIGIBLE_RATIO:
            return 1.0
        return float((1.0 + (min(ratio, MOST) - 1.0) * math.exp(-age_s / FADE_S)) ** POWER)


class BackendWatch:
    """Health of every model server that somebody may be sent to. `on_change` is called when one
    goes out or comes back.
    """

    def __init__(
        self, state: State, clock: Clock, on_change: Callable[[], None] = lambda: None
    ) -> None:
        self._state, self._clock = state, clock
        self._health: dict[str, ServerHealth] = {}
        self.calls: dict[str, CallTotals] = {}
        """The calls by server, of all workers: sums only grow, whoever comes and goes."""
        self._paces = Paces(clock)
        self.on_change = on_change
        self.doubts: dict[str, asyncio.Event] = {}
        """The doubts by server that is probed: set when it should be asked now."""

    @property
    def _balancer(self) -> Balancer:
        return self._state.balancer

    @property
    def has_open_run(self) -> bool:
        return bool(self._state.open)

    def names(self) -> set[str]:
        named = {name for run in self._state.open.values() for name in run.config.backends}
        return {name for name in {*self._balancer.states, *named} if is_server(name)}

    def health(self, name: str) -> ServerHealth:
        return self._health.setdefault(name, ServerHealth())

    def forget(self, name: str) -> None:
        self._health.pop(name, None)
        self._paces.forget(name)
        self.doubts.pop(name, None)
        self.calls.pop(name, None)
        self._balancer.restore(name)

    def unreachable(self) -> list[str]:
        """Servers on which RUN must not wait any longer."""
        return sorted(name for name, health in self._health.items() if health.is_out)

    def probed(self, name: str, trouble: BackendFault | None) -> None:
        health = self.health(name)
        if not health.is_out:
            self._apply_verdict(name, health.probe(trouble), f"a probe was {trouble}")

    def reported(
        self, name: str, trouble: BackendFault, faults: int, calls: int, message: str
    ) -> None:
        if not is_server(name):
            return
        health = self.health(name)
        health.refused_replies += trouble is BackendFault.MALFORMED
        if trouble is BackendFault.BUSY:
            health.busy_replies, health.busy_at = health.busy_replies + 1, self._clock()
            health.busy_reason = message
        self._apply_verdict(name, health.call(trouble, faults, calls), message)
        if trouble in (BackendFault.REFUSED, BackendFault.SILENT):
            self.doubts.setdefault(name, asyncio.Event()).set()

    def tried(self, name: str, trouble: BackendFault | None, jitter: float) -> None:
        health = self.health(name)
        if trouble is not None:
            health.failed_again(self._clock(), trouble, jitter)
            return
        log.info("backend %s is well again after %.1f s", name, self._clock() - health.out_since)
        health.back(self._clock())
        if name in self._state.should_serve:  # it may serve what it was started with
            self._balancer.fence(name)
        self._balancer.restore(name)
        self.on_change()

    def _apply_verdict(self, name: str, verdict: HealthVerdict, reason: str) -> None:
        health = self.health(name)
        if (
            verdict is HealthVerdict.NONE
            or health.is_out
            or not self._balancer.eject(name, dead=verdict is HealthVerdict.DEAD)
        ):
            return
        health.out(self._clock(), reason)
        self._paces.forget(name)
        log.warning("backend %s is out: %s", name, reason)
        self.on_change()

    def served(self, before: Stats | None, now: Stats) -> None:
        """Counts what a RUN worker reports of its model calls, beside what it reported before."""
        before = before or Stats()
        for run_id, calls in now.runs.items():
            if (run := self._state.runs.get(run_id)) is not None:
                run.effort.called(calls.since(before.runs.get(run_id, CallTotals())))
        for name, calls in now.backends.items():
            new = calls.since(before.backends.get(name, CallTotals()))
            self.calls[name] = self.calls.get(name, CallTotals()).plus(new)
            self._paces.add(name, new)
        if now.backends:
            self._balancer.weigh(self._paces.weights())

    def _reason(self, health: ServerHealth) -> str:
        if health.is_out or self._clock() - health.busy_at > BUSY_S:
            return health.reason
        return f"busy, waited for: {health.busy_reason}"

    def view(self) -> list[BackendView]:
        names = {**dict.fromkeys(self._balancer.states), **dict.fromkeys(sorted(self.names()))}
        pool, unknown = self._balancer.states, ServerHealth()
        return [
            {
                "name": name,
                "state": self._balancer.state(name).value,
                "in_flight": self._balancer.in_flight(name),
                "in_pool": name in pool,
                "reason": self._reason(self._health.get(name, unknown)),
                "busy_replies": self._health.get(name, unknown).busy_replies,
                "refused_replies": self._health.get(name, unknown).refused_replies,
                "cached_share": self.calls.get(name, CallTotals()).cached_share,
                "reused_share": self.calls.get(name, CallTotals()).reused_share,
            }
            for name in names
        ]
