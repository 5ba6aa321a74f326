"""Limits how much of the loop the requests of one attempt take from all others.

    account = Account()                          # one an attempt
    await share().admit(account)                 # before each connection and request
    create_task(account.timed(handle(request)))  # what its steps take is written down

An attempt that has taken less than FREE_S lately is let through at once: agents take a few
milliseconds of the loop a call, and calls last seconds. Those that have taken more wait in one
queue, the one that has taken least first, and all of them together get SHARE of the loop. So forty
programs that ask as fast as they can slow each other, not the rollouts beside them.
"""

from __future__ import annotations

import asyncio
import math
import time
import weakref
from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any, TypeVar

FREE_S = 0.05
"""An attempt may take so much of the loop within about MEMORY_S at once. It is what sixteen calls
of an honest agent take, which makes fewer in that time.
"""
MEMORY_S = 10.0
"""The half-life of an attempt's count."""
SHARE = 0.2
"""All attempts that take more get this share of the loop together: enough for each of forty to go
on.
"""
REQUEST_S = 0.0003
"""Accepting and parsing a connection or request takes so much, besides its handler's steps."""

ResultT = TypeVar("ResultT")


class Account:
    """The loop time that one attempt's requests have used lately."""

    def __init__(self) -> None:
        self._spent_s, self._at = 0.0, 0.0

    def spent_s(self) -> float:
        now = time.monotonic()
        self._spent_s *= math.exp2((self._at - now) / MEMORY_S)
        self._at = now
        return self._spent_s

    def take(self, seconds: float) -> None:
        self._spent_s = self.spent_s() + seconds

    def timed(self, work: Coroutine[Any, Any, ResultT]) -> Coroutine[Any, Any, ResultT]:
        return _Timed(self, work)


class Share:
    """The queue of those that have taken more than is free. Belongs to one loop; bounded by their
    connections.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[Account, asyncio.Future[None]]] = []
        self._open_at = 0.0
        self._timer: asyncio.TimerHandle | None = None

    async def admit(self, account: Account) -> None:
        before_s = account.spent_s()
        account.take(REQUEST_S)
        if before_s < FREE_S:
            return
        turn = account, asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._look()
        try:
            await turn[1]
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _look(self) -> None:
        """Let the next one through when it is time."""
        loop = asyncio.get_running_loop()
        waiting = [turn for turn in self._waiting if not turn[1].done()]
        if self._timer is not None or not waiting:
            return
        if loop.time() < self._open_at:
            self._timer = loop.call_at(self._open_at, self._again)
            return
        turn = min(waiting, key=lambda turn: turn[0].spent_s())
        self._waiting.remove(turn)
        turn[1].set_result(None)
        self.pause(REQUEST_S)
        self._look()

    def pause(self, seconds: float) -> None:
        """An attempt over its share took so many seconds: the next one waits longer for them."""
        now = asyncio.get_running_loop().time()
        self._open_at = max(self._open_at, now) + seconds / SHARE

    def _again(self) -> None:
        self._timer = None
        self._look()


_SHARES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Share] = weakref.WeakKeyDictionary()


def share() -> Share:
    """The running loop's."""
    return _SHARES.setdefault(asyncio.get_running_loop(), Share())


class _Timed(Coroutine[Any, Any, ResultT]):
    """A coroutine whose steps are written down on an account."""

    def __init__(self, account: Account, work: Coroutine[Any, Any, ResultT]) -> None:
        self._account, self._work = account, work

    def send(self, value: Any) -> Any:
        began = time.thread_time()
        try:
            return self._work.send(value)
        finally:
            self._took(time.thread_time() - began)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._work.throw(kind if value is None else value)

    def _took(self, seconds: float) -> None:
        if self._account.spent_s() >= FREE_S:
            share().pause(seconds)
        self._account.take(seconds)

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, ResultT]:
        return self._work.__await__()
