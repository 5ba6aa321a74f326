"""Publication of weights: a version gets its id, the backends of the run take the weights, then the
version is published.

    id durable -> each backend: pause (abort) -> update -> resume -> `version` is durable and told
    -> the trainer has its answer

Invariants: an id is never given twice, whatever fails; of several backends never more than half are
paused at a time; one publication at a time; a version is published only when a backend serves it (a
run whose backends are scripts needs none); a backend that did not take the newest weights is
fenced: no new lease until it has them, and no rollout that has seen newer ones goes on with it (the
agent looks at each completion's versions). A backend that comes back with other weights, as after a
restart, is given the newest again. Runs that share a backend share its weights: what one run
publishes serves the others too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import NamedTuple

import aiohttp

from prorl.backends.catalogue import is_server
from prorl.backends.publish import WeightTarget
from prorl.errors import BackendError, UnavailableError
from prorl.service.balancer import BackendState
from prorl.service.core import Core
from prorl.service.state import RunRecord

WATCH_S = 2.0
"""How often backends are asked which weights they serve."""

FENCED_S = 0.3
"""The same while one is fenced."""

log = logging.getLogger("prorl.service.publish")

Durable = Callable[[], Awaitable[None]]
TellPaused = Callable[[str, bool], None]
"""(backend, paused): said to RUN at once."""


class Weights(NamedTuple):
    """What a backend should serve."""

    version: int
    path: str


class Published(NamedTuple):
    """The outcome of a publication."""

    version: int
    fresh: bool
    """False when it was published before."""
    failed: dict[str, str]
    """Backends that did not take it, with the reason."""


class Publisher:
    """Gives weights to the backends of runs.

    `async with` it; `watch` runs as long as the gateway.
    """

    def __init__(
        self, core: Core, durable: Durable, tell_paused: TellPaused, key: str = ""
    ) -> None:
        self._core, self._durable, self._tell_paused, self._key = core, durable, tell_paused, key
        self._session: aiohttp.ClientSession | None = None
        self._targets: dict[str, WeightTarget] = {}
        self._wanted: dict[str, Weights] = {}
        self._loaded: dict[str, Weights] = {}
        """What each backend was last given; two runs may use one id for different weights."""
        # Protects the backends: two publications at a time would pause more than half and leave the
        # weights of either.
        self._turn = asyncio.Lock()

    async def close(self) -> None:
        """Idempotent."""
        session, self._session = self._session, None
        self._targets.clear()
        if session is not None:
            await session.close()

    async def publish(self, run: RunRecord, version: int, path: str) -> Published:
        """Publish the weights in `path` as `version` (0 = the next id); said again, it sees to it
        that the backends serve them.

        Raises ConflictError, and UnavailableError when no backend took them: say it again, with the
        id that the error names.
        """
        async with self._turn:
            version = self._core.groups.give_version(run, version, path)
            await self._durable()
            failed: dict[str, str] = {}
            names = self._servers(run) if path and version >= run.version else []
            if names:
                failed = await self._spread(names, Weights(version, path))
                if len(failed) == len(names):
                    raise UnavailableError(
                        f"no backend took version {version} of run {run.run_id}:"
                        f" {'; '.join(failed.values())}"
                    )
            fresh = self._core.publish(run, version)
            await self._durable()
            return Published(version, fresh, failed)

    def _servers(self, run: RunRecord) -> list[str]:
        names = run.config.backends or tuple(self._core.state.balancer.states)
        return [name for name in names if is_server(name)]

    async def _spread(self, names: Sequence[str], weights: Weights) -> dict[str, str]:
        """Give weights to backends, half of them at a time at most; the reasons of those that did
        not take them.
        """
        failed: dict[str, str] = {}
        for wave in waves(names):
            reasons = await asyncio.gather(*(self._give(name, weights) for name in wave))
            failed |= {name: reason for name, reason in zip(wave, reasons, strict=True) if reason}
        return failed

    async def _give(self, name: str, weights: Weights) -> str:
        """Have one backend serve the weights; empty, or why it does not.

        It is fenced while it does not.
        """
        self._wanted[name] = weights
        target, balancer = self._target(name), self._core.state.balancer
        try:
            if self._loaded.get(name) != weights or await target.version() != weights.version:
                await self._load(target, name, weights)
                self._loaded[name] = weights
        except BackendError as error:
            log.warning(
                "backend %s did not take version %d and is fenced: %s", name, weights.version, error
            )
            balancer.fence(name)
            return str(error)
        balancer.unfence(name)
        return ""

    async def _load(self, target: WeightTarget, name: str, weights: Weights) -> None:
        await target.dialect()
        self._tell_paused(name, True)
        try:
            await target.pause()
            try:
                await target.update(weights.path, weights.version)
            finally:
                # Also after a failure: requests that wait end sooner than by their time-out, and
                # say which weights they had.
                await target.resume()
        finally:
            self._tell_paused(name, False)

    def _target(self, name: str) -> WeightTarget:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        if name not in self._targets:
            self._targets[name] = WeightTarget(self._session, name, self._key)
        return self._targets[name]

    # ---- backends that come back

    async def watch(self) -> None:
        """Give the newest weights again to a backend that serves others. Never returns."""
        self._recall()
        while True:
            for name, weights in list(self._wanted.items()):
                if name in self._core.state.balancer.states:
                    async with self._turn:
                        if self._wanted[name] == weights and await self._is_behind(name, weights):
                            await self._give(name, weights)
            await asyncio.sleep(FENCED_S if any(map(self._is_fenced, self._wanted)) else WATCH_S)

    def _is_fenced(self, name: str) -> bool:
        return self._core.state.balancer.states.get(name) is BackendState.FENCED

    async def _is_behind(self, name: str, weights: Weights) -> bool:
        try:
            return self._is_fenced(name) or await self._target(name).version() != weights.version
        except BackendError:
            return False  # away: RUN notices, and it is asked again

    def _recall(self) -> None:
        """What backends should serve, from the log, after a restart of the gateway; until they say
        so they are fenced.
        """
        runs = [
            run for run in self._core.state.runs.values() if run.state == "open" and run.version
        ]
        for run in sorted(runs, key=lambda run: run.created_at):
            statement = "SELECT note FROM versions WHERE run_id = ? AND version = ?"
            ((path,),) = self._core.log.read(statement, (run.run_id, run.version))
            if path:
                self._wanted |= dict.fromkeys(self._servers(run), Weights(run.version, path))
        for name in self._wanted:
            self._core.state.balancer.fence(name)


def waves(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Names in turns that leave at least half of them alone, one by one for fewer than four.

    >>> [list(wave) for wave in waves(["a", "b", "c", "d", "e"])]
    [['a', 'b'], ['c', 'd'], ['e']]
    """
    size = max(1, len(names) // 2)
    for first in range(0, len(names), size):
        yield names[first : first + size]
