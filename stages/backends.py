"""Model servers as a RUN worker knows them.

Opened once, paused or gone as the gateway says, and how the last calls to each went.

Invariants: opening one delays nobody who wants another; whoever waits for a server hears at once
when something changes about it; the key is sent to those that the operator named and to no other.
Bounded: `LAST_CALLS` outcomes per server, `LAST_RUNS` runs.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

from prorl.backends.catalogue import is_server
from prorl.control import Served
from prorl.errors import BackendError
from prorl.limits import Clock
from prorl.protocols import Backend, Renderer
from prorl.types import FailureCode, Trouble

OPEN_S = 30.0
"""For everything that a server is asked before its first rollout."""
LAST_CALLS = 20
LAST_RUNS = 64

Open = Callable[[str, Renderer, bool], Awaitable[Backend]]
"""(url, the run's renderer, may have the key) -> a backend that may serve. Raises BackendError."""


class Waiting(Protocol):
    """An attempt that waits for a server."""

    def look(self) -> None:
        """Something has changed about it."""


@runtime_checkable
class Labelled(Protocol):
    """A backend that remembers what its server said of its weights."""

    def weights_changed(self) -> None:
        """Hear that the change of weights is over."""


class Faults(NamedTuple):
    """How many of the last calls went wrong alike."""

    faults: int
    calls: int


class Backends:
    """The backends of one worker. Belongs to its event loop."""

    def __init__(
        self, open_: Open, clock: Clock = time.monotonic, *, has_key: bool = False
    ) -> None:
        self._open, self.clock = open_, clock
        self._opened: dict[tuple[str, int, bool], asyncio.Task[Backend]] = {}
        """By URL, the run's renderer (it lives as long as the worker) and whether with the key."""
        self._paused: set[str] = set()
        self._gone: dict[str, float] = {}
        self._keyed: Collection[str] = frozenset()
        self._told = asyncio.Event()
        if not has_key:
            self._told.set()
        self._calls: dict[str, deque[Trouble | None]] = {}
        self.served: dict[str, Served] = {}
        """Model calls so far by server."""
        self.runs: dict[str, Served] = {}
        """The same by run, the latest last."""
        self._waiting: dict[str, set[Waiting]] = {}

    async def get(self, url: str, renderer: Renderer) -> Backend:
        """A backend by URL, for runs with this renderer; who begins together waits for one opening.

        Raises BackendError.
        """
        if not self._told.is_set():
            await self._heard_of_keys()
        keyed = url in self._keyed
        key = (url, id(renderer), keyed)
        opening = self._opened.get(key)
        if opening is None or (opening.done() and _failed(opening)):
            opening = self._opened[key] = asyncio.ensure_future(self._opening(url, renderer, keyed))
        return opening.result() if opening.done() else await asyncio.shield(opening)

    async def _heard_of_keys(self) -> None:
        """The gateway's first word says who may have the key; nobody is asked before it."""
        try:
            await asyncio.wait_for(self._told.wait(), OPEN_S)
        except TimeoutError:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE, f"the gateway said nothing for {OPEN_S:g} s"
            ) from None

    async def _opening(self, url: str, renderer: Renderer, keyed: bool) -> Backend:
        try:
            async with asyncio.timeout(OPEN_S):
                return await self._open(url, renderer, keyed)
        except TimeoutError:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"{url} did not answer within {OPEN_S:g} s",
                Trouble.SILENT,
            ) from None

    async def close(self) -> None:
        """Close all backends; idempotent."""
        opened, self._opened = self._opened, {}
        for opening in opened.values():
            opening.cancel()
        for found in await asyncio.gather(*opened.values(), return_exceptions=True):
            if not isinstance(found, BaseException):
                await found.close()

    # ---- what the gateway says

    def set_paused(self, url: str, paused: bool) -> None:
        """It takes new weights, or serves again."""
        (self._paused.add if paused else self._paused.discard)(url)
        if not paused:
            for (name, *_), opening in self._opened.items():
                if name == url and opening.done() and not _failed(opening):
                    backend = opening.result()
                    if isinstance(backend, Labelled):
                        backend.weights_changed()
        self._tell(url)

    def clear_pauses(self) -> None:
        """The gateway has come back: it tells again what is paused."""
        for url in list(self._paused):
            self.set_paused(url, False)

    def told(self, gone: Collection[str], keyed: Collection[str]) -> None:
        """Who is gone, and who may have the key."""
        now, self._keyed = self.clock(), frozenset(keyed)
        self._told.set()
        fresh = [url for url in gone if url not in self._gone]
        self._gone = {url: self._gone.get(url, now) for url in gone}
        for url in fresh:
            self._tell(url)

    # ---- what attempts ask

    def is_paused(self, url: str) -> bool:
        """Whether it takes new weights."""
        return url in self._paused

    def gone_since(self, url: str) -> float | None:
        """When the gateway said that it is dead or silent; None while it is not."""
        return self._gone.get(url)

    @contextmanager
    def watch(self, url: str, attempt: Waiting) -> Iterator[None]:
        """Count the attempt among those that wait for this backend, for the length of a call."""
        waiting = self._waiting.setdefault(url, set())
        waiting.add(attempt)
        try:
            yield
        finally:
            waiting.discard(attempt)

    def note(self, url: str, trouble: Trouble | None) -> Faults:
        """Note how a call went."""
        if not is_server(url):
            return Faults(0, 0)
        calls = self._calls.setdefault(url, deque(maxlen=LAST_CALLS))
        calls.append(trouble)
        return Faults(calls.count(trouble), len(calls))

    def count(self, url: str, run_id: str, call: Served) -> None:
        """Note a model call that ended."""
        self.served[url] = self.served.get(url, Served()).plus(call)
        self.runs[run_id] = self.runs.pop(run_id, Served()).plus(call)
        if len(self.runs) > LAST_RUNS:
            del self.runs[next(iter(self.runs))]

    def _tell(self, url: str) -> None:
        for attempt in list(self._waiting.get(url, ())):
            attempt.look()


def _failed(opening: asyncio.Task[Backend]) -> bool:
    return opening.cancelled() or opening.exception() is not None
