"""Three workers between a scripted gateway and store, over both networks: the real operators with
the env that does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from prorl.config import ServiceConfig, StageConfig
from prorl.control import ControlRow, Drain, Kind, VersionPublished
from prorl.graph import GRAPH, StageRow
from prorl.stages.operator import Handler, StageOperator, WorkerParts
from prorl.stages.worker import Worker
from prorl.types import RunWeights, Stage
from tests.flight.conftest import Net
from tests.flight.rows import key, lease
from tests.stages.service import Gateway, RecordingHost, Store, as_host
from tests.waiting import until


class Pipeline:
    """A running service of one worker per stage."""

    def __init__(self, config: ServiceConfig, net: Net, slots: int) -> None:
        self.config = config
        self.gateway = Gateway(net.network, config.gateway_flight)
        self.host = RecordingHost()
        self.store = Store(net.network, [config.worker_flight("eval-0")])
        self.workers: dict[str, Worker] = {}


@asynccontextmanager
async def pipeline(net: Net, tmp_path: Path, slots: int = 8) -> AsyncIterator[Pipeline]:
    pool = StageConfig(slots=slots)
    config = ServiceConfig(root=tmp_path, socket_dir=tmp_path, init=pool, run=pool, eval=pool)
    service = Pipeline(config, net, slots)
    await service.gateway.listen()
    storing = asyncio.ensure_future(service.store.run())
    async with AsyncExitStack() as stack:
        for stage in Stage:
            name = f"{stage}-0"
            worker = Worker(config, stage, name, net.network, as_host(service.host))
            service.workers[name] = await stack.enter_async_context(worker)
        yield service
    await service.store.inlet.close()
    await storing


class Listening(StageOperator):
    """Does nothing; notes what it hears and that it was closed."""

    stage = Stage.RUN
    made: ClassVar[list[Listening]] = []

    @classmethod
    def of_worker(cls, parts: WorkerParts) -> Listening:
        cls.made.append(cls())
        return cls.made[-1]

    def __init__(self) -> None:
        self.num_tokens = 0
        self.heard: list[ControlRow] = []
        self.closed: list[bool] = []

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        return dict.fromkeys((Kind.WELCOME, Kind.VERSION), self.heard.append)

    async def close(self) -> None:
        self.closed.append(True)


async def test_an_operator_hears_what_it_declares_and_is_closed(
    net: Net, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = StageRow("run", "ran", f"{__name__}:Listening")
    monkeypatch.setattr(GRAPH, "rows", (GRAPH.rows[0], told, GRAPH.rows[2]))
    config = ServiceConfig(root=tmp_path, socket_dir=tmp_path)
    gateway = Gateway(net.network, config.gateway_flight)
    await gateway.listen()
    async with Worker(config, Stage.RUN, "run-0", net.network, as_host(RecordingHost())):
        operator = Listening.made[-1]
        await until(lambda: bool(operator.heard))
        published = VersionPublished(version=3, weights=RunWeights(tag="t"))
        gateway.tell("run-0", ControlRow.of(published, run_id="r"))
        gateway.tell("run-0", ControlRow.of(Drain()))
        await until(lambda: len(operator.heard) == 2)
        assert [row.kind for row in operator.heard] == [Kind.WELCOME, Kind.VERSION]
        assert operator.closed == []
    assert operator.closed == [True]


async def test_rollouts_flow_through_all_stages(net: Net, tmp_path: Path) -> None:
    async with pipeline(net, tmp_path) as service:
        service.gateway.lease(lease(n) for n in range(40))
        await service.store.have(40)
        assert all(service.store.value(key(n), "reward") == 1.0 for n in range(40))
        await until(lambda: len(service.gateway.events) == 120)
        for stage in ("init", "run", "eval"):
            assert sorted(service.gateway.said(Kind.STARTED, stage)) == list(range(40))
        assert {row.kind for row in service.gateway.events} == {Kind.STARTED}
        await until(lambda: not any(worker.stage.held() for worker in service.workers.values()))
        await until(lambda: service.gateway.num_taken == 40)
        assert service.store.num_received == 40


async def test_a_store_that_does_not_ack_keeps_rows_in_run_and_eval(
    net: Net, tmp_path: Path
) -> None:
    async with pipeline(net, tmp_path) as service:
        service.store.acking = False
        service.gateway.lease(lease(n) for n in range(20))
        await service.store.have(20)
        await until(lambda: not service.workers["init-0"].stage.held())
        assert [len(service.workers[name].stage.held()) for name in ("run-0", "eval-0")] == [20, 20]
        service.store.ack_all()
        await until(lambda: not any(worker.stage.held() for worker in service.workers.values()))


@pytest.mark.parametrize("field", ["env", "data"])
async def test_bad_tasks_fail_in_init_with_their_class(
    net: Net, tmp_path: Path, field: str
) -> None:
    async with pipeline(net, tmp_path) as service:
        service.gateway.lease([lease(1, env="nosuch" if field == "env" else "math"), lease(2)])
        await service.store.have(1)
        await until(
            lambda: bool([row for row in service.gateway.events if row.kind is Kind.FAILED])
        )
        (failed,) = [row for row in service.gateway.events if row.kind is Kind.FAILED]
        assert (failed.rollout_id, failed.stage) == (1, "init")
        assert failed.code == ("unknown_env" if field == "env" else "bad_task")
        await until(lambda: not any(worker.stage.held() for worker in service.workers.values()))


async def test_leaving_workers_report_what_they_stop(net: Net, tmp_path: Path) -> None:
    async with pipeline(net, tmp_path, slots=2) as service:
        service.store.acking = False
        service.gateway.lease(lease(n) for n in range(3))
        await service.store.have(3)
        service.store.ack_all()
    assert all(not worker.stage.held() for worker in service.workers.values())
