"""The model servers that a RUN worker calls: open, paused, dead or busy, and how their calls went.

Invariants: opening one server delays no attempt of another; an attempt that waits for a server is
woken at once when something changes about it; the key is sent to those that the operator named and
to no other.
Bounded: `LAST_CALLS` outcomes per server, `LAST_RUNS` runs.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from prorl.backends.catalogue import is_server
from prorl.backends.probe import first_token
from prorl.control import CallTotals
from prorl.errors import BackendError, RolloutError, boundary
from prorl.limits import Clock
from prorl.protocols import Backend
from prorl.renderer.apart import AnyRenderer
from prorl.timing import now
from prorl.types import BackendFault, FailureCode
from prorl.waits import wait_limit_s

OPEN_S = wait_limit_s("server.open")
LAST_CALLS = 20
"""Last calls of a server, of which a failure says how many failed alike: one of many is a
fault, most are the server.
"""
LAST_RUNS = 64
FIRST_BUSY_S, LAST_BUSY_S = 0.25, 10.0
"""Pauses of a server that is busy and does not say how long."""
LOOK_S = 0.05
LOOKOUT_S = wait_limit_s("server.lookout")

Open = Callable[[str, AnyRenderer, bool], Awaitable[Backend]]
"""(url, the run's renderer, may have the key) -> a backend that may serve. Raises BackendError."""


class Waiting(Protocol):
    """An attempt that waits for a server."""

    def look(self) -> None:
        """Look at the server again: something about it has changed."""


@runtime_checkable
class Labelled(Protocol):
    """A backend that remembers what its server said of its weights."""

    def weights_changed(self) -> None:
        """Forget the label: the server has other weights now."""


class Flow:
    """The number of calls that a server takes at a time, as far as it has said that it is busy.

    Additive increase, multiplicative decrease, as TCP has it: halved where it is busy, once for all
    that were under way; one more per answer up to half of what was too much, then one more per
    round of answers. Without limit until it is busy for the first time. Pure: times are the
    caller's.
    """

    def __init__(self) -> None:
        self.limit, self._enough = math.inf, math.inf
        self.in_flight = self._num_busy = 0
        self.free_at = 0.0
        """No call begins before this time."""

    def wait_s(self, now: float) -> float:
        """0 where a call may begin, else when to look again."""
        if now < self.free_at:
            return self.free_at - now
        return 0.0 if self.in_flight < self.limit else LOOK_S

    def busy(self, now: float, retry_after_s: float, jitter: float) -> None:
        """A call that has just ended was put off; `jitter` is from 0 to 1."""
        if now >= self.free_at:
            self._enough = max(1.0, min(self.limit, self.in_flight + 1) / 2)
            self.limit = self._enough
            self._num_busy += 1
        backoff_s = min(LAST_BUSY_S, FIRST_BUSY_S * 2.0 ** min(self._num_busy, 16))
        self.free_at = max(self.free_at, now + (retry_after_s or backoff_s) * (1 + jitter / 4))

    def well(self) -> None:
        """A call was answered."""
        self._num_busy = 0
        self.limit += 1.0 if self.limit < self._enough else 1.0 / self.limit


class Faults(NamedTuple):
    """Counts how many of the last calls went wrong alike."""

    faults: int
    calls: int


class Backends:
    def __init__(self, open_: Open, clock: Clock = now, *, has_key: bool = False) -> None:
        self._open, self.clock = open_, clock
        self._opened: dict[tuple[str, int, bool], asyncio.Task[Backend]] = {}
        """The backends by URL, the run's renderer and whether with the key."""
        self._paused: set[str] = set()
        self._dead: dict[str, float] = {}
        self._keyed: Collection[str] = frozenset()
        self._updated = asyncio.Event()
        if not has_key:
            self._updated.set()
        self._calls: dict[str, deque[BackendFault | None]] = {}
        self._flows: dict[str, Flow] = {}
        self._answered: dict[str, float] = {}
        """The time when the last call began that got a token."""
        self._lookouts: dict[str, asyncio.Task[None]] = {}
        self.served: dict[str, CallTotals] = {}
        """Model calls so far by server."""
        self.runs: dict[str, CallTotals] = {}
        """The same by run, the latest last."""
        self._waiting: dict[str, set[Waiting]] = {}

    async def get(self, url: str, renderer: AnyRenderer) -> Backend:
        """A backend by URL; who begins together waits for one opening. Raises BackendError."""
        if not self._updated.is_set():
            await self._wait_for_keys()
        keyed = url in self._keyed
        key = (url, id(renderer), keyed)
        opening = self._opened.get(key)
        if opening is None or (opening.done() and _failed(opening)):
            opening = self._opened[key] = asyncio.ensure_future(self._opening(url, renderer, keyed))
        return opening.result() if opening.done() else await asyncio.shield(opening)

    async def _wait_for_keys(self) -> None:
        """Wait until the gateway has said which servers may have the key; no call begins before."""
        try:
            await asyncio.wait_for(self._updated.wait(), OPEN_S)
        except TimeoutError:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE, f"the gateway said nothing for {OPEN_S:g} s"
            ) from None

    async def _opening(self, url: str, renderer: AnyRenderer, keyed: bool) -> Backend:
        try:
            async with asyncio.timeout(OPEN_S):
                return await self._open(url, renderer, keyed)
        except TimeoutError:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"{url} did not answer within {OPEN_S:g} s",
                BackendFault.SILENT,
            ) from None

    async def close(self) -> None:
        lookouts = [*self._lookouts.values()]
        for lookout in lookouts:
            lookout.cancel()
        await asyncio.gather(*lookouts, return_exceptions=True)
        opened, self._opened = self._opened, {}
        for opening in opened.values():
            opening.cancel()
        for backend in await asyncio.gather(*opened.values(), return_exceptions=True):
            if not isinstance(backend, BaseException):
                await backend.close()

    # ---- what the gateway says

    def set_paused(self, url: str, paused: bool) -> None:
        (self._paused.add if paused else self._paused.discard)(url)
        if not paused:
            for (name, *_), opening in self._opened.items():
                if name == url and opening.done() and not _failed(opening):
                    backend = opening.result()
                    if isinstance(backend, Labelled):
                        backend.weights_changed()
        self._wake(url)

    def clear_pauses(self) -> None:
        """Forget which servers are paused: the gateway has come back, and says it anew."""
        for url in list(self._paused):
            self.set_paused(url, False)

    def update_pool(self, dead: Collection[str], keyed: Collection[str]) -> None:
        """Updates which servers are dead, and which may have the key."""
        now, self._keyed = self.clock(), frozenset(keyed)
        self._updated.set()
        fresh = [url for url in dead if url not in self._dead]
        self._dead = {url: self._dead.get(url, now) for url in dead}
        for url in fresh:
            self._wake(url)

    # ---- what attempts ask

    def is_paused(self, url: str) -> bool:
        return url in self._paused

    def dead_since(self, url: str) -> float | None:
        """Returns when the gateway said that a server is dead or silent; None while it is not."""
        return self._dead.get(url)

    @contextmanager
    def watch(self, url: str, attempt: Waiting) -> Iterator[None]:
        """Wake the attempt at every change of this backend, for the length of a call."""
        waiting, flow = self._waiting.setdefault(url, set()), self._flow(url)
        waiting.add(attempt)
        flow.in_flight += 1
        try:
            yield
        finally:
            waiting.discard(attempt)
            flow.in_flight -= 1

    def wait_s(self, url: str) -> float:
        return self._flow(url).wait_s(self.clock())

    def _flow(self, url: str) -> Flow:
        return self._flows.setdefault(url, Flow())

    def note(self, url: str, trouble: BackendFault | None, retry_after_s: float = 0.0) -> Faults:
        if not is_server(url):
            return Faults(0, 0)
        if trouble is None:
            self._flow(url).well()
        elif trouble is BackendFault.BUSY:
            self._flow(url).busy(self.clock(), retry_after_s, random.random())
        calls = self._calls.setdefault(url, deque(maxlen=LAST_CALLS))
        calls.append(trouble)
        return Faults(calls.count(trouble), len(calls))

    # ---- calls that nobody answers

    def answered(self, url: str, began: float) -> None:
        """Note that a call has got a token; `began` is when it began."""
        self._answered[url] = max(began, self._answered.get(url, 0.0))

    def overtook(self, url: str, began: float) -> bool:
        """Returns whether a call that began later than `began` has got a token already."""
        return self._answered.get(url, 0.0) > began

    def look_out(self, url: str, renderer: AnyRenderer) -> None:
        """Ask the server for one token, unless such a call is under way. Its answer overtakes calls
        that wait in vain (`overtook`).
        """
        if url not in self._lookouts:
            task = asyncio.ensure_future(self._look_out(url, renderer))
            self._lookouts[url] = task
            task.add_done_callback(lambda _: self._lookouts.pop(url, None))

    async def _look_out(self, url: str, renderer: AnyRenderer) -> None:
        began = self.clock()
        try:
            with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, url):
                async with asyncio.timeout(LOOKOUT_S):
                    backend = await self.get(url, renderer)
                    await first_token(backend, np.zeros(1, dtype=np.int32))
        except RolloutError:
            return  # no evidence either way
        self.answered(url, began)
        self._wake(url)

    def count(self, url: str, run_id: str, call: CallTotals) -> None:
        self.served[url] = self.served.get(url, CallTotals()).plus(call)
        self.runs[run_id] = self.runs.pop(run_id, CallTotals()).plus(call)
        if len(self.runs) > LAST_RUNS:
            del self.runs[next(iter(self.runs))]

    def _wake(self, url: str) -> None:
        for attempt in list(self._waiting.get(url, ())):
            attempt.look()


def _failed(opening: asyncio.Task[Backend]) -> bool:
    return opening.cancelled() or opening.exception() is not None
