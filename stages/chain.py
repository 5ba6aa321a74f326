"""`Chain`: the stages of one process, in one loop: what the gateway calls a worker.

    leases --> INIT --ready--> RUN --ran--> EVAL --scored--> store

    async with Chain(config, "worker-0", network, host) as chain:
        await chain.wait()    # until all have left, as they were asked; raises what broke one

Each stage has its own edges, all of them served at the location of the process; between two stages
of the chain rows pass in memory. One control stream speaks for all: the gateway knows one worker,
which has an attempt from its lease on until the attempt's row is committed. So nothing is lost
between two stages, and the next incarnation of the process claims at once what this one had.

Late stages come first: INIT takes no new lease while what RUN has finished waits too long to be
scored and stored (`LATE_S`). In one loop INIT and RUN would otherwise get as many turns as they ask
for, and what is nearly done would wait for what has just begun.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Iterable, Mapping
from contextlib import AsyncExitStack
from itertools import chain as chained
from typing import Final

from prorl.config import ServiceConfig
from prorl.config.layout import processes, upstreams, worker_of
from prorl.control import ControlRow, Drain, Hello, Kind, Released, Welcome
from prorl.errors import RolloutError, StorageError
from prorl.flight import ControlClient, this_incarnation
from prorl.graph import GRAPH
from prorl.linux import crashes
from prorl.process import until_first
from prorl.protocols import Network, SandboxHost
from prorl.sandbox.images.registry import Registry, default_root
from prorl.schema.columns import read_sandbox
from prorl.stages.chained import ChainedStage, operator_of
from prorl.stages.operator import owner_of

LATE_S: Final = 2.0
"""So long a finished row may wait for its score and its commit before INIT begins nothing new.

