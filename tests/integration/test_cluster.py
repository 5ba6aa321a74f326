"""Nodes that Dask places: as processes of this host; as jobs only their script."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import prorl
from prorl.config import ServiceConfig
from prorl.deploy.running import Running, in_thread
from prorl.types import Json
from tests.integration.test_drain import charges
from tests.integration.test_nodes import POOL, TASKS, finished, nodes
from tests.integration.test_outside import join_file

pytest.importorskip("distributed", reason="placing nodes needs the extra `dask`")
pytest.importorskip("dask_jobqueue", reason="placing jobs needs the extra `dask`")

from distributed import Scheduler, Worker

from prorl.deploy import cluster as clusters
from prorl.deploy import placed
from prorl.deploy.leavers import Leavers
from prorl.deploy.leaving import Asks, stay

Placing = tuple[prorl.Client, Path, Running]

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")


@pytest.fixture
async def client(tmp_path: Path, sandbox_kind: str) -> AsyncIterator[Placing]:
    """A service without workers, and the join file of its nodes."""
    async with nodes(tmp_path, sandbox_kind) as (running, _):
        made = prorl.connect(running.config.root)
        yield made, join_file(running, "node"), running
        made.close()


async def workers(client: prorl.Client, count: int) -> set[str]:
    """Wait until so many nodes have a RUN that is registered."""
    async with asyncio.timeout(100):
        while True:
            found = (await in_thread(client.status))["workers"]
            names = {worker["node"] for worker in found if worker["role"] == "run"}
            if len(names) == count:
                return names
            await asyncio.sleep(0.2)


async def test_dask_places_nodes_and_takes_them_away_again(
    client: Placing, tmp_path: Path, sandbox_kind: str
) -> None:
    service, join, running = client
    settings: dict[str, Json] = {"sandbox": {"kind": sandbox_kind}, "run": POOL, "init": POOL}
    path = clusters.write_settings(tmp_path, settings)
    leavers = Leavers(drain_s=60, term_s=1)
    async with clusters.local(join, path, leavers) as cluster:
        cluster.scale(2)
        both = await workers(service, 2)
        service.create_run(run_id="far")
        service.submit("far", TASKS, n=2, key="k", last=True)
        cluster.scale(1)
        assert await workers(service, 1) < both
        view = await finished(service)
        assert view["counts"]["completed"] == 2 * len(TASKS)
        leavers.ending = True
    await leavers.gone()
    assert charges(running)[1:] == (0, 0), "a node that Dask retires is drained"
    await workers(service, 0)


async def test_a_node_goes_on_when_its_scheduler_is_killed(
    client: Placing, tmp_path: Path, sandbox_kind: str
) -> None:
    service, join, _ = client
    path = clusters.write_settings(tmp_path, {"sandbox": {"kind": sandbox_kind}})
    told = tmp_path / "scheduler.json"
    argv = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    argv += ["--no-dashboard", "--scheduler-file", str(told)]
    scheduler = await asyncio.create_subprocess_exec(sys.executable, *argv)
    async with asyncio.timeout(60):
        while not (told.exists() and told.read_text()):
            await asyncio.sleep(0.1)
    address = json.loads(told.read_text())["address"]
    leavers = Leavers(drain_s=1, term_s=1)
    handle = clusters.NodeProcess(address, "n1", join, path, leavers)
    await handle.start()
    try:
        await workers(service, 1)
        scheduler.kill()
        await scheduler.wait()
        service.create_run(run_id="far")
        service.submit("far", TASKS, n=2, key="k", last=True)
        assert (await finished(service))["counts"]["completed"] == 2 * len(TASKS)
    finally:
        await handle.close()
        await leavers.gone()


async def test_a_node_whose_name_is_taken_tries_again_until_it_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler may believe in its earlier life for minutes."""
    monkeypatch.setattr(placed, "RETRY_S", 0.05)
    caplog.set_level("INFO", "prorl.deploy")
    options = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": ":0"}
    async with Scheduler(**options) as scheduler, asyncio.timeout(120):
        async with Worker(scheduler.address, name="n1", nthreads=1, dashboard=False):
            seen = asyncio.ensure_future(placed.be_seen(scheduler.address, "n1"))
            while "name taken" not in caplog.text and not seen.done():
                await asyncio.sleep(0.05)
            assert not seen.done()
        while "registered with tcp" not in caplog.text.replace("not registered", ""):
            await asyncio.sleep(0.05)
        await scheduler.retire_workers(names=["n1"], close_workers=True)
        await seen


async def test_a_node_that_cannot_be_seen_any_more_ends(tmp_path: Path) -> None:
    """Else Dask could never retire it."""

    class Works:
        config = ServiceConfig(root=tmp_path)
        left = asyncio.Event()

        async def failed(self) -> None:
            await asyncio.Event().wait()

    async def unseen() -> None:
        raise TypeError("a defect")

    works: Any = Works()
    async with asyncio.timeout(60):
        with pytest.raises(TypeError, match="a defect"):
            await stay(works, Asks(), None, unseen())


async def test_a_slurm_job_is_a_step_that_is_requeued(tmp_path: Path) -> None:
    join, path = tmp_path / "node.json", tmp_path / "nodes.json"
    leavers = Leavers(drain_s=1, term_s=1)
    options = {"cores": 4, "memory": "8GB", "queue": "scavenge"}
    made: Any = clusters.jobs("slurm", join, path, leavers, **options)
    async with made as cluster:
        script = cluster.job_script()
    assert "#SBATCH --requeue" in script
    assert "#SBATCH -p scavenge" in script
    assert (
        f"exec srun --ntasks=1 --kill-on-bad-exit=0 {sys.executable} -m prorl.deploy.placed"
        in script
    )
    assert f"--join {join}" in script
    assert f"--config {path}" in script
    assert '--left "$(squeue -h -j $SLURM_JOB_ID -o %L)"' in script
