"""Nodes that leave in the middle of a run: by an operator, by a signal, by their own clock. What
they have in hand ends, or goes back and is charged to nobody.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from pathlib import Path

import pytest

import prorl
from prorl.supervisor.service import Supervisor
from prorl.types import Json
from tests.integration.test_nodes import TASKS as MANY
from tests.integration.test_nodes import finished, nodes
from tests.integration.test_outside import join_file

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")

TASKS = MANY[:12]
SLOW = "scripted:oracle?delay_s=2"
LIMIT_S = 100


def charges(running: Supervisor) -> tuple[int, int, int]:
    """Attempts beyond the first, infrastructure failures and worker losses, as the log has them."""
    with closing(sqlite3.connect(running.config.root / "control.db")) as log:
        sums = "SUM(attempt - 1), SUM(infra_failures), SUM(worker_losses)"
        (row,) = log.execute(f"SELECT {sums} FROM rollouts")
    return int(row[0]), int(row[1]), int(row[2])


async def submitted(running: Supervisor, backend: str) -> prorl.Client:
    client = prorl.connect(running.config.root)
    client.create_run(run_id="far", backends=[backend])
    await asyncio.to_thread(client.submit, "far", TASKS, n=1, key="k", last=True)
    return client


async def busy(client: prorl.Client, node: str) -> None:
    """Wait until RUN of a node works."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            for worker in (await asyncio.to_thread(client.status))["workers"]:
                is_run = worker["role"] == "run"
                if is_run and worker["node"] == node and worker["in_flight"]:
                    return
            await asyncio.sleep(0.05)


async def there(running: Supervisor, node: str) -> None:
    """Wait until RUN of a node has come: others would have done everything before it."""
    with prorl.connect(running.config.root) as client:
        async with asyncio.timeout(LIMIT_S):
            while not any(w["worker"] == f"{node}/worker-0" for w in await of_node(client, node)):
                await asyncio.sleep(0.05)


async def of_node(client: prorl.Client, node: str) -> list[Json]:
    workers = (await asyncio.to_thread(client.status))["workers"]
    return [worker for worker in workers if worker["node"] == node]


async def completed(running: Supervisor, client: prorl.Client) -> None:
    view = await finished(client)
    assert view["counts"]["completed"] == len(TASKS)
    assert charges(running)[1:] == (0, 0)


async def until_drained(supervisor: Supervisor) -> None:
    async with asyncio.timeout(LIMIT_S):
        await supervisor.drained.wait()


@pytest.mark.slow
async def test_an_operator_has_a_node_give_back_what_it_cannot_end(
    tmp_path: Path, sandbox_kind: str
) -> None:
    async with nodes(tmp_path, sandbox_kind, "n1", "n2") as (running, (first, second)):
        client = await submitted(running, SLOW)
        await busy(client, "n1")
        client.drain("n1", deadline_s=0.0)
        await until_drained(first)
        assert await of_node(client, "n1") == []
        assert first.restarts == 0
        assert not second.drained.is_set()
        await completed(running, client)
        assert charges(running)[0] > 0


@pytest.mark.slow
async def test_the_last_node_may_leave_and_another_goes_on(
    tmp_path: Path, sandbox_kind: str
) -> None:
    """Nobody else is there to take what goes back; it waits."""
    async with nodes(tmp_path, sandbox_kind, "n1") as (running, (only,)):
        client = await submitted(running, SLOW)
        await busy(client, "n1")
        await only.drain(0.0)
        async with asyncio.timeout(LIMIT_S):
            while (await asyncio.to_thread(client.run, "far"))["counts"]["running"]:
                await asyncio.sleep(0.1)
        counts = (await asyncio.to_thread(client.run, "far"))["counts"]
        assert counts["completed"] + counts["queued"] + counts["leased"] == len(TASKS)
        assert all(
            not worker["in_flight"]
            for worker in (await asyncio.to_thread(client.status))["workers"]
        )
        assert charges(running)[1:] == (0, 0)


@asynccontextmanager
async def process(
    tmp_path: Path, running: Supervisor, kind: str, *words: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """`prorl node` named n1, as people start it."""
    pools = [f"service.{stage}.slots=4" for stage in ("init", "run", "eval")]
    settings = [
        f"service.sandbox.kind={kind}",
        "service.sigterm_drain_s=0.5",
        "service.drain_s=60",
        *pools,
    ]
    argv = [sys.executable, "-m", "prorl.cli", "node", str(join_file(running, "node"))]
    argv += ["--name", "n1", "--root", str(tmp_path / "n1"), *words]
    argv += [word for setting in settings for word in ("--set", setting)]
    made = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.DEVNULL)
    try:
        yield made
    finally:
        if made.returncode is None:
            made.kill()
            await made.wait()


async def ended(made: asyncio.subprocess.Process) -> int:
    async with asyncio.timeout(LIMIT_S):
        return await made.wait()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM, signal.SIGINT])
async def test_a_signal_has_a_node_leave(
    tmp_path: Path, sandbox_kind: str, number: signal.Signals
) -> None:
    async with (
        nodes(tmp_path, sandbox_kind, "n2") as (running, _),
        process(tmp_path, running, sandbox_kind) as first,
    ):
        await there(running, "n1")
        client = await submitted(running, SLOW)
        await busy(client, "n1")
        first.send_signal(number)
        assert await ended(first) == 0
        await completed(running, client)
        num_returned = charges(running)[0]
        assert num_returned > 0 or number is signal.SIGUSR1


@pytest.mark.slow
async def test_a_node_knows_when_its_time_ends(tmp_path: Path, sandbox_kind: str) -> None:
    async with (
        nodes(tmp_path, sandbox_kind, "n2") as (running, _),
        process(tmp_path, running, sandbox_kind, "--walltime", "24") as first,
    ):
        await there(running, "n1")
        client = await submitted(running, SLOW)
        await busy(client, "n1")
        assert await ended(first) == 0
        await completed(running, client)