Shorter, a store that flushes each half second would hold INIT back; longer, a trainer waits.
"""

log = logging.getLogger("prorl.stages")


class Chain:
    """Made, used and closed on one event loop."""

    def __init__(
        self, config: ServiceConfig, process: str, network: Network, host: SandboxHost
    ) -> None:
        stages = processes(config)[process]
        identity = _identity(config, process, stages)
        # The store is on another host: what is scored is the only edge that leaves a node.
        is_outer = bool(config.gateway) and GRAPH.names[-1] in stages
        self._outer = f"grpc+tls://{config.advertise}:0" if is_outer else ""
        self.control = ControlClient(
            network,
            config.gateway_flight,
            identity,
            attempts=lambda: {name: stage.stage.in_hand() for name, stage in self.stages.items()},
            claims=lambda: chained.from_iterable(s.claims() for s in self.stages.values()),
            stats=lambda: {name: stage.stats() for name, stage in self.stages.items()},
            on=dict.fromkeys(Kind, self._handle_control),
        )
        self.stages = {
            stage: ChainedStage(
                config,
                stage,
                worker_of(process, stage),
                network,
                host,
                self.control,
                identity,
                location=config.worker_flight(process),
                upstreams=upstreams(config, process, stage),
                may_begin=self._may_begin,
            )
            for stage in stages
        }
        self._host, self._stack = host, AsyncExitStack()
        self._tasks: list[asyncio.Task[None]] = []
        self._keeping: set[asyncio.Task[None]] = set()
        """At most one for each session with the gateway, and each of them ends within seconds."""

    async def __aenter__(self) -> Chain:
        """Late stages are up first: who dials finds somebody."""
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._end_control)
            for name, stage in reversed(self.stages.items()):
                stack.push_async_callback(stage.stop)
                is_last = name == GRAPH.names[-1]
                location = await stage.start(self._outer if is_last else "")
                if is_last:
                    self.control.announce(location)
            self.control.start()
            self._stack = stack.pop_all()
        self._tasks = [asyncio.ensure_future(self._run_to_end(s)) for s in self.stages.values()]
        return self

    async def __aexit__(self, *exc: object) -> None:
        """The first stages stop first, all that begin work at once; then those that end it."""
        self.control.leave()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        early = [s for name, s in self.stages.items() if name not in GRAPH.separable]
        await asyncio.gather(*(stage.stop() for stage in early))
        await self._stack.aclose()

    async def _end_control(self) -> None:
        """Give back what is still in hand, so that the gateway waits for no next incarnation of
        ours, and close the control stream.
        """
        for name, stage in self.stages.items():
            for key in stage.stage.in_hand():
                self.control.emit(Released(), key, stage=name)
        await self.control.close()
        await asyncio.gather(*self._keeping)

    async def wait(self) -> None:
        """Waits until every stage has left; raises what broke one."""
        await until_first(self._all_ended(), self.control.wait())
        await self._end_control()

    async def _all_ended(self) -> None:
        await asyncio.gather(*map(asyncio.shield, self._tasks))

    def leave(self, deadline_s: float | None) -> None:
        """Take nothing new, end what is in hand, and be done; see `ChainedStage.leave`."""
        self.control.leave()
        for stage in self.stages.values():
            stage.leave(deadline_s)

    @staticmethod
    async def _run_to_end(stage: ChainedStage) -> None:
        await stage.wait()
        await stage.stop()

    def _handle_control(self, row: ControlRow) -> None:
        for stage in self.stages.values():
            stage.handle_control(row)
        match row.kind:
            case Kind.WELCOME:
                self._resume(row.read(Welcome))
            case Kind.DRAIN:
                self.leave(row.read(Drain).deadline_s)

    def _resume(self, welcome: Welcome) -> None:
        """Go on with the attempts that the gateway's `welcome` leaves to us, those adopted from an
        earlier incarnation included. Sandboxes of an earlier incarnation that belong to no such
        attempt end.
        """
        resumed = [row for stage in self.stages.values() for row in stage.resume(welcome)]
        kept = {owner_of(row.key): read_sandbox(row.row).sandbox_id for row in resumed}
        self._keeping.add(keeping := asyncio.ensure_future(self._keep(kept)))
        keeping.add_done_callback(self._keeping.discard)

    async def _keep(self, sandboxes: Mapping[str, str]) -> None:
        try:
            await self._host.keep(sandboxes)
        except RolloutError as error:
            log.warning("cannot end the sandboxes of an earlier incarnation: %s", error)

    def _may_begin(self) -> bool:
        """Returns whether INIT may begin a rollout: no row that RUN has finished waits too long for
        its score and its commit, as far as the stages of this process know.

        A few late rows are a slow grader's; more than RUN has slots are a loop, or a store, that
        does not keep up.
        """
        run = self.stages["run"].stage
        return run.num_finished <= run.slots or run.longest_finished_s < LATE_S


def _identity(config: ServiceConfig, process: str, stages: Iterable[str]) -> Hello:
    """Returns the hello by which the process introduces itself on all of its streams."""
    begins = GRAPH.names[0] in stages
    return this_incarnation(
        roles={stage: config.pool(stage).slots for stage in stages},
        worker=config.worker_name(process),
        node=config.node_id,
        location=config.worker_flight(process),
        remote=bool(config.gateway),
        can_resume=any(operator_of(stage).can_resume for stage in stages),
        home=str(config.socket_dir),
        fatal_attempt=os.environ.get(crashes.FATAL_ATTEMPT, ""),
        images=_images(config) if begins and config.gateway else None,
    )


def _images(config: ServiceConfig) -> tuple[str, ...]:
    """NAME=DIGEST of each image of this node."""
    registry = Registry(config.sandbox.images or default_root())
    try:
        registry.open()
        images = registry.list()
    except StorageError:
        return ()
    return tuple(f"{name}={image.digest}" for image in images for name in image.names)


def on_signals(chain: Chain) -> None:
    """SIGUSR1 has a chain leave, SIGUSR2 give back what it has not finished."""
    loop = asyncio.get_running_loop()
    for number, deadline_s in ((signal.SIGUSR1, None), (signal.SIGUSR2, 0.0)):
        loop.add_signal_handler(number, chain.leave, deadline_s)
