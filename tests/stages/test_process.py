"""Stage workers as real processes: they come, work, leave cleanly, and their deaths cost what the
design says.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from prorl.config import ServiceConfig, StageConfig
from prorl.flight import FlightNetwork
from prorl.types import Stage
from tests.flight.rows import lease
from tests.stages.service import Gateway, Store
from tests.waiting import until


class Service:
    """Stage processes around a scripted gateway and store that live here."""

    def __init__(self, root: Path, backend: str) -> None:
        pool = StageConfig(slots=4)
        self.config = ServiceConfig(
            root=root, socket_dir=root, init=pool, run=pool, eval=pool, token="secret"
        )
        self.backend = backend
        self.network = FlightNetwork(token="secret")
        self.gateway = Gateway(self.network, self.config.gateway_flight)
        self.store = Store(self.network, [self.config.worker_flight("eval-0")])
        self.storing = asyncio.ensure_future(self.store.run())
        self.children: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, stage: str) -> None:
        name = f"{stage}-0"
        command = (
            sys.executable,
            "-m",
            "prorl.stages",
            "--config",
            str(self.config.root / "service.json"),
            "--stage",
            stage,
            "--worker",
            name,
        )
        child = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        self.children[name] = child
        assert child.stdout is not None
        line = await asyncio.wait_for(child.stdout.readline(), 30)
        assert line.startswith(b"ready {")

    async def new_store(self) -> None:
        """A store that knows nothing of what the earlier one received."""
        await self.store.inlet.close()
        await self.storing
        self.store = Store(self.network, [self.config.worker_flight("eval-0")])
        self.storing = asyncio.ensure_future(self.store.run())

    async def kill(self, name: str) -> None:
        self.children[name].kill()
        await self.children[name].wait()

    def lease(self, *numbers: int) -> None:
        self.gateway.lease(replace(lease(n), backend=self.backend) for n in numbers)


@asynccontextmanager
async def service(tmp_path: Path, backend: str = "scripted:noop") -> AsyncIterator[Service]:
    it = Service(tmp_path, backend)
    (tmp_path / "service.json").write_text(it.config.model_dump_json())
    await it.gateway.listen()
    try:
        await asyncio.gather(*(it.start(stage) for stage in Stage))
        yield it
    finally:
        for name, child in it.children.items():
            if child.returncode is None:
                await it.kill(name)
        await it.store.inlet.close()
        await it.storing
        await it.network.close()


async def test_workers_flow_and_leave_cleanly_on_sigterm(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        it.lease(*range(20))
        await it.store.have(20)
        await until(lambda: len(it.gateway.events) == 60)
        began = time.monotonic()
        for child in it.children.values():
            child.terminate()
        assert [await child.wait() for child in it.children.values()] == [0, 0, 0]
        assert time.monotonic() - began < 20
    assert sorted(os.listdir(tmp_path)) == ["journal", "service.json"]
    assert os.listdir(tmp_path / "journal" / "run-0") == ["lock"]


async def test_a_killed_eval_worker_loses_nothing(tmp_path: Path) -> None:
    async with service(tmp_path) as it:
        it.store.acking = False
        it.lease(*range(8))
        await it.store.have(8)
        await it.kill("eval-0")
        await it.new_store()
        await it.start("eval")
        await it.store.have(8)
        assert sorted(name.rollout_id for name in it.store.rows) == list(range(8))
