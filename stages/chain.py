"""`Chain`: the stages of one process, in one loop.

    leases --> INIT --ready--> RUN --ran--> EVAL --scored--> store

    async with Chain(config, "worker-0", network, host) as chain:
        await chain.wait()    # until all have left, as they were asked; raises what broke one

Each stage is a `Worker` with its own edges and its own word to the gateway. All edges are served at
the location of the process; between two stages of the chain rows pass in memory.

Late stages come first: INIT takes no new lease while what RUN has finished waits too long to be
scored and stored (`LATE_S`). In one loop INIT and RUN would otherwise get as many turns as they ask
for, and what is nearly done would wait for what has just begun.
"""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from typing import Final

from prorl.config import ServiceConfig
from prorl.config.layout import processes, upstreams, worker_of
from prorl.graph import GRAPH
from prorl.protocols import Network, SandboxHost
from prorl.stages.worker import Worker

LATE_S: Final = 2.0
"""So long a finished row may wait for its score and its commit before INIT begins nothing new.

Shorter, a store that flushes each half second would hold INIT back; longer, a trainer waits.
"""


class Chain:
    """Made, used and closed on one event loop."""

    def __init__(
        self, config: ServiceConfig, process: str, network: Network, host: SandboxHost
    ) -> None:
        self.workers = {
            stage: Worker(
                config,
                stage,
                worker_of(process, stage),
                network,
                host,
                location=config.worker_flight(process),
                upstreams=upstreams(config, process, stage),
                may_begin=self._may_begin,
            )
            for stage in processes(config)[process]
        }
        self._stack = AsyncExitStack()
        self._lives: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Chain:
        """Late stages are up first: who dials finds somebody."""
        async with AsyncExitStack() as stack:
            for worker in reversed(self.workers.values()):
                await worker.start()
                stack.push_async_callback(worker.stop)
            self._stack = stack.pop_all()
        self._lives = [asyncio.ensure_future(self._live(w)) for w in self.workers.values()]
        return self

    async def __aexit__(self, *exc: object) -> None:
        """The first stages stop first, all that begin work at once; then those that end it."""
        for life in self._lives:
            life.cancel()
        await asyncio.gather(*self._lives, return_exceptions=True)
        early = [w for stage, w in self.workers.items() if stage not in GRAPH.separable]
        await asyncio.gather(*(worker.stop() for worker in early))
        await self._stack.aclose()

    async def wait(self) -> None:
        """Until every stage has left; raises what broke one."""
        await asyncio.gather(*map(asyncio.shield, self._lives))

    def leave(self, deadline_s: float | None) -> None:
        """Take nothing new, end what is in hand, and be done; see `Worker.leave`."""
        for worker in self.workers.values():
            worker.leave(deadline_s)

    @staticmethod
    async def _live(worker: Worker) -> None:
        await worker.wait()
        await worker.stop()

    def _may_begin(self) -> bool:
        """Whether nothing that RUN has finished waits for too long; judged by the late stages here.

        A few late rows are a slow grader's; more than RUN has slots are a loop, or a store, that
        does not keep up.
        """
        run = self.workers["run"].stage
        return run.num_finished <= run.slots or run.longest_finished_s < LATE_S


def on_signals(chain: Chain) -> None:
    """SIGUSR1 has a chain leave, SIGUSR2 give back what it has not finished."""
    loop = asyncio.get_running_loop()
    for number, deadline_s in ((signal.SIGUSR1, None), (signal.SIGUSR2, 0.0)):
        loop.add_signal_handler(number, chain.leave, deadline_s)
