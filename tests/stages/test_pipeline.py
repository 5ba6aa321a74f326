"""Three workers between a scripted gateway and store, over both networks: the real operators with
the env that does nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from prorl.config import ServiceConfig, StageConfig
from prorl.control import Kind
from prorl.stages.worker import Worker
from prorl.types import Stage
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


async def test_leaving_workers_report_what_they_stop(net: Net, tmp_path: Path) -> None:
    async with pipeline(net, tmp_path, slots=2) as service:
        service.store.acking = False
        service.gateway.lease(lease(n) for n in range(3))
        await service.store.have(3)
        service.store.ack_all()
    assert all(not worker.stage.held() for worker in service.workers.values())
