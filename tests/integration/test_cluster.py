"""Nodes that Dask places: as processes of this host; as jobs only their script."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import prorl
from prorl.config import ServiceConfig
from prorl.net.bearer import Keys
from prorl.net.join import Join, prepare
from prorl.supervisor.service import Supervisor
from prorl.types import Json
from tests.integration.test_drain import charges
from tests.integration.test_nodes import POOL, TASKS, finished, nodes
from tests.integration.test_outside import join_file

pytest.importorskip("distributed", reason="placing nodes needs the extra `dask`")
pytest.importorskip("dask_jobqueue", reason="placing jobs needs the extra `dask`")

from distributed import Client as DaskClient
from distributed import Scheduler, Worker
from distributed.security import Security

from prorl.deploy import cluster as clusters
from prorl.deploy import placed
from prorl.deploy.leavers import NodeDrainer
from prorl.deploy.leaving import LeaveRequests, stay
from prorl.deploy.placer import placer, security
from tests.waiting import until

Placing = tuple[prorl.Client, Path, Supervisor]

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
            live_workers = (await asyncio.to_thread(client.status))["workers"]
            names = {worker["node"] for worker in live_workers if worker["role"] == "run"}
            if len(names) == count:
                return names
            await asyncio.sleep(0.2)


async def test_dask_places_nodes_and_takes_them_away_again(
    client: Placing, sandbox_kind: str
) -> None:
    service, _, running = client
    settings: dict[str, Json] = {"sandbox": {"kind": sandbox_kind}, "run": POOL, "init": POOL}
    leavers = NodeDrainer(drain_s=60, sigterm_drain_s=1)
    with placer(running.config.root, settings) as made:
        async with clusters.local(made, leavers) as cluster:
            cluster.scale(2)
            both = await workers(service, 2)
            service.create_run(run_id="far")
            service.submit("far", TASKS, n=2, key="k", last=True)
            cluster.scale(1)
            assert await workers(service, 1) < both
            view = await finished(service)
            assert view["counts"]["completed"] == 2 * len(TASKS)
            leavers.ending = True
        await leavers.wait_ended()
        assert charges(running)[1:] == (0, 0), "a node that Dask retires is drained"
        await workers(service, 0)


async def test_a_node_goes_on_when_its_scheduler_is_killed(
    client: Placing, tmp_path: Path, sandbox_kind: str
) -> None:
    service, _, running = client
    scheduler_file, leavers = tmp_path / "scheduler.json", NodeDrainer(drain_s=1, sigterm_drain_s=1)
    with placer(running.config.root, {"sandbox": {"kind": sandbox_kind}}) as made:
        argv = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
        argv += ["--no-dashboard", "--scheduler-file", str(scheduler_file), "--protocol", "tls"]
        for option, file in (("ca-file", "ca"), ("cert", "cert"), ("key", "key")):
            argv += [f"--tls-{option}", str(made.folder / f"{file}.pem")]
        scheduler = await asyncio.create_subprocess_exec(sys.executable, *argv)
        await until(lambda: scheduler_file.exists() and scheduler_file.read_text())
        address = json.loads(scheduler_file.read_text())["address"]
        handle = clusters.NodeProcess(address, "n1", made, leavers)
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
            await leavers.wait_ended()


async def test_a_node_with_a_name_in_use_retries_until_it_is_free(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler may believe in its earlier incarnation for minutes."""
    monkeypatch.setattr(placed, "RETRY_S", 0.05)
    caplog.set_level("INFO", "prorl.deploy")
    options = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": ":0"}
    async with Scheduler(**options) as scheduler, asyncio.timeout(120):
        async with Worker(scheduler.address, name="n1", nthreads=1, dashboard=False):
            seen = asyncio.ensure_future(placed.be_seen(scheduler.address, "n1", Security()))
            await until(lambda: "name taken" in caplog.text or seen.done())
            assert not seen.done()
        await until(lambda: "registered with tcp" in caplog.text.replace("not registered", ""))
        await scheduler.retire_workers(names=["n1"], close_workers=True)
        await seen


async def test_a_node_that_cannot_be_seen_any_more_ends(tmp_path: Path) -> None:
    """Else Dask could never retire it."""

    class Works:
        config = ServiceConfig(root=tmp_path)
        drained = asyncio.Event()

        async def failed(self) -> None:
            await asyncio.Event().wait()

    async def unseen() -> None:
        raise TypeError("a defect")

    works: Any = Works()
    async with asyncio.timeout(60):
        with pytest.raises(TypeError, match="a defect"):
            await stay(works, LeaveRequests(), None, unseen())


