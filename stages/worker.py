"""`Worker`: one stage as a member of a service: its host, its edges, its control stream.

The same over Flight and inside one loop.

    worker = Worker(config, "run", "run-0", network, host, location=..., upstreams=...)
    await worker.start()
    await worker.wait()    # until it has left, as it was asked; raises what broke
    await worker.stop()

Who is upstream follows from the configuration (`prorl.config.layout`): INIT's is the gateway, the
others' are the stages before them on the same host, in the same process where they are one chain.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import import_module

import msgspec

from prorl.config import ServiceConfig
from prorl.control import (
    Assigned,
    ControlRow,
    Drain,
    Failover,
    Kind,
    Payload,
    Released,
    Stats,
    Welcome,
)
from prorl.envs.users import env_by_name
from prorl.errors import StorageError
from prorl.flight import ControlClient, Inlet, this_life
from prorl.graph import GRAPH
from prorl.linux import at_work
from prorl.protocols import Network, SandboxHost
from prorl.sandbox.images.registry import Registry, default_root
from prorl.stages.host import StageHost
from prorl.stages.operator import Handler, StageOperator, WorkerParts, owner_of
from prorl.stages.run import RunOperator
from prorl.types import AttemptKey

LEAVE_S, END_S = 4.0, 2.0
"""How long a leaving stage waits for what it stopped to be taken: the first stages of a chain, then
those that end what the first have begun. Within the 7 s that a worker is given to end.
"""

ALONE_S = 20.0
"""A leaving worker that has no gateway for this long waits for it no longer: what it holds has been
given to others by then, or is a moment after the gateway is back.
"""

LOOK_S = 0.25

log = logging.getLogger("prorl.stages")


class Worker:
    """Made, used and closed on one event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        stage: str,
        name: str,
        network: Network,
        host: SandboxHost,
        *,
        location: str,
        upstreams: Iterable[str],
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        """`location`: where its process serves; `upstreams`: what it dials. `may_begin`: whether a
        stage that takes leases may take more of them.
        """
        pool, row = config.pool(stage), GRAPH.row(stage)
        self._is_last = stage == GRAPH.names[-1]
        self._config, self._network, self._stage, self._name = config, network, stage, name
        self._upstreams, self.location = tuple(upstreams), location
        cancelled: set[AttemptKey] = set()
        module, _, kind = row.operator.partition(":")
        operator: type[StageOperator] = getattr(import_module(module), kind)
        identity = this_life(
            role=stage,
            worker=config.worker_name(name),
            node=config.node_id,
            location=location,
            slots=pool.slots,
            remote=bool(config.gateway),
            resumes=operator.resumes,
            home=str(config.socket_dir),
            died_at=os.environ.get(at_work.DIED_AT, ""),
            images=_images(config) if not GRAPH.upstream(stage) and config.gateway else None,
        )
        self._operator = operator.of_worker(
            WorkerParts(
                config=config,
                name=name,
                host=host,
                get_env=cache(env_by_name),
                is_cancelled=cancelled.__contains__,
                emit=self._emit,
                ask=self._failover,
                waits=lambda key, waits: self._inlet.waits(key, waits),
            )
        )
        self._handlers: Mapping[Kind, Handler] = {
            Kind.WELCOME: self._welcome,
            Kind.CANCEL: lambda row: self.stage.cancel(row.key),
            Kind.DRAIN: self._drain,
        }
        self._control = ControlClient(
            network,
            config.gateway_flight,
            identity,
            held=lambda: self.stage.held(),
            claims=self._operator.claims,
            stats=self._stats,
            on=dict.fromkeys({**self._operator.handlers, **self._handlers}, self._hear),
        )
        self._inlet = Inlet(
            network,
            GRAPH.takes(stage),
            identity,
            slots=pool.slots,
            window_bytes=pool.finished_bytes,
            received=self._operator.received,
            path=GRAPH.path(GRAPH.upstream(stage)),
            may_take=(lambda: True) if GRAPH.upstream(stage) else may_begin,
        )
        self.stage = StageHost(
            self._operator,
            self._inlet,
            self._control.emit,
            slots=pool.slots,
            finished_bytes=pool.finished_bytes,
            cancelled=cancelled,
            tokens=lambda: self._operator.num_tokens,
            on_left=self._operator.left,
            poison=lambda key: at_work.poison(config.root / "poison", owner_of(key)),
        )
        self._draining = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._is_stopped = False

    async def start(self) -> None:
        """Serve its edge and come to the gateway."""
        await self._operator.open()
        outlet = self.stage.outlet
        await self._network.listen(self.location, {outlet.path: outlet.route})
        if self._config.gateway and self._is_last:
            # The store is on another host: what is scored is the only edge that leaves a node.
            outer = f"grpc+tls://{self._config.advertise}:0"
            self._control.announce(await self._network.listen(outer, {outlet.path: outlet.route}))
        self._control.start()
        self._tasks = tuple(
            asyncio.ensure_future(work)
            for work in (self.stage.run(), self._control.wait(), self._drained())
        )

    async def stop(self) -> None:
        """Stop what is in hand, give it LEAVE_S to be reported and taken, leave; idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self._control.leave()
        self.stage.drain()
        self.stage.cancel_all()
        try:
            leave_s = END_S if self.stage.is_acked_later else LEAVE_S
            await asyncio.wait_for(self.stage.wait_empty(), leave_s)
        except TimeoutError:
            for key in self.stage.held():  # nobody needs to wait whether we come back with these
                self._emit(Released(), key, stage=self._stage)
        await self._control.close()
        await self._inlet.close()
        await self.stage.outlet.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._operator.close()

    async def wait(self) -> None:
        """Until drained; raises what broke the worker."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _drained(self) -> None:
        """Wait until asked to leave and free to: nothing is in hand, or nobody is there for it."""
        await self._draining.wait()
        # what RUN has finished is scored first
        while self.stage.is_acked_later and self._inlet.num_upstreams:
            await asyncio.sleep(LOOK_S)
        while held := len(self.stage.held()):
            alone_s = self._control.alone_s
            if alone_s >= ALONE_S and not self.stage.stats().busy:
                log.warning("no gateway for %.0f s: leaving with %d finished rows", alone_s, held)
                return
            await asyncio.sleep(LOOK_S)

    def leave(self, deadline_s: float | None) -> None:
        """Take nothing new, end what is in hand, and be done.

        After `deadline_s` (None: never) what is still worked on goes back to the gateway; at INIT
        at once, since RUN begins nothing that it could not end. Finished rows wait for the store;
        EVAL goes last. The earliest of several deadlines counts.
        """
        self._control.leave()
        if not self.stage.is_acked_later:
            self.stage.drain()
        if self.stage.gives_once:
            self.stage.give_back()
        elif not self.stage.is_acked_later and deadline_s is not None:
            asyncio.get_running_loop().call_later(deadline_s, self.stage.give_back)
        self._draining.set()

    # ---- what the gateway says

    def _hear(self, row: ControlRow) -> None:
        """The operator hears first: it must know what is paused before a row ends or begins."""
        for handlers in (self._operator.handlers, self._handlers):
            handler = handlers.get(row.kind)
            if handler is not None:
                handler(row)

    def _welcome(self, row: ControlRow) -> None:
        welcome = row.read(Welcome)
        for key in welcome.refused:
            self.stage.cancel(key)
        for taken in self._operator.adopted(welcome.adopted, welcome.elsewhere):
            self._inlet.adopt(taken)
        self._inlet.set_upstreams(self._upstreams)

    def _drain(self, row: ControlRow) -> None:
        self.leave(row.read(Drain).deadline_s)

    # ---- what the gateway hears

    async def _failover(self, asked: Failover) -> Assigned:
        return await self._control.request(asked, run_id=asked.attempt.run_id)

    def _stats(self) -> Stats:
        stats = msgspec.structs.replace(self.stage.stats(), sources=self._inlet.sources)
        if not isinstance(self._operator, RunOperator):
            return stats
        backends = self._operator.backends
        return msgspec.structs.replace(
            stats,
            backends=dict(backends.served),
            runs=dict(backends.runs),
            waits_for=self._operator.waits_for,
        )

    def _emit(self, payload: Payload, key: AttemptKey, *, stage: str, code: str = "") -> None:
        self._control.emit(payload, key, stage=stage, code=code)


def _images(config: ServiceConfig) -> tuple[str, ...]:
    """NAME=DIGEST of each image of this node."""
    registry = Registry(config.sandbox.images or default_root())
    try:
        registry.open()
        found = registry.list()
    except StorageError:
        return ()
    return tuple(f"{name}={image.digest}" for image in found for name in image.names)
