"""Nodes that are reached over TLS only, each with a root and sockets of its own."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

import prorl
from prorl.config import ServiceConfig
from prorl.deploy.node import keep_certificate, node
from prorl.deploy.running import Stop, service
from prorl.errors import ForbiddenError
from prorl.net.join import Join
from prorl.net.tls import Credentials
from prorl.supervisor.service import Supervisor
from prorl.types import Json, Task
from tests.integration.test_outside import join_file, three_ports
from tests.waiting import until

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")

POOL = {"slots": 4}
TASKS = [
    Task(task_id=f"t{i}", env="math", prompt="2 + 2?", data={"answer": "4"}) for i in range(24)
]


@asynccontextmanager
async def nodes(
    tmp_path: Path,
    kind: str,
    *names: str,
    slots: int = 4,
    load_code: bool = False,
    certificate_days: float = 90,
) -> AsyncIterator[tuple[Supervisor, list[Supervisor]]]:
    """A service without workers of its own, and nodes that work for it."""
    stages = ("init", "run", "eval")
    common = {
        **{stage: {"slots": slots} for stage in stages},
        "sandbox": {"kind": kind},
        "load_code": load_code,
    }
    values = {
        **common,
        "workers": "nodes",
        "root": tmp_path / "root",
        "certificate_days": certificate_days,
        "listen": f"127.0.0.1:{three_ports()}",
        "backends": ("scripted:oracle?delay_s=0.05",),
    }
    async with AsyncExitStack() as stack:
        running = await stack.enter_async_context(
            service(ServiceConfig.model_validate(values), Stop())
        )
        join = Join.read(join_file(running, "node"))
        made = []
        for name in names:
            own = {**common, "root": tmp_path / name, "node_id": name}
            supervisor = await asyncio.to_thread(node, join, ServiceConfig.model_validate(own))
            made.append(await stack.enter_async_context(supervisor))
        yield running, made


SHARERS = {(f"{node}/worker-0", role) for node in ("n1", "n2") for role in ("run", "eval")}


def submitted(running: Supervisor) -> prorl.Client:
    client = prorl.connect(running.config.root)
    client.create_run(run_id="far")
    client.submit("far", TASKS, n=2, key="k", last=True)
    return client


async def finished(client: prorl.Client) -> dict[str, Json]:
    async with asyncio.timeout(90):
        while (view := await asyncio.to_thread(client.run, "far"))["state"] != "finished":
            await asyncio.sleep(0.2)
        return dict(view)


async def busy(client: prorl.Client) -> set[tuple[str, str]]:
    """Workers and their stages that have reported a finished row."""
    status = await asyncio.to_thread(client.status)
    finished = (worker for worker in status["workers"] if worker["stats"]["done"])
    return {(worker["worker"], worker["role"]) for worker in finished}


async def test_two_nodes_share_a_run(tmp_path: Path, sandbox_kind: str) -> None:
    async with nodes(tmp_path, sandbox_kind, "n1", "n2") as (running, _):
        client = submitted(running)
        view = await finished(client)
        assert view["counts"]["completed"] == 2 * len(TASKS)
        assert view["mean_reward"] == 1.0
        async with asyncio.timeout(60):  # hearts of other hosts beat each two seconds
            while SHARERS - await busy(client):
                await asyncio.sleep(0.2)


async def test_another_role_joins_nothing(tmp_path: Path, sandbox_kind: str) -> None:
    async with nodes(tmp_path, sandbox_kind) as (running, _):
        join = Join.read(join_file(running, "trainer"))
        config = ServiceConfig(root=tmp_path / "x", node_id="x")
        with pytest.raises(ForbiddenError, match="as trainer"):
            await asyncio.to_thread(node, join, config)


@pytest.mark.slow
async def test_a_node_works_on_past_the_end_of_its_first_certificate_and_of_the_services(
    tmp_path: Path, sandbox_kind: str
) -> None:
    """Whoever dials anew then, as a worker that died does, is believed and believes."""
    life_s = 60.0
    async with nodes(tmp_path, sandbox_kind, "n1", certificate_days=life_s / 86400) as (
        running,
        (first,),
    ):
        join = Join.read(join_file(running, "node"))
        files = [root / "tls" / "service.json" for root in (running.config.root, tmp_path / "n1")]
        began = [Credentials.read(file) for file in files]
        keeping = asyncio.create_task(keep_certificate(join, first.config))
        await until(lambda: all(certificate.remaining_days() <= 0 for certificate in began))
        first.children["worker-0"].signal(signal.SIGKILL)
        client = submitted(running)
        assert (await finished(client))["counts"]["completed"] == 2 * len(TASKS)
        assert join.credentials.remaining_days() > 300, "what people copied stays good"
        keeping.cancel()
