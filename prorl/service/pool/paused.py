"""Servers that a trainer holds while it gives them weights itself, or lets them sleep.

    POST /v1/backends/pause -> the trainer sends weights -> announce -> POST /v1/backends/resume

A held server gets no rollout and says that it serves `held:NONCE`, weights of no version. That mark
is what an announcement is believed by: a server that was started anew meanwhile states another
label. It is also how a gateway that was started anew finds what is held. Whoever waits for a held
server spends no budget.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prorl.errors import BackendError, RolloutError, boundary
from prorl.service.pool.balancer import Balancer
from prorl.types import FailureCode

if TYPE_CHECKING:
    from prorl.backends.weight_target import WeightTarget

MARK = "held"
SETTLE_S = 0.1
"""After a pause, for RUN to ask a server that states no versions what sampled the cut tokens."""


class PausedServers:
    """`lock` is that of a server, which protects it from two changes at once."""

    def __init__(
        self,
        balancer: Balancer,
        target: Callable[[str], WeightTarget],
        lock: Callable[[str], asyncio.Lock],
        tell_paused: Callable[[str, bool], None],
    ) -> None:
        self._balancer, self._target, self._lock = balancer, target, lock
        self._tell_paused = tell_paused
        self._marks: dict[str, str] = {}
        """The label that each states since it was paused; empty until it does."""

    def __contains__(self, name: object) -> bool:
        return name in self._marks

    def names(self) -> tuple[str, ...]:
        return tuple(self._marks)

    def mark(self, name: str) -> str:
        return self._marks.get(name, "")

    async def pause(self, name: str, mode: str) -> str:
        """Hold one; empty, or why it is not paused. Said again, it changes nothing."""

        async def hold() -> None:
            if self._marks.get(name):
                return
            self._balancer.fence(name)
            self._marks[name] = ""
            self._tell_paused(name, True)
            target = self._target(name)
            await target.pause(mode)
            if not (await target.dialect()).states_labels:
                await asyncio.sleep(SETTLE_S)
            mark = f"{MARK}:{secrets.token_hex(6)}"
            await target.rename(mark)
            self._marks[name] = mark

        return await self._change(name, hold())

    async def resume(self, name: str) -> str:
        """Let one sample again; empty, or why it cannot. The fence ends with an announcement."""

        async def go_on() -> None:
            await self._target(name).resume()
            self.forget(name)

        return await self._change(name, go_on())

    def forget(self, name: str) -> None:
        if self._marks.pop(name, None) is not None:
            self._tell_paused(name, False)

    async def _change(self, name: str, change: Awaitable[None]) -> str:
        async with self._lock(name):
            try:
                with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, name):
                    await change
            except RolloutError as error:
                return str(error)
            return ""

    def recall(self, name: str, label: str) -> None:
        """Notes what a server states after a restart of the gateway."""
        if label.startswith(f"{MARK}:") and name not in self._marks:
            self._marks[name] = label
            self._balancer.fence(name)
            self._tell_paused(name, True)
