"""A real gateway, a real store, and a pipeline of one object between them: leases become SCORED
rows at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pyarrow as pa

from prorl.client.client import Client
from prorl.control import Started
from prorl.flight import FlightNetwork
from prorl.flight.control_client import ControlClient, this_incarnation
from prorl.flight.inlet import Inlet
from prorl.flight.outlet import Outlet
from prorl.schema.columns import read_lease
from prorl.schema.rows import Row
from prorl.storage.serve.service import Store, serving
from prorl.types import (
    NO_FAILURE,
    AttemptKey,
    Failure,
    FailureCode,
    RewardPart,
    SandboxRef,
    Score,
    StopReason,
    Trajectory,
)
from tests.edge_rows import put, ran_row, ready_row, scored_row
from tests.service.running_gateway import TOKEN, GatewayHarness
from tests.storage.scored_rows import sequence, turn

Reward = Callable[[int, int], float | None]
"""(group, sample) -> reward; None: the grader fails."""


def alternate(group_id: int, sample_index: int) -> float:
    """Even groups are informative, odd ones are not."""
    return float(sample_index % 2) if group_id % 2 == 0 else 1.0


class Pipeline:
    """INIT and EVAL in one: takes leases, offers SCORED rows."""

    def __init__(
        self, gateway: GatewayHarness, reward: Reward, version: Callable[[int], int]
    ) -> None:
        self._reward, self._version = reward, version
        self.location = (
            gateway.config.worker_flight("eval-0")
            if isinstance(gateway.network, FlightNetwork)
            else "at-eval-0"
        )
        self._network = gateway.network
        init = this_incarnation(roles={"init": 64}, worker="init-0")
        scored = this_incarnation(roles={"eval": 64}, worker="eval-0", location=self.location)
        self.outlet = Outlet("scored")
        self._init = ControlClient(gateway.network, gateway.config.gateway_flight, init, on={})
        self._eval = ControlClient(gateway.network, gateway.config.gateway_flight, scored, on={})
        self._inlet = Inlet(gateway.network, "lease", init, slots=64)
        self._gateway = gateway.config.gateway_flight
        self._work: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pipeline:
        await self._network.listen(self.location, {self.outlet.path: self.outlet.route})
        for control in (self._init, self._eval):
            control.start()
            await control.welcomed.wait()
        self._inlet.set_upstreams([self._gateway])
        self._work = asyncio.create_task(self._run())
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._inlet.close()
        assert self._work is not None
        await self._work
        for control in (self._init, self._eval):
            await control.close()

    async def _run(self) -> None:
        while rows := await self._inlet.take():
            for key, row, *_ in rows:
                self._init.emit(Started(), key, stage="init")
                self._eval.emit(Started(), key, stage="run")
                self._inlet.done(key)
                await put(self.outlet, self._scored(key, row))

    def _scored(self, key: AttemptKey, row: Row) -> pa.RecordBatch:
        lease = read_lease(row)
        trajectory = Trajectory(
            sequences=(sequence(key.rollout_id, version=self._version(lease.group_id)),),
            turns=(turn(0), turn(1)),
            messages=(),
            artifact=b"2",
            stop_reason=StopReason.DONE,
            failure=Failure(code=FailureCode.NONE),
            llm_s=1.0,
            tool_s=0.5,
        )
        value = self._reward(lease.group_id, lease.sample_index)
        ran = ran_row(
            ready_row(row.as_batch, sandbox=SandboxRef(), prompt=(), tools=(), init_s=0.1),
            trajectory,
            run_s=2.0,
        )
        score = None if value is None else Score(parts=(RewardPart(name="exact", value=value),))
        failure = NO_FAILURE
        if score is None:
            failure = Failure(code=FailureCode.GRADER_ERROR, message="exact: it raised")
        trace = "" if score else "Traceback: in exact"
        return scored_row(ran, score=score, failure=failure, eval_s=0.1, trace=trace)


@asynccontextmanager
async def pipeline(
    gateway: GatewayHarness,
    reward: Reward = alternate,
    version: Callable[[int], int] = lambda group_id: 0,
) -> AsyncIterator[Pipeline]:
    """A pipeline that works."""
    async with Pipeline(gateway, reward, version) as made:
        yield made


@asynccontextmanager
async def store(gateway: GatewayHarness) -> AsyncIterator[Store]:
    """A store that works; leaving drains it. Raises what it died of."""
    async with (
        FlightNetwork(token=TOKEN) as trainers,
        serving(gateway.config, gateway.network, trainers) as (made, work),
    ):
        await made.control.welcomed.wait()
        yield made
        if work.done():
            work.result()


@contextmanager
def client(location: str) -> Iterator[Client]:
    """A trainer's client of a store or replay; call it from threads."""
    with Client(flight=location, token=TOKEN) as made:
        yield made


def directory(gateway: GatewayHarness, run_id: str = "r") -> Path:
    """Returns the folder of a run."""
    return gateway.config.root / run_id
