"""How long to wait until a location is dialled again: longer each time.

Who listens at a Unix socket is there as soon as its file is; so nobody waits longer than for that.
The processes of a service start together and dial the slowest of them, the gateway, which would be
there for up to `last_s` with nobody knowing.
"""

from __future__ import annotations

import asyncio
import os
import random

FIRST_S = 0.02
LOOK_S = 0.01


class Backoff:
    def __init__(self, location: str, last_s: float) -> None:
        _, unix, path = location.partition("grpc+unix://")
        self._path, self._last_s = path if unix else "", last_s
        self._next_s = FIRST_S

    def reset(self) -> None:
        """It answered: the next wait is a first one."""
        self._next_s = FIRST_S

    async def wait(self) -> None:
        """Wait once: until the socket comes, if there is none, and `last_s` at most."""
        if self._is_absent():
            await self._wait_for_it()
            return
        wait_s = self._next_s * random.uniform(0.5, 1.0)
        self._next_s = min(2 * self._next_s, self._last_s)
        await asyncio.sleep(wait_s)

    async def _wait_for_it(self) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + self._last_s
        while self._is_absent() and (left_s := until_s - loop.time()) > 0:
            await asyncio.sleep(min(LOOK_S, left_s))
        self.reset()

    def _is_absent(self) -> bool:
        return bool(self._path) and not os.path.exists(self._path)
