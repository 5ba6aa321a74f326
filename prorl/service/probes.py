"""Asks model servers whether they are well, each by a task of its own.

One that is in is asked for its health every `PROBE_S`, or `IDLE_PROBE_S` while no run is open; one
that is out for a token, since a server that fails each model call says that it is well all the
same. Whatever a name leads to, also in the resolver, is its own trouble and never the gateway's.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from prorl.backends.catalogue import health_url
from prorl.errors import BackendError, RolloutError, boundary
from prorl.limits import Clock
from prorl.service.core.backend_watch import BackendWatch
from prorl.timing import now
from prorl.types import BackendFault, FailureCode
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    import aiohttp

PROBE_S = 0.5
IDLE_PROBE_S = 2.0
"""An idle service probes less often: a probe is half of what it and an idle server cost. RUN's
first call finds a server that died since the last probe.
"""
PROBE_TIMEOUT_S = wait_limit_s("probe.health")
TRY_TIMEOUT_S = wait_limit_s("probe.token")
LOADING_S = wait_limit_s("probe.loading")

Try = Callable[[str], Awaitable[None]]
"""Asks a server for a token; raises RolloutError when none comes or it cannot be true."""


class Probes:
    """Watches what is to be watched. `is_loading` tells which servers take new weights just now."""

    def __init__(
        self,
        watched: BackendWatch,
        try_call: Try,
        *,
        is_loading: Callable[[str], bool] = lambda name: False,
        probe_s: float = PROBE_S,
        idle_probe_s: float = IDLE_PROBE_S,
        clock: Clock = now,
    ) -> None:
        self._watched, self._try_call, self._is_loading = watched, try_call, is_loading
        self._probe_s, self._idle_probe_s = probe_s, idle_probe_s
        self._clock = clock
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def watch(self) -> None:
        """Keep one task for each server that is watched. Never returns."""
        while not self._watched.names():
            await asyncio.sleep(self._probe_s)
        import aiohttp  # here: see `Publisher._target`

        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        try:
            async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
                while True:
                    self._reconcile(session)
                    await asyncio.sleep(self._probe_s)
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _reconcile(self, session: aiohttp.ClientSession) -> None:
        names = self._watched.names()
        for name in names - self._tasks.keys():
            self._tasks[name] = asyncio.ensure_future(self._watch(session, name))
        for name in self._tasks.keys() - names:
            self._tasks.pop(name).cancel()
            self._watched.forget(name)

    async def _watch(self, session: aiohttp.ClientSession, name: str) -> None:
        loading_since = self._clock()
        while True:
            if self._watched.health(name).is_out:
                await self._try(name)
            else:
                trouble = await _ask(session, name)
                if trouble is None or not self._is_loading(name):
                    loading_since = self._clock()
                is_excused = self._clock() - loading_since < LOADING_S and self._is_loading(name)
                if not (is_excused and trouble is BackendFault.SILENT):
                    self._watched.probed(name, trouble)
                if trouble is None:
                    is_used = self._watched.has_open_run
                    await self._rest(name, self._probe_s if is_used else self._idle_probe_s)

    async def _try(self, name: str) -> None:
        health = self._watched.health(name)
        wait_s = health.back_at - self._clock()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        trouble: BackendFault | None = None
        try:
            with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, name):
                async with asyncio.timeout(TRY_TIMEOUT_S):
                    await self._try_call(name)
        except RolloutError as error:
            trouble = getattr(error, "trouble", None) or _TROUBLE.get(
                error.code, BackendFault.ERROR
            )
        self._watched.tried(name, trouble, random.random())

    async def _rest(self, name: str, seconds: float) -> None:
        doubt = self._watched.doubts.setdefault(name, asyncio.Event())
        try:
            await asyncio.wait_for(doubt.wait(), seconds)
        except TimeoutError:
            pass
        doubt.clear()


_TROUBLE = {
    FailureCode.BACKEND_UNAVAILABLE: BackendFault.SILENT,
    FailureCode.BACKEND_PROTOCOL: BackendFault.MALFORMED,
}


async def _ask(session: aiohttp.ClientSession, name: str) -> BackendFault | None:
    """Returns what is wrong with a server by its own word; None when it is well."""
    try:
        with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, name):
            try:
                async with session.get(health_url(name)) as answer:
                    return BackendFault.ERROR if answer.status >= 500 else None
            except TimeoutError:
                return BackendFault.SILENT
    except BackendError:
        return BackendFault.REFUSED
