"""`ChainedStage`: one stage of a chain: its operator, its host, its edges.

It does not know whether its edges cross a socket or stay inside the loop. It has no control stream
of its own: its events go out by the chain's, whose rows come in by `hear`.

Who is upstream follows from the configuration (`prorl.config.layout`): INIT's is the gateway, the
others' are the stages before them on the same host, in the same process where they are one chain.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import cache
from importlib import import_module

import msgspec

from prorl.config import ServiceConfig
from prorl.control import (
    Assigned,
    Claim,
    ControlRow,
    Failover,
    Hello,
    Kind,
    Stats,
    Welcome,
)
from prorl.envs.users import env_by_name
from prorl.flight import ControlClient, Inlet
from prorl.flight.inlet import ReceivedRow
from prorl.graph import GRAPH
from prorl.linux import crashes
from prorl.protocols import Network, SandboxHost
from prorl.stages.host import StageHost
from prorl.stages.operator import StageOperator, WorkerParts, owner_of
from prorl.stages.run import RunOperator
from prorl.types import AttemptKey
from prorl.waits import wait_limit_s

LEAVE_S, END_S = wait_limit_s("chain.leave"), wait_limit_s("chain.end_first")

ALONE_S = wait_limit_s("chain.alone")

LOOK_S = 0.25

log = logging.getLogger("prorl.stages")


def operator_of(stage: str) -> type[StageOperator]:
    module, _, kind = GRAPH.row(stage).operator.partition(":")
    operator: type[StageOperator] = getattr(import_module(module), kind)
    return operator


class ChainedStage:
    """Made, used and closed on one event loop."""

    def __init__(
        self,
        config: ServiceConfig,
        stage: str,
        name: str,
        network: Network,
        host: SandboxHost,
        control: ControlClient,
        identity: Hello,
        *,
        location: str,
        upstreams: Iterable[str],
        may_begin: Callable[[], bool] = lambda: True,
    ) -> None:
        """`name` is that of its journal and of its port for guests, `location` is where its process
        serves, `upstreams` are the locations that it dials. `may_begin` tells whether a stage that
        takes leases may take more.
        """
        pool = config.pool(stage)
        self._network, self._stage, self._location = network, stage, location
        self._upstreams, self._control = tuple(upstreams), control
        cancelled: set[AttemptKey] = set()
        self._operator = operator_of(stage).of_worker(
            WorkerParts(
                config=config,
                name=name,
                process=identity.worker,
                host=host,
                get_env=cache(env_by_name),
                is_cancelled=cancelled.__contains__,
                emit=control.emit,
                ask=self._failover,
                waits=lambda key, waits: self._inlet.waits(key, waits),
            )
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
            control.emit,
            slots=pool.slots,
            finished_bytes=pool.finished_bytes,
            cancelled=cancelled,
            tokens=lambda: self._operator.num_tokens,
            on_forget=self._operator.forget,
            quarantine_reason=lambda key: crashes.quarantine_reason(
                config.root / "quarantine", owner_of(key)
            ),
        )
        self._draining = asyncio.Event()
        self._tasks: tuple[asyncio.Task[None], ...] = ()
        self._is_stopped = False

    async def start(self, outer: str = "") -> str:
        """Serve its edge, for other hosts at `outer` as well, and begin to work. Returns the
        location that others dial.
        """
        await self._operator.open()
        outlet = self.stage.outlet
        routes = {outlet.path: outlet.route}
        await self._network.listen(self._location, routes)
        served = await self._network.listen(outer, routes) if outer else self._location
        self._tasks = tuple(
            asyncio.ensure_future(work) for work in (self.stage.run(), self._drained())
        )
        return served

    async def stop(self) -> None:
        """Stop what is in hand, give it LEAVE_S to be reported and taken, leave; idempotent."""
        if self._is_stopped:
            return
        self._is_stopped = True
        self.stage.drain()
        self.stage.cancel_all()
        try:
            leave_s = END_S if self.stage.acks_on_commit else LEAVE_S
            await asyncio.wait_for(self.stage.wait_empty(), leave_s)
        except TimeoutError:
            log.debug("%s ends with %d rows in hand", self._stage, len(self.stage.in_hand()))
        await self._inlet.close()
        await self.stage.outlet.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._operator.close()

    async def wait(self) -> None:
        """Waits until drained; raises what broke the stage."""
        done, _ = await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()

    async def _drained(self) -> None:
        """Wait until asked to leave and free to: nothing is in hand, or nobody is there for it."""
        await self._draining.wait()
        # what RUN has finished is scored first
        while self.stage.acks_on_commit and self._inlet.num_upstreams:
            await asyncio.sleep(LOOK_S)
        while num_in_hand := len(self.stage.in_hand()):
            alone_s = self._control.alone_s
            if alone_s >= ALONE_S and not self.stage.stats().busy:
                log.warning(
                    "no gateway for %.0f s: leaving with %d finished rows", alone_s, num_in_hand
                )
                return
            await asyncio.sleep(LOOK_S)

    def leave(self, deadline_s: float | None) -> None:
        """Take nothing new, end what is in hand, and be done.

        After `deadline_s` (None: never) what is still worked on goes back to the gateway; at INIT
        at once, since RUN begins nothing that it could not end. Finished rows wait for the store;
        EVAL goes last. The earliest of several deadlines counts.
        """
        if not self.stage.acks_on_commit:
            self.stage.drain()
        if self.stage.is_at_most_once:
            self.stage.give_back()
        elif not self.stage.acks_on_commit and deadline_s is not None:
            asyncio.get_running_loop().call_later(deadline_s, self.stage.give_back)
        self._draining.set()

    # ---- what the gateway says

    def handle_control(self, row: ControlRow) -> None:
        """Handle a row of the gateway's control stream. The operator comes first: it must know what
        is paused before a row ends or begins.
        """
        handler = self._operator.handlers.get(row.kind)
        if handler is not None:
            handler(row)
        if row.kind is Kind.CANCEL:
            self.stage.cancel(row.key)

    def resume(self, welcome: Welcome) -> list[ReceivedRow]:
        """Begin a session with the gateway: stop the attempts that it refuses, go on with those of
        an earlier incarnation that it adopts here, and take rows. Returns the adopted rows.
        """
        for key in welcome.refused:
            self.stage.cancel(key)
        resumed = list(self._operator.adopted(welcome.adopted))
        for row in resumed:
            self._inlet.adopt(row)
        self._inlet.set_upstreams(self._upstreams)
        return resumed

    # ---- what the gateway hears

    def claims(self) -> Iterable[Claim]:
        return self._operator.claims()

    def stats(self) -> Stats:
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

    async def _failover(self, problem: Failover) -> Assigned:
        return await self._control.request(problem, run_id=problem.attempt.run_id)
