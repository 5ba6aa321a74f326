"""Publishes weights: a version gets its id, the run's backends load it, then it is the newest one.

    the id is durable
    each backend: pause -> update -> resume
    the version is durable -> RUN learns of it -> the trainer gets its answer

Invariants: an id is never used twice; at most half of several backends are paused at a time; there
is one publication at a time, and no server that is out, or goes out, delays the rest; a version is
published only when a backend serves it (a run whose backends are scripts needs none). A backend
without the newest weights is fenced until it has them. Every load has a label that is never used
again, which tells the tokens of different weights apart (`prorl/backends/labels.py`). Runs that
share a backend share its weights; tokens that were sampled by another run's weights do not train.

A trainer that sends weights itself announces them. The announcement counts for a server that was
paused meanwhile (`pool/paused.py`) or that states the label which the trainer named; it gets a
label of ours then. A backend that no open run uses is released: what it serves when the next run
begins is that run's version 0.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from prorl.backends.catalogue import is_adapter, is_server
from prorl.backends.labels import START_LABELS, label_of
from prorl.errors import (
    BackendError,
    ConflictError,
    RolloutError,
    UnavailableError,
    UserError,
    boundary,
)
from prorl.service.core.core import Core
from prorl.service.core.state import RunRecord
from prorl.service.log.log_schema import ANNOUNCED
from prorl.service.pool.paused import MARK, SETTLE_S, PausedServers
from prorl.service.pool.servers import Servers
from prorl.service.pool.weights import Expected, Published, ServedWeights, VersionRow
from prorl.types import BackendFault, FailureCode
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    import aiohttp

    from prorl.backends.weight_target import WeightTarget

WATCH_S = 2.0
"""The seconds between two questions which weights backends serve."""
FENCED_S = 0.3
"""The same while one is fenced."""
STATED_S = wait_limit_s("weights.stated")
CLAIM_S = wait_limit_s("weights.claim")
LOOK_S = 0.25
"""The seconds between two looks of a load whether its server has gone out."""

FEWEST_SAMPLES, MOST_SAMPLES = 8, 32
"""Tokens that are compared with the trainer's own logprobs."""
MISTAKEN_S = 10.0
"""A server that failed that is asked again after so long."""

log = logging.getLogger("prorl.service.publish")

Durable = Callable[[], Awaitable[None]]
TellPaused = Callable[[str, bool], None]


