"""Health of the pool's HTTP backends: asked every `PROBE_S`, ejected after `MAX_MISSES` misses in a
row, back with the first answer.

Ejection only keeps new rollouts away; those that a backend serves stay (RUN decides about
failover). Scripted backends are not asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable

import aiohttp

from prorl.backends.catalogue import is_server
from prorl.service.balancer import BackendState, Balancer

PROBE_S = 2.0
PROBE_TIMEOUT_S = 2.0
MAX_MISSES = 3

log = logging.getLogger("prorl.service")


class Probes:
    """Asks backends whether they are well, and tells the balancer."""

    def __init__(
        self, balancer: Balancer, wake: Callable[[], None], probe_s: float = PROBE_S
    ) -> None:
        self._balancer, self._wake, self._probe_s = balancer, wake, probe_s
        self._misses: Counter[str] = Counter()

    async def watch(self) -> None:
        """Ask for ever."""
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            while True:
                names = [name for name in self._balancer.states if is_server(name)]
                for name, well in zip(
                    names,
                    await asyncio.gather(*(_well(session, name) for name in names)),
                    strict=True,
                ):
                    self.heard(name, well)
                await asyncio.sleep(self._probe_s)

    def heard(self, name: str, well: bool) -> None:
        """One answer, or none."""
        state = self._balancer.states.get(name)
        if state is None:
            return
        self._misses[name] = 0 if well else self._misses[name] + 1
        if well and state is BackendState.EJECTED:
            self._balancer.restore(name)
            log.info("backend %s is well again", name)
            self._wake()
        elif (
            self._misses[name] >= MAX_MISSES
            and state is BackendState.READY
            and self._balancer.eject(name)
        ):
            log.warning(
                "backend %s is ejected: %d probes without an answer", name, self._misses[name]
            )


async def _well(session: aiohttp.ClientSession, name: str) -> bool:
    try:
        async with session.get(f"{name.rstrip('/')}/health") as answer:
            return answer.status < 500
    except (aiohttp.ClientError, TimeoutError):
        return False
