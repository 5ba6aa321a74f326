"""Helpers of one program, kept warm, and the pools that a loop has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

from prorl.errors import ProrlError
from prorl.helper.process import CallBack, Died, Helper, HelperError, Late, Program, Raised

IDLE_S = 60.0
"""A helper that nobody asked for this long is ended."""

REFUSED_S = 5.0
"""How long a start that failed answers for those who come next."""

STARTS = 2
"""Of one pool at a time: each takes a processor for its imports."""

log = logging.getLogger("prorl.helper")


class _Limits(NamedTuple):
    """Of one question, whichever process answers it."""

    what: str
    wall_s: float
    until: float | None
    """On the loop's clock, where whoever asks has a time-out of its own."""
    call_back: CallBack | None


class Helpers:
    """At most `program.most` processes of a program; belongs to the loop that it is made on."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._clock = asyncio.get_running_loop().time
        self._free: list[tuple[Helper, float]] = []
        """Those with nothing to do, each since when; the last one is asked next."""
        self._busy: set[Helper] = set()
        self._starting: set[asyncio.Future[Helper]] = set()
        self._places = asyncio.Semaphore(program.most)
        self._starts = asyncio.Semaphore(STARTS)
        self._refusal: tuple[float, HelperError | ProrlError] | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self.starts = 0

    async def ask(
        self,
        question: Any,
        *,
        what: str = "it",
        wall_s: float = 0.0,
        again: bool = True,
        strict: bool = False,
        call_back: CallBack | None = None,
    ) -> Any:
        """The answer; the time until a helper is free and ready does not count. Raises HelperError.

        `what` is asked, in words; `again`: it may be asked a second time, of a fresh process, when
        the first one ended, or raised after it had answered others; `strict`: as `Helper.ask`.
        """
        limits = _Limits(what, wall_s, self._clock() + wall_s if strict else None, call_back)
        await self._place(what, wall_s, strict=strict)
        try:
            try:
                return await self._ask(question, limits, fresh=False)
            except (Died, Raised) as error:
                if not again or (isinstance(error, Raised) and not error.by_others):
                    raise
                log.warning("%s; asked again", error)
            return await self._ask(question, limits, fresh=True)
        finally:
            self._places.release()

    async def _place(self, what: str, wall_s: float, *, strict: bool) -> None:
        """Wait until one more may be asked. Raises Late where all are busy for too long."""
        try:
            async with asyncio.timeout(wall_s if strict else None):
                await self._places.acquire()
        except TimeoutError:
            words = f"{what} waited {wall_s:.3g} s for a helper: {self.program.most} are at work"
            error = Late(words)
            error.waits_for_us = True
            raise error from None

    async def _ask(self, question: Any, limits: _Limits, *, fresh: bool) -> Any:
        helper = await self._start() if fresh or not self._free else self._free.pop()[0]
        wall_s, is_strict = limits.wall_s, limits.until is not None
        if limits.until is not None:
            wall_s = max(limits.until - self._clock(), 0.1)
        self._busy.add(helper)
        try:
            return await helper.ask(
                question,
                what=limits.what,
                wall_s=wall_s,
                strict=is_strict,
                call_back=limits.call_back,
            )
        except HelperError as error:
            if wall_s < limits.wall_s / 2:
                error.waits_for_us = True  # what it was short of went to its helper's start
            if not helper.is_open:
                log.warning("a helper was ended: %s", error)
            raise
        finally:
            self._busy.discard(helper)
            if helper.is_open:
                self._free.append((helper, self._clock()))
                self._sweep_later(IDLE_S)

    async def _start(self) -> Helper:
        """A fresh helper; a start that its asker gives up goes on, for the next one."""
        starting = asyncio.ensure_future(self._begin())
        self._starting.add(starting)
        starting.add_done_callback(self._starting.discard)
        try:
            return await asyncio.shield(starting)
        except asyncio.CancelledError:
            starting.add_done_callback(self._keep)
            raise

    async def _begin(self) -> Helper:
        async with self._starts:
            if self._refusal is not None and self._clock() < self._refusal[0]:
                refused = self._refusal[1]
                again = type(refused)(*refused.args)
                if isinstance(again, HelperError):
                    again.at_start = True
                raise again
            try:
                self.starts += 1
                helper = await Helper.start(self.program)
            except (Raised, Late, ProrlError) as error:
                self._refusal = (self._clock() + REFUSED_S, error)
                raise
            self._refusal = None
            return helper

    def _keep(self, starting: asyncio.Future[Helper]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            self._free.append((starting.result(), self._clock()))
            self._sweep_later(IDLE_S)

    def _sweep_later(self, after_s: float) -> None:
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(after_s, self._end_idle)

    def _end_idle(self) -> None:
        self._sweep = None
        oldest = self._clock() - IDLE_S
        while self._free and self._free[0][1] <= oldest:
            self._free.pop(0)[0].end()
        if self._free:
            self._sweep_later(max(self._free[0][1] - oldest, 1.0))

    def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for starting in self._starting:
            starting.cancel()
        for helper in [*self._busy, *(helper for helper, _ in self._free)]:
            helper.end()
        self._free.clear()


_Pools = dict[Program, Helpers]

_POOLS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pools] = weakref.WeakKeyDictionary()
"""Of each loop: what one loop started, no other can wait for."""

_KEEPERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncIterator[None]] = (
    weakref.WeakKeyDictionary()
)


async def pool(program: Program) -> Helpers:
    """The running loop's helpers of a program; they end with the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _KEEPERS:  # one a loop: another's end would close what this one keeps
        _KEEPERS[loop] = _until_the_loop_ends()
        await anext(_KEEPERS[loop])
    pools = _POOLS.setdefault(loop, {})
    if program not in pools:
        pools[program] = Helpers(program)
    return pools[program]


def close(program: Program | None = None) -> None:
    """End the running loop's helpers of a program, or all; the next question starts others."""
    pools = _POOLS.get(asyncio.get_running_loop(), {})
    for one in [program] if program is not None else list(pools):
        if (found := pools.pop(one, None)) is not None:
            found.close()


async def _until_the_loop_ends() -> AsyncIterator[None]:
    """A loop closes the generators that it has begun before it ends: so do its helpers."""
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            close()