async def test_a_slurm_job_is_a_step_that_is_requeued(tmp_path: Path) -> None:
    leavers = NodeDrainer(drain_s=1, sigterm_drain_s=1)
    options = {"cores": 4, "memory": "8GB", "queue": "scavenge"}
    prepare(tmp_path, "https://h:1", Keys("t", "k" * 64))
    with placer(tmp_path, {}) as own:
        made: Any = clusters.jobs("slurm", own, leavers, **options)
        async with made as cluster:
            script = cluster.job_script()
    assert "#SBATCH --requeue" in script
    assert "#SBATCH -p scavenge" in script
    assert (
        f"exec srun --ntasks=1 --kill-on-bad-exit=0 {sys.executable} -P -m prorl.deploy.placed"
        in script
    )
    assert f"--join {tmp_path}/join/node.json" in script
    assert f"--placer {own.folder}" in script
    assert '--walltime "$(squeue -h -j $SLURM_JOB_ID -o %L)"' in script


def listening(pid: int) -> set[tuple[str, int]]:
    """Addresses and ports of IPv4 and IPv6 at which a process listens for TCP."""
    mine = {
        os.readlink(fd)
        for fd in Path(f"/proc/{pid}/fd").iterdir()
        if os.path.lexists(fd) and os.readlink(fd).startswith("socket:")
    }
    listeners = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in mine:
                address, _, port = words[1].partition(":")
                listeners.add((address, int(port, 16)))
    return listeners


LOOPBACK = "0100007F"


async def pids(client: prorl.Client) -> set[int]:
    """Returns the pids of the RUNs that are there."""
    live_workers = (await asyncio.to_thread(client.status))["workers"]
    return {worker["pid"] for worker in live_workers if worker["role"] == "run"}


async def test_nobody_but_its_nodes_speaks_with_a_placers_dask(
    client: Placing, sandbox_kind: str
) -> None:
    """Dask runs whatever it is sent: not for a local user, not for the holder of a join file."""
    service, join, running = client
    with placer(running.config.root, {"sandbox": {"kind": sandbox_kind}}) as made:
        leavers = NodeDrainer(drain_s=1, sigterm_drain_s=1)
        before = listening(os.getpid())
        async with clusters.local(made, leavers) as cluster:
            cluster.scale(1)
            await workers(service, 1)
            own = security(made.folder)
            async with DaskClient(
                cluster.scheduler_address, security=own, asynchronous=True, timeout=20
            ) as ours:
                await ours.wait_for_workers(1, timeout=60)
            (node,) = cluster.workers.values()
            assert {address for address, _ in listening(os.getpid()) - before} == {LOOPBACK}
            assert len(listening(os.getpid()) - before) == 1, "no port for HTTP"
            handle = listening(node.process.pid)
            assert [address for address, _ in handle] == [LOOPBACK]
            credentials = Join.read(join).credentials
            with credentials.files() as (ca, certificate, key):
                stranger = Security(
                    require_encryption=True,
                    tls_ca_file=str(ca),
                    tls_client_cert=str(certificate),
                    tls_client_key=str(key),
                )
                ports = [cluster.scheduler_address.rpartition(":")[2], str(next(iter(handle))[1])]
                for port, tls_security in itertools.product(ports, (None, stranger)):
                    where = f"{'tls' if tls_security else 'tcp'}://127.0.0.1:{port}"
                    with pytest.raises((OSError, TimeoutError)):
                        async with DaskClient(
                            where, security=tls_security, asynchronous=True, timeout=3
                        ):
                            pass
        await leavers.wait_ended()
    assert not made.folder.exists()


async def test_a_node_that_was_killed_is_replaced(client: Placing, sandbox_kind: str) -> None:
    service, _, running = client
    messages: list[str] = []
    with placer(running.config.root, {"sandbox": {"kind": sandbox_kind}}) as made:
        leavers = NodeDrainer(drain_s=1, sigterm_drain_s=1)
        async with clusters.local(made, leavers) as cluster:
            cluster.scale(1)
            replacing = asyncio.ensure_future(
                clusters.replace_lost(cluster, lambda: cluster.scale(1), messages.append)
            )
            (before,) = await workers(service, 1)
            assert before == f"{made.name}-0"
            first = await pids(service)
            cluster.workers[0].process.kill()
            async with asyncio.timeout(60):
                while not (current := await pids(service)) or current & first:
                    await asyncio.sleep(0.2)
            assert messages[0].startswith(f"node {before} was killed by SIGKILL; another one in")
            replacing.cancel()
            leavers.ending = True
        await leavers.wait_ended()


def test_two_placers_of_the_same_root_have_names_and_settings_of_their_own(tmp_path: Path) -> None:
    prepare(tmp_path, "https://h:1", Keys("t", "k" * 64))
    with placer(tmp_path, {"a": 1}) as first, placer(tmp_path, {"a": 2}) as second:
        assert first.name != second.name
        assert json.loads(first.settings.read_text()) == {"a": 1}
        assert json.loads(second.settings.read_text()) == {"a": 2}
        private = [path for path in first.folder.iterdir() if path.suffix == ".pem"]
        assert {path.stat().st_mode & 0o077 for path in private} == {0}
