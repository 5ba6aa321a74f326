"""Attempts that stand still between two turns, so that another run has its share of RUN's slots.

    suspend -> the present call ends -> before the next turn: slot lent, budget stopped, `suspended`
    go on   -> a slot is free        -> the next turn, `suspended` no more

What stands still keeps all that it has: agent, shell, journal. So nothing is sampled or run twice,
no id changes, and whoever cancels it, ends its node or kills its worker finds an attempt as any
other. Between two stands there is a turn. Bounded by the rows in hand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from prorl.control import Suspended
from prorl.limits import Deadline
from prorl.stages.operator import Emit
from prorl.types import AttemptKey, Stage

if TYPE_CHECKING:
    from collections.abc import Iterator


class Slots(Protocol):
    """A stage's slots (`StageHost`)."""

    def holds(self, key: AttemptKey) -> bool:
        """Whether the row is here and not done."""

    def lend(self, key: AttemptKey) -> None:
        """A row's slot is another's."""

    async def take_back(self, key: AttemptKey) -> None:
        """Wait until it has one again."""


class Suspensions:
    """Of one RUN worker. Belongs to its event loop."""

    def __init__(self, slots: Callable[[], Slots], emit: Emit) -> None:
        self._slots, self._emit = slots, emit
        self._asked: dict[AttemptKey, asyncio.Event] = {}
        """Those that must stand still, and what wakes them."""
        self._leaving = False

    def ask(self, key: AttemptKey, suspended: bool) -> None:
        """What the gateway wants of an attempt in hand; asking again changes nothing."""
        if not suspended:
            self.forget(key)
        elif not self._leaving and self._slots().holds(key):
            self._asked.setdefault(key, asyncio.Event())

    def forget(self, key: AttemptKey) -> None:
        """It has ended, or may go on."""
        if (wakes := self._asked.pop(key, None)) is not None:
            wakes.set()

    def leave(self) -> None:
        """Nobody stands still from here on: this node leaves, and all that it has goes along."""
        self._leaving = True
        for key in list(self._asked):
            self.forget(key)

    async def boundary(self, key: AttemptKey, deadline: Deadline) -> float:
        """Stand still here for as long as it is wanted; for how long it was, in seconds."""
        stood_s, clock = 0.0, deadline.clock
        while (wakes := self._asked.get(key)) is not None:
            began = clock()
            with _stopped(deadline):
                self._slots().lend(key)
                self._emit(Suspended(suspended=True), key, stage=Stage.RUN)
                await wakes.wait()
                if not self._leaving:
                    await self._slots().take_back(key)
            self._emit(Suspended(suspended=False), key, stage=Stage.RUN)
            stood_s += clock() - began
        return stood_s


@contextmanager
def _stopped(deadline: Deadline) -> Iterator[None]:
    deadline.pause()
    try:
        yield
    finally:
        deadline.resume()