class WeightPublisher:
    """Gives weights to the backends of runs. `watch` runs as long as the gateway, then `close`."""

    def __init__(
        self,
        core: Core,
        durable: Durable,
        tell_paused: TellPaused,
        servers: Servers,
        model: str,
        keep: Callable[[VersionRow], object],
    ) -> None:
        self._core, self._durable, self._tell_paused = core, durable, tell_paused
        self._calls, self._model, self._keep_row = servers, model, keep
        self._mistaken: dict[str, float] = {}
        """Servers that serve other weights than their label says: when to look again."""
        self._session: aiohttp.ClientSession | None = None
        self._targets: dict[str, WeightTarget] = {}
        self._newest: ServedWeights | None = None
        """The newest weights of the pool: what who joins it must have."""
        self._locks: dict[str, asyncio.Lock] = {}  # each protects one server from two loads
        self._turn = asyncio.Lock()  # protects the order of publications
        self._running: dict[tuple[str, int], asyncio.Task[Published]] = {}
        self._tending: dict[str, asyncio.Task[None]] = {}
        self._loading: set[str] = set()
        self._target_weights = core.state.should_serve
        self.paused = PausedServers(core.state.balancer, self._target, self._lock, tell_paused)

    async def close(self) -> None:
        tasks = [*self._running.values(), *self._tending.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        session, self._session = self._session, None
        self._targets.clear()
        if session is not None:
            await session.close()

    def is_loading(self, name: str) -> bool:
        return name in self._loading or name in self.paused

    async def publish(
        self,
        run: RunRecord,
        version: int,
        path: str,
        *,
        pause: str = "abort",
        expected: Expected | None = None,
        wait_s: float = 20.0,
    ) -> Published:
        """Publish the weights in `path` as `version` (0 = the next id).

        Said again, it sees to it that the backends serve them. Waits for `wait_s`, then it goes on
        by itself. With `expected` a server has taken them when it says the like after that prompt.
        Raises UserError without a path for a run with servers, ConflictError, and UnavailableError
        when no backend took them: say it again, with the id that the error names.
        """
        if not path and (names := self._servers(run)):
            raise UserError(
                f"version {version} of run {run.run_id!r} without weights for {', '.join(names)}",
                "the `path` of a directory that they can read",
                "a trainer that sends weights itself announces them (`announce`)",
            )
        version = self._core.versions.give(run, version, path)
        await self._durable()
        key = (run.run_id, version)
        if key not in self._running:
            weights = ServedWeights(run.run_id, run.tag, version, path, pause, expected)
            work = asyncio.ensure_future(self._publish(run, weights))
            self._running[key] = work
            work.add_done_callback(partial(self._ended, key))
        work = self._running[key]
        await asyncio.wait({work}, timeout=wait_s)
        return work.result() if work.done() else Published(version, pending=True)

    async def announce(
        self,
        run: RunRecord,
        version: int,
        servers: Mapping[str, str],
        expected: Expected | None = None,
    ) -> Published:
        """Publish weights that these servers have from their trainer (0 = the next id).

        `servers` says for each the label that it states with them, or nothing where it stands
        paused since before they came. With `expected` a server gets rollouts once it says the like
        after that prompt; a paused one is compared when it resumes. Raises UserError for what is
        none of the run's servers, ConflictError for an id that is not the next or the newest, or
        when none is believed.
        """
        names = self._servers(run)
        if others := sorted(servers.keys() - set(names)):
            raise UserError(
                f"announced: {', '.join(others)}",
                f"servers of run {run.run_id}: {', '.join(names)}",
            )
        async with self._turn:
            if 0 < version < run.weights.version:
                raise ConflictError(
                    f"version {version} of run {run.run_id!r}",
                    f"{run.weights.version} or the next one",
                )
            version = self._core.versions.give(run, version, ANNOUNCED)
            await self._durable()
            weights = ServedWeights(run.run_id, run.tag, version, "", ANNOUNCED, expected)
            began = time.monotonic()
            reasons = await asyncio.gather(
                *(self._claim(name, weights, label) for name, label in servers.items())
            )
            failed = {name: why for name, why in zip(servers, reasons, strict=True) if why}
            if len(failed) == len(servers):
                raise ConflictError(
                    f"version {version} of run {run.run_id!r} announced of servers that do not"
                    f" serve it: {'; '.join(failed.values())}",
                    "servers paused before their weights came, or the label that they state",
                )
            self._core.versions.mark_announced(run)
            if not run.config.backends:
                self._newest = weights
            for name in names:
                if self._target_weights.get(name) != weights:
                    self._target_weights[name] = weights
                    self._core.state.balancer.fence(name)
            took = tuple(name for name in servers if name not in failed)
            for name in took:
                self._serves(name, weights)
            return await self._published(run, weights, took, failed, began)

    async def _claim(self, name: str, weights: ServedWeights, stated: str) -> str:
        """Give a server that has a trainer's weights their label; empty, or why it has them not."""
        expected = stated or self.paused.mark(name)
        if not expected or expected in START_LABELS:
            return (
                f"{name} is not known to have them: pause it before they come"
                " (`POST /v1/backends/pause`), or give a label that it states only since then"
            )
        async with self._lock(name):
            try:
                with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, name):
                    target = self._target(name)
                    began = time.monotonic()
                    label = await target.label()
                    if not weights.is_named(label):
                        if label != expected:
                            return f"{name} states {label!r} instead of {expected!r}"
                        await target.rename(
                            label_of(weights.tag, weights.version, secrets.token_hex(4))
                        )
                        if time.monotonic() - began > CLAIM_S:
                            await target.rename(expected)
                            return f"{name} took longer than {CLAIM_S:g} s to answer: say it again"
                    if name not in self.paused:
                        await self._compare(name, weights)
            except RolloutError as error:
                return str(error)
            return ""

    def _serves(self, name: str, weights: ServedWeights) -> None:
        self._core.state.serves[name] = (weights.run_id, weights.version)
        if self._target_weights.get(name) == weights and name not in self.paused:
            self._core.state.balancer.unfence(name)
            self._core.watched.on_change()

    async def resume(self, name: str) -> str:
        """Let a server that a trainer held sample again; empty, or what is wrong with it. Without
        an announcement since its pause nobody knows its weights: it stays fenced.
        """
        if why := await self.paused.resume(name):
            return why
        label = (await self._stated([name])).get(name, "")
        weights = self._target_weights.get(name)
        if not label and weights is not None:
            return f"{name} took longer than {STATED_S:g} s to state its weights: say it again"
        if label.startswith(MARK) or (weights is not None and not weights.is_named(label)):
            return f"{name} gets no rollout: no version was announced of it since its pause"
        try:
            if weights is not None:
                await self._compare(name, weights)
        except RolloutError as error:
            return f"{name} gets no rollout: {error}"
        self._core.state.balancer.unfence(name)
        self._core.watched.on_change()
        return ""

    def _ended(self, key: tuple[str, int], work: asyncio.Task[Published]) -> None:
        self._running.pop(key, None)
        error = None if work.cancelled() else work.exception()
        if error is not None:  # perhaps nobody waits for it any more
            log.warning("version %d of run %s was not published: %s", key[1], key[0], error)

    async def _publish(self, run: RunRecord, weights: ServedWeights) -> Published:
        async with self._turn_with_servers(run, weights) as names:
            failed: dict[str, str] = {}
            began = time.monotonic()
            if names:
                failed = await self._spread(names, weights, pooled=not run.config.backends)
                if len(failed) == len(names):
                    raise UnavailableError(
                        f"no backend took version {weights.version} of run {run.run_id}:"
                        f" {'; '.join(failed.values())}"
                    )
            took = tuple(name for name in names if name not in failed)
            return await self._published(run, weights, took, failed, began)

    async def _published(
        self,
        run: RunRecord,
        weights: ServedWeights,
        loaded_servers: Sequence[str],
        failed: Mapping[str, str],
        began: float,
    ) -> Published:
        if loaded_servers:
            self._core.versions.mark_loaded(run)
        fresh = self._core.versions.publish(run, weights.version)
        await self._durable()
        _, _, version, path, pause, _ = weights
        reasons = [f"{name}: {why}" for name, why in failed.items()]
        load_s = time.monotonic() - began
        row = VersionRow(
            *(run.run_id, version, weights.label, path, pause),
            *(bool(path) and is_adapter(path), loaded_servers, reasons, load_s),
        )
        await self._keep(row)
        return Published(version, fresh, failed)

    @asynccontextmanager
    async def _turn_with_servers(
        self, run: RunRecord, weights: ServedWeights
    ) -> AsyncIterator[list[str]]:
        """The turn to publish, once one of the servers that should take the weights is not out. Or
        none should. Who waits for its servers, as its rollouts do, keeps no turn from others.
        Raises ConflictError when the run ends while its servers are out.
        """
        while True:
            async with self._turn:
                loads = bool(weights.path) and weights.version >= run.weights.version
                names = self._servers(run) if loads else []
                if not names or not all(self._core.watched.health(n).is_out for n in names):
                    yield names
                    return
            await asyncio.sleep(LOOK_S)
            if run.life.state != "open":  # nobody asks any more how its servers are
                problem = f"version {weights.version} of run {run.run_id!r}, which has ended"
                raise ConflictError(problem, "an open run", "all its servers were out")

    async def _keep(self, row: VersionRow) -> None:
        """Writes it into the run's directory for readers; a disk that refuses stops no training."""
        try:
            await asyncio.to_thread(self._keep_row, row)
        except OSError as error:
            log.warning(
                "version %d of run %s is not in the run's table: %s",
                *(row.version, row.run_id, error),
            )

    def _servers(self, run: RunRecord) -> list[str]:
        names = run.config.backends or tuple(self._core.state.balancer.states)
        return [name for name in names if is_server(name)]

    async def _spread(
        self, names: Iterable[str], weights: ServedWeights, *, pooled: bool
    ) -> dict[str, str]:
        """Give weights to backends, at most half at a time; why those did not that did not."""
        health = self._core.watched.health
        if pooled:
            self._newest = weights
        for name in names:
            self._target_weights[name] = weights
            if health(name).is_out:
                self._core.state.balancer.fence(name)
        able = [name for name in names if not health(name).is_out]
        slots = asyncio.Semaphore(max(1, len(able) // 2))

        async def give(name: str) -> str:
            async with slots:
                return await self._give(name)

        reasons = await asyncio.gather(*(give(name) for name in able))
        outcomes = dict(zip(able, reasons, strict=True))
        out = {
            name: f"{name} is out: {health(name).reason}" for name in names if name not in outcomes
        }
        return out | {name: reason for name, reason in outcomes.items() if reason}

    async def _give(self, name: str) -> str:
        """Have one backend serve what it should; empty, or why it does not. It is fenced then."""
        async with self._lock(name):
            weights = self._target_weights.get(name)
            if weights is None:
                return f"{name} was removed"
            if name in self.paused:
                return f"{name} is paused by its trainer"
            try:
                # Whatever a name leads to is that server's trouble.
                with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, name):
                    await self._unless_out(name, self._load(name, weights))
                    await self._compare(name, weights)
            except RolloutError as error:
                self._fence(name, weights, error)
                return str(error)
            self._serves(name, weights)
            return ""

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())

    async def _compare(self, name: str, weights: ServedWeights) -> None:
        """Refuse a server whose tokens are not those of the weights. Raises BackendError."""
        if weights.expected is None:
            return
        sampled: list[tuple[int, float]] = []
        while (problem := weights.expected.problem(sampled)) or len(sampled) < FEWEST_SAMPLES:
            if problem and len(sampled) >= MOST_SAMPLES:
                self._mistaken[name] = time.monotonic() + MISTAKEN_S
                raise BackendError(
                    FailureCode.BACKEND_PROTOCOL,
                    f"{name} does not serve version {weights.version}, whatever it calls it:"
                    f" {problem}{await asyncio.to_thread(_tied_hint, weights.path)}",
                )
            seeds = range(len(sampled), len(sampled) + FEWEST_SAMPLES)
            sampled += await asyncio.gather(
                *(self._calls.sample(name, weights.expected.prompt_ids, seed) for seed in seeds)
            )
        self._mistaken.pop(name, None)

    def _fence(self, name: str, weights: ServedWeights, error: RolloutError) -> None:
        """Give a server without its weights nothing more; tell of one that cannot be reached."""
        repeated = weights.is_announced and name in self._core.state.balancer.fenced
        log.log(
            logging.DEBUG if repeated else logging.WARNING,
            "backend %s has not version %d and is fenced: %s",
            *(name, weights.version, error),
        )
        if name in self._target_weights:
            self._core.state.balancer.fence(name)
        trouble = error.trouble if isinstance(error, BackendError) else None
        if trouble in (BackendFault.REFUSED, BackendFault.SILENT):
            self._core.watched.reported(name, trouble, 1, 1, str(error))

    async def _unless_out(self, name: str, load: Awaitable[None]) -> None:
        """Wait for a load, as long as its server is not known to be dead."""
        work = asyncio.ensure_future(load)
        try:
            while not work.done():
                await asyncio.wait({work}, timeout=LOOK_S)
                if self._core.watched.health(name).is_out and not work.done():
                    raise BackendError(
                        FailureCode.BACKEND_UNAVAILABLE, f"{name} went out", BackendFault.SILENT
                    )
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _load(self, name: str, weights: ServedWeights) -> None:
        target = self._target(name)
        if weights.is_named(await target.label()):
            await target.resume()  # we may have paused it, in this incarnation or an earlier one
            return
        if weights.is_announced:
            raise BackendError(
                FailureCode.BACKEND_PROTOCOL, "it waits for its trainer to announce them"
            )
        dialect = await target.dialect()
        self._loading.add(name)
        self._tell_paused(name, True)
        try:
            try:
                await target.pause(weights.pause)
                if not dialect.states_labels:
                    await asyncio.sleep(SETTLE_S)
                label = label_of(weights.tag, weights.version, secrets.token_hex(4))
                await target.update(weights.path, weights.version, label)
            finally:
                # Also after a failure: requests that wait end sooner than by their time-out, and
                # say which weights they had. A pause without an answer may have come too.
                await target.resume()
        finally:
            self._loading.discard(name)
            self._tell_paused(name, False)

    def _target(self, name: str) -> WeightTarget:
        # Here: an HTTP client is a tenth of the gateway's start, and few have servers by then.
        import aiohttp

        from prorl.backends.weight_target import WeightTarget

        if self._session is None:
            self._session = aiohttp.ClientSession()
        if name not in self._targets:
            key = self._calls.key_of(name)
            self._targets[name] = WeightTarget(self._session, name, key, self._model)
        return self._targets[name]

    # ---- backends that join, or come back

    def joined(self, name: str) -> None:
        """A server that comes into the pool gets nothing until it has the pool's newest weights."""
        self._targets.pop(name, None)  # from now on it may have the key
        if self._newest is not None and is_server(name):
            self._target_weights[name] = self._newest
            self._core.state.balancer.fence(name)

    def removed(self, name: str) -> None:
        self._target_weights.pop(name, None)
        self._targets.pop(name, None)
        self.paused.forget(name)
        self._core.state.balancer.unfence(name)

    async def begin(self, run: RunRecord) -> None:
        """Note what serves when a run begins: its version 0, whoever published it."""
        labels = await self._stated(self._servers(run))
        self._core.versions.start_with(run, labels.values())
        await self._durable()
        if labels:
            label = " ".join(sorted({*labels.values()}))
            await self._keep(VersionRow(run.run_id, 0, label, loaded_servers=sorted(labels)))

    async def _stated(self, names: Sequence[str], limit_s: float = STATED_S) -> dict[str, str]:
        """Returns what servers call the weights that they serve now. Those that do not say it in
        time are left out.
        """

        async def ask(name: str) -> str:
            try:
                with boundary(BackendError, FailureCode.BACKEND_UNAVAILABLE, name):
                    async with asyncio.timeout(limit_s):
                        return await self._target(name).label()
            except RolloutError:
                return ""

        labels = await asyncio.gather(*(ask(name) for name in names))
        return {name: label for name, label in zip(names, labels, strict=True) if label}

    def _give_back(self) -> None:
        """Servers that no open run uses are nobody's: others may give them weights."""
        runs = self._core.state.open.values()
        used = {name for run in runs for name in self._servers(run)}
        if all(run.config.backends for run in runs):
            self._newest = None
        for name in self._target_weights.keys() - used:
            self._target_weights.pop(name)
            if name not in self.paused:
                self._core.state.balancer.unfence(name)

    async def watch(self) -> None:
        """Give the newest weights again to a backend that serves others. Never returns."""
        self._recall()
        runs = self._core.state.open.values()
        names = sorted({name for run in runs for name in self._servers(run)})
        for name, label in (await self._stated(names)).items():
            self.paused.recall(name, label)
        while True:
            self._give_back()
            for name in list(self._target_weights):
                if name not in self._tending and not self._core.watched.health(name).is_out:
                    self._tending[name] = asyncio.ensure_future(self._tend(name))
            fenced = any(name in self._core.state.balancer.fenced for name in self._target_weights)
            await asyncio.sleep(FENCED_S if fenced else WATCH_S)

    async def _tend(self, name: str) -> None:
        try:
            if (
                name in self._loading
                or name in self.paused
                or time.monotonic() < self._mistaken.get(name, 0.0)
            ):
                return
            label = (await self._stated([name])).get(name)  # None: away, which probes notice
            is_behind = label is not None and not self._target_weights[name].is_named(label)
            if is_behind or name in self._core.state.balancer.fenced:
                await self._give(name)
        finally:
            self._tending.pop(name, None)

    def _recall(self) -> None:
        """Reads from the log what backends should serve, after a restart of the gateway. Until they
        say so they are fenced.
        """
        runs = [run for run in self._core.state.open.values() if run.weights.version]
        for run in sorted(runs, key=lambda run: run.created_at):
            statement = "SELECT note FROM versions WHERE run_id = ? AND version = ?"
            ((path,),) = self._core.log.read(statement, (run.run_id, run.weights.version))
            if path:
                announced = path == ANNOUNCED
                weights = ServedWeights(
                    run.run_id,
                    run.tag,
                    run.weights.version,
                    "" if announced else path,
                    ANNOUNCED if announced else "abort",
                )
                self._target_weights |= dict.fromkeys(self._servers(run), weights)
                if not run.config.backends:
                    self._newest = weights
        for name in self._target_weights:
            self._core.state.balancer.fence(name)


def _tied_hint(path: str) -> str:
    """Returns how to mend wrong logprobs of a model that ties its embeddings; else empty."""
    try:
        config = orjson.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError):
        return ""
    if not path or not isinstance(config, dict) or not config.get("tie_word_embeddings"):
        return ""
    return (
        ". Its embeddings are tied, and a vLLM does not load the output layer of such a directory:"
        " publish the copy that `python -m prorl.trainer.untie MODEL OUT` makes"
    )
