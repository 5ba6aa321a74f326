"""A service reached from other hosts: over TLS, with certificates on both sides, by role."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

import prorl
from prorl.cli.app import dispatch
from prorl.config import RESERVED_NAMES, ServiceConfig
from prorl.deploy.running import Stop, service
from prorl.errors import ForbiddenError, ProrlError, UserError
from prorl.net.join import Join
from prorl.supervisor.service import Supervisor
from prorl.types import Task

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")


def three_ports() -> int:
    """A port whose two successors are free as well, most probably."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as first:
            port: int = first.getsockname()[1]
            try:
                for offset in (1, 2):
                    socket.create_server(("127.0.0.1", port + offset)).close()
            except (OSError, OverflowError):
                continue
            return port


@pytest.fixture
async def running(tmp_path: Path, sandbox_kind: str) -> AsyncIterator[Supervisor]:
    values = {
        "root": tmp_path / "root",
        "listen": f"127.0.0.1:{three_ports()}",
        "backends": ("scripted:flaky",),
        "sandbox": {"kind": sandbox_kind},
    }
    async with service(ServiceConfig.model_validate(values), Stop()) as made:
        yield made


def join_file(running: Supervisor, role: str) -> Path:
    return running.config.root / "join" / f"{role}.json"


def train(path: Path) -> list[int]:
    """Acts as a trainer: submit, stream, commit."""
    tasks = [Task(task_id=f"t{i}", env="noop", prompt="?", data={"reward": 1}) for i in range(4)]
    with prorl.connect(path) as client:
        client.create_run(run_id="far", filter="none", delivery="stream")
        client.submit("far", tasks, n=2, key="k", last=True)
        sizes = []
        for batch in client.stream("far", groups_per_batch=2):
            sizes.append(batch.num_groups)
            client.commit(batch)
        return sizes


async def refused(call: Callable[[], object], kind: type[ProrlError]) -> str:
    """The one line that a refused caller gets."""
    with pytest.raises(kind) as caught:
        await asyncio.to_thread(call)
    line = str(caught.value)
    assert "\n" not in line
    return line


async def test_each_role_may_do_what_is_its_own(running: Supervisor) -> None:
    sizes = await asyncio.to_thread(train, join_file(running, "trainer"))
    viewer = prorl.connect(join_file(running, "viewer"))
    assert sizes == [2, 2], await asyncio.to_thread(viewer.run, "far")
    viewer = prorl.connect(join_file(running, "viewer"))
    assert (await asyncio.to_thread(viewer.run, "far"))["run_id"] == "far"
    assert "as viewer" in await refused(lambda: viewer.cancel("far"), ForbiddenError)
    assert "as viewer" in await refused(lambda: viewer.commit("far@1"), ForbiddenError)
    node = prorl.connect(join_file(running, "node"))
    assert "as node" in await refused(lambda: node.create_run(run_id="x"), ForbiddenError)


async def test_no_run_may_have_a_name_that_its_root_needs(running: Supervisor) -> None:
    """Whatever stands in a root beside runs is known; else a run of that name ends the service."""
    root = running.config.root
    await asyncio.to_thread(train, join_file(running, "trainer"))
    names = {path.name for path in root.iterdir() if not path.name.startswith(".")} - {"far"}
    assert names <= RESERVED_NAMES
    with prorl.connect(root) as client:
        for name in ("journal", "placers", "signing.key", *names):
            assert "none of" in await refused(
                lambda name=name: client.create_run(run_id=name),  # type: ignore[misc]
                UserError,
            )


async def test_a_token_of_a_run_streams_and_commits_it(running: Supervisor, tmp_path: Path) -> None:
    """Over TLS, and on the service's own host."""
    root = running.config.root
    own = ["token", "new", "--run", "far", "--root", str(root)]
    assert await asyncio.to_thread(dispatch, [*own, "--join", str(tmp_path / "one.json")]) == 0
    assert await asyncio.to_thread(train, tmp_path / "one.json") == [2, 2]
    token = Join.read(tmp_path / "one.json").token
    with prorl.connect(root, token=token) as near:
        batches = await asyncio.to_thread(lambda: list(near.stream("far", consumer="second")))
        await asyncio.to_thread(near.commit, batches[-1])
        assert "is for run 'far' alone" in await refused(near.status, ForbiddenError)
