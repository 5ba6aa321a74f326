"""Helpers of one program, kept warm, and the pools that a loop has."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from prorl.errors import ProrlError
from prorl.helper.process import CallBack, Died, Helper, HelperError, HelperProgram, Late, Raised

IDLE_S = 60.0
"""A helper that nobody asked for this long is ended."""

REFUSED_S = 5.0
"""The seconds for which a start that failed answers those who come next."""

STARTS = 2
"""The starts of one pool at a time: each takes a processor for its imports."""

log = logging.getLogger("prorl.helper")


class _Limits(NamedTuple):
    """The limits of one question, whichever process answers it."""

    label: str
    wall_s: float
    until: float | None
    """On the loop's clock, where whoever asks has a time-out of its own."""
    call_back: CallBack | None
    rank: float


@dataclass(slots=True, eq=False)
class _Turn:
    """A question that waits for its helper."""

    helper: asyncio.Future[Helper]
    since: float
    rank: float
    fresh: bool
    """Only a process that has answered nobody will do."""


class Helpers:
    """Runs at most `program.most` processes of a program; belongs to the loop that it is made on.

    Questions wait in one queue. The first starts a process; a further one is started once the
    oldest question has waited for longer than a start takes: an answer usually takes a millisecond,
    a start hundreds.
    """

    def __init__(self, program: HelperProgram) -> None:
        self.program = program
        self._clock = asyncio.get_running_loop().time
        self._free: list[tuple[Helper, float]] = []
        """The helpers with nothing to do, each since when; the last one is asked next."""
        self._busy: set[Helper] = set()
        self._starting: set[asyncio.Future[Helper]] = set()
        self._waiting: list[_Turn] = []
        """In order; bounded by those who ask."""
        self._patience_s = program.patience_s
        self._served_since = 0.0
        """Since when there has been a helper all the time: none waits for one before."""
        self._quiet_until = 0.0
        """A start failed: until then none is tried as long as a helper is at work."""
        self._look: asyncio.TimerHandle | None = None
        self._refusal: tuple[float, HelperError | ProrlError] | None = None
        self._sweep: asyncio.TimerHandle | None = None
        self.starts = 0

    async def ask(
        self,
        question: Any,
        *,
        label: str = "it",
        wall_s: float = 0.0,
        again: bool = True,
        strict: bool = False,
        call_back: CallBack | None = None,
        rank: float = 0.0,
    ) -> Any:
        """The answer; the time until a helper is free and ready does not count. Raises HelperError.

        Of questions that wait the one of the lowest `rank` comes next, then the oldest. `label` is
        asked, in words; `again`: it may be asked a second time, of a fresh process, when
        the first one ended, or raised after it had answered others; `strict`: as `Helper.ask`.
        """
        limits = _Limits(label, wall_s, self._clock() + wall_s if strict else None, call_back, rank)
        is_used = False
        try:
            helper = await self._next(limits, fresh=False)
            is_used = helper.has_answered
            return await self._ask(helper, question, limits)
        except (Died, Raised) as error:
            if not again or (isinstance(error, Raised) and not is_used):
                raise
            log.warning("%s; asked again", error)
        return await self._ask(await self._next(limits, fresh=True), question, limits)

    async def _ask(self, helper: Helper, question: Any, limits: _Limits) -> Any:
        wall_s, is_strict = limits.wall_s, limits.until is not None
        if limits.until is not None:
            wall_s = max(limits.until - self._clock(), 0.1)
        try:
            return await helper.ask(
                question,
                label=limits.label,
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
            self._give(helper)

    async def _next(self, limits: _Limits, *, fresh: bool) -> Helper:
        """A helper that is free, comes free, or is started because that pays.

        Raises HelperError.
        """
        if self._free and not fresh:
            helper = self._free.pop()[0]
            self._busy.add(helper)
            return helper
        turn = _Turn(asyncio.get_running_loop().create_future(), self._clock(), limits.rank, fresh)
        self._waiting.append(turn)
        self._grow()
        try:
            async with asyncio.timeout_at(limits.until):
                return await turn.helper
        except (TimeoutError, asyncio.CancelledError) as cause:
            if turn.helper.done() and not turn.helper.cancelled() and not turn.helper.exception():
                self._give(turn.helper.result())
            if isinstance(cause, asyncio.CancelledError):
                raise
            num, words = (
                len(self._busy),
                f"{limits.label} waited {limits.wall_s:.3g} s for a helper",
            )
            late = Late(f"{words}: {num} are at work")
            late.waits_for_us = True
            raise late from None
        finally:
            if turn in self._waiting:
                self._waiting.remove(turn)

    def _give(self, helper: Helper, *, fresh: bool = False) -> None:
        """A helper to the question that has waited longest, or to rest; an ended one to nobody."""
        self._busy.discard(helper)
        if helper.is_open:
            able = [t for t in self._waiting if not t.helper.done() and (fresh or not t.fresh)]
            if able:
                turn = min(able, key=lambda turn: (not turn.fresh, turn.rank))
                self._waiting.remove(turn)
                self._busy.add(helper)
                turn.helper.set_result(helper)
            else:
                self._free.append((helper, self._clock()))
                self._sweep_later(IDLE_S)
        self._grow()

    def _grow(self) -> None:
        """Start the helpers that pay; look again when the next one may."""
        if self._look is not None:
            self._look.cancel()
            self._look = None
        now, is_served = self._clock(), bool(self._busy or self._free)
        for turn in self._waiting[len(self._starting) :]:
            if len(self._starting) >= STARTS or (self._starting and not is_served):
                return
            due = now
            if is_served:
                waited_since = turn.since if turn.fresh else max(turn.since, self._served_since)
                patience_s = 0.0 if turn.fresh else self._patience_s
                due = max(waited_since + patience_s, self._quiet_until)
            if due > now:
                self._look = asyncio.get_running_loop().call_at(due, self._grow)
                return
            if len(self._busy) + len(self._free) + len(self._starting) >= self.program.most:
                if not self._free:
                    return
                self._free.pop(0)[0].end()
            starting = asyncio.ensure_future(self._begin())
            self._starting.add(starting)
            starting.add_done_callback(self._started)

    async def _begin(self) -> Helper:
        began = self._clock()
        if self._refusal is not None and began < self._refusal[0]:
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
        self._patience_s = min(self._clock() - began, self.program.patience_s)
        return helper

    def _started(self, starting: asyncio.Future[Helper]) -> None:
        """Give a helper that is ready; where none is, a start that failed answers a question."""
        self._starting.discard(starting)
        if starting.cancelled():
            return
        is_served = bool(self._busy or self._free)
        if (error := starting.exception()) is None:
            if not is_served:
                self._served_since = self._clock()
            self._give(starting.result(), fresh=True)
            return
        self._quiet_until = self._clock() + REFUSED_S
        turns = [turn for turn in self._waiting if not turn.helper.done()]
        turn = next((turn for turn in turns if turn.fresh or not is_served), None)
        if turn is not None:
            self._waiting.remove(turn)
            turn.helper.set_exception(error)
        self._grow()

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
        for timer in (self._sweep, self._look):
            if timer is not None:
                timer.cancel()
        for turn in self._waiting:
            turn.helper.cancel()
        self._waiting.clear()
        for starting in self._starting:
            starting.cancel()
        for helper in [*self._busy, *(helper for helper, _ in self._free)]:
            helper.end()
        self._free.clear()


_Pools = dict[HelperProgram, Helpers]

_POOLS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Pools] = weakref.WeakKeyDictionary()
"""The pools of each loop: what one loop started, no other can wait for."""

_KEEPERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncIterator[None]] = (
    weakref.WeakKeyDictionary()
)


async def pool(program: HelperProgram) -> Helpers:
    """The running loop's helpers of a program; they end with the loop."""
    loop = asyncio.get_running_loop()
    if loop not in _KEEPERS:  # one a loop: another's end would close what this one keeps
        _KEEPERS[loop] = _until_the_loop_ends()
        await anext(_KEEPERS[loop])
    pools = _POOLS.setdefault(loop, {})
    if program not in pools:
        pools[program] = Helpers(program)
    return pools[program]


def close(program: HelperProgram | None = None) -> None:
    """End the running loop's helpers of a program, or all; the next question starts others."""
    pools = _POOLS.get(asyncio.get_running_loop(), {})
    for key in [program] if program is not None else list(pools):
        if (pool := pools.pop(key, None)) is not None:
            pool.close()


async def _until_the_loop_ends() -> AsyncIterator[None]:
    """A loop closes the generators that it has begun before it ends: so do its helpers."""
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            close()
