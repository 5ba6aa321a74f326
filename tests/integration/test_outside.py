"""A service reached from other hosts: over TLS, with certificates on both sides, by role."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path

import pytest

import prorl
from prorl.config import ServiceConfig
from prorl.deploy.running import Running, Stop, in_thread, service
from prorl.errors import ForbiddenError, ProrlError, UnavailableError, UserError
from prorl.tls import Authority, Join
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
async def running(tmp_path: Path, sandbox_kind: str) -> AsyncIterator[Running]:
    values = {
        "root": tmp_path / "root",
        "listen": f"127.0.0.1:{three_ports()}",
        "backends": ("scripted:flaky",),
        "sandbox": {"kind": sandbox_kind},
    }
    async with service(ServiceConfig.model_validate(values), Stop()) as made:
        yield made


def join_file(running: Running, role: str) -> Path:
    return running.config.root / "join" / f"{role}.json"


def train(path: Path) -> list[int]:
    """What a trainer does: submit, stream, commit."""
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
        await in_thread(call)
    line = str(caught.value)
    assert "\n" not in line
    return line


async def test_roles_and_refusals(running: Running, tmp_path: Path) -> None:
    sizes = await in_thread(train, join_file(running, "trainer"))
    viewer = prorl.connect(join_file(running, "viewer"))
    assert sizes == [2, 2], await in_thread(viewer.run, "far")
    viewer = prorl.connect(join_file(running, "viewer"))
    assert (await in_thread(viewer.run, "far"))["run_id"] == "far"
    assert "as viewer" in await refused(lambda: viewer.cancel("far"), ForbiddenError)
    assert "as viewer" in await refused(lambda: viewer.commit("far@1"), ForbiddenError)
    node = prorl.connect(join_file(running, "node"))
    assert "as node" in await refused(lambda: node.create_run(run_id="x"), ForbiddenError)

    good = Join.read(join_file(running, "trainer"))
    spare = Authority.of(running.config.tls_dir)
    other = Authority.of(tmp_path / "other").join("trainer", url=good.url, token=good.token)
    cases = {
        "refused the token": (replace(good, token="wrong"), UserError),
        "another authority": (other, UnavailableError),
        "certificate was refused": (replace(other, authority=good.authority), UnavailableError),
        "is the port right": (
            replace(good, url=running.url.replace("http", "https")),
            UnavailableError,
        ),
    }
    ended = spare.credentials("trainer", days=-1)
    cases["certificate was refused "] = (
        replace(good, certificate=ended.certificate, key=ended.key),
        UnavailableError,
    )
    for words, (join, kind) in cases.items():
        client = prorl.client.client.Client(
            http=prorl.client.http.Http(
                join.url, join.token, retry_s=0.5, credentials=join.credentials
            )
        )
        assert words.strip() in await refused(client.status, kind)


async def test_an_address_without_a_join_file_is_refused(running: Running) -> None:
    listener = running.config.listener
    assert listener is not None
    for url in (listener.url, listener.store):
        line = await refused(lambda url=url: prorl.connect(url).status(), UserError)  # type: ignore[misc]
        assert "join file" in line
