"""The supervisor over real processes: start, restart, give up, stop in order, leave nothing."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest

from prorl.config import ServiceConfig
from prorl.errors import ConfigError, ConflictError, UnavailableError
from prorl.linux import crashes
from prorl.linux.procfs import start_ticks
from prorl.supervisor.child import ChildSpec
from prorl.supervisor.root import Root, box_dir, make_socket_dir
from prorl.supervisor.service import Supervisor
from prorl.supervisor.specs import child_specs
from tests.waiting import until

HERE = Path(__file__).parent / "children"


def supervised(where: Path, *modes: str, root: str = "root", **more: Any) -> Supervisor:
    """A child of each mode, in reverse stop order, on WHERE/root; the first is `service`."""
    names = ["service", *(f"child-{index}" for index in range(1, len(modes)))]

    def specs(config: ServiceConfig, config_file: str) -> tuple[ChildSpec, ...]:
        assert Path(config_file).exists()
        rank = len(modes)
        pairs = list(zip(names, modes, strict=True))
        return tuple(
            ChildSpec(name=name, module="worker", args=(mode, str(where)), stop_rank=rank - index)
            for index, (name, mode) in enumerate(pairs)
        )

    ours = {key: more.pop(key) for key in [*more] if key in ServiceConfig.model_fields}
    return Supervisor(ServiceConfig(root=where / root, **ours), specs, **more)


@pytest.fixture(autouse=True)
def _children_importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(HERE))


async def _until_exited(pid: int) -> None:
    await until(lambda: start_ticks(pid) is None)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [
        ("replaced", "another node 'n1' took our place"),
        ("refused", r"the service refuses us.*token has ended"),
    ],
)
async def test_a_refused_node_exits_with_the_reason_and_is_not_restarted(
    tmp_path: Path, mode: str, reason: str
) -> None:
    far = {"node_id": "n1", "gateway": "grpc+tls://far:1"}
    async with supervised(tmp_path, "a", mode, **far) as supervisor:
        with pytest.raises(UnavailableError, match=reason):
            await supervisor.failed()
        assert supervisor.restarts == 0


async def test_a_service_starts_publishes_itself_privately_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    root = tmp_path / "root"
    supervisor = supervised(tmp_path, "a", "b", "c")
    async with supervisor:
        assert supervisor.url == "http://127.0.0.1:4711"
        published = root / "service.json"
        config = ServiceConfig.model_validate_json(published.read_text())
        assert config.http_port == 4711
        assert config.token == (root / "token").read_text().strip()
        assert stat.S_IMODE(published.stat().st_mode) == 0o600
        assert stat.S_IMODE((root / "token").stat().st_mode) == 0o600
        assert stat.S_IMODE(config.socket_dir.stat().st_mode) == 0o700
        assert len(config.worker_flight("eval-63")) < 100
        pids = [child.pid for child in supervisor.children.values()]
        assert all(os.getsid(pid) == pid for pid in pids)
    assert (tmp_path / "order").read_text().split() == ["c", "b", "a"]
    assert [start_ticks(pid) for pid in pids] == [None] * 3
    assert not published.exists()
    assert not config.socket_dir.exists()
    assert not box_dir(root).exists()


async def test_the_token_survives_a_restart_of_the_service(tmp_path: Path) -> None:
    tokens = []
    for _ in range(2):
        async with supervised(tmp_path, "a") as supervisor:
            tokens.append(supervisor.config.token)
    assert tokens[0] == tokens[1]


async def test_a_killed_child_is_started_again(tmp_path: Path) -> None:
    async with supervised(tmp_path, "a", "b") as supervisor:
        child = supervisor.children["child-1"]
        before = child.pid
        (supervisor.config.socket_dir / "child-1.sock").touch()
        child.signal(signal.SIGKILL)
        await _until_exited(before)
        async with asyncio.timeout(30):
            await until(lambda: child.alive and child.pid != before and child.starts == 2)
            await child.ready(10)
        assert not (supervisor.config.socket_dir / "child-1.sock").exists()
        assert (child.log.parent / "child-1.1.log").exists()
        assert supervisor.restarts == 1
        after = child.pid
    assert start_ticks(after) is None


async def test_a_frozen_child_is_ended_and_started_again(tmp_path: Path) -> None:
    """SIGSTOP: nothing but silence tells it from a healthy one. Who never beat is left alone."""
    async with supervised(tmp_path, "a", "beats", silence_s=1.0) as supervisor:
        quiet, child = supervisor.children["service"], supervisor.children["child-1"]
        for _ in range(2):
            before = child.pid
            await until(lambda: child.beats)
            child.signal(signal.SIGSTOP)
            await _until_exited(before)
            await until(lambda before=before: child.alive and child.pid != before)  # type: ignore[misc]
        assert "silent for 1 s" in (child.log.parent / "child-1.1.log").read_text()
        assert quiet.starts == 1


@pytest.mark.slow
async def test_work_that_hangs_a_child_is_charged_and_no_crash_loop(tmp_path: Path) -> None:
    """Eight deaths in a row, two of each: the service goes on, and each is known by its name."""
    async with supervised(tmp_path, "a", "hangs", silence_s=2.5) as supervisor:
        child = supervisor.children["child-1"]
        await until(lambda: child.starts >= 9, limit_s=120)
        folder = supervisor.config.root / "quarantine"
        assert all(crashes.quarantine_reason(folder, f"r/{number}/9")[0] for number in range(4))
        assert crashes.quarantine_reason(folder, "r/100/1")[1]
        causes = (tmp_path / "died at").read_text().splitlines()
        assert causes[:4] == ["", "r/0/1", "r/0/1", "r/1/1"], (
            "each life knows why the last one ended"
        )
        last_line = (child.log.parent / "child-1.1.log").read_text().splitlines()[-1]
        assert "it was at r/3/1, File" in last_line
        assert "in stalled" in last_line


async def test_a_child_that_is_not_ready_in_time_is_ended(tmp_path: Path) -> None:
    async with supervised(tmp_path, "a", "late", again_s=3.0) as supervisor:
        child = supervisor.children["child-1"]
        child.signal(signal.SIGKILL)
        async with asyncio.timeout(30):
            await until(lambda: child.starts == 3 and child.alive)
            await child.ready(10)


async def test_a_crash_loop_fails_with_the_last_words(tmp_path: Path) -> None:
    async with supervised(tmp_path, "a", "crashes") as supervisor:
        async with asyncio.timeout(30):
            with pytest.raises(
                UnavailableError, match=r"child-1 exited with code 3 again and again.*out of luck"
            ):
                await supervisor.failed()
        assert supervisor.children["child-1"].starts == 6


async def test_a_full_disk_is_reported_and_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("prorl.supervisor.service.FULL_WAIT_S", 0.01)
    (tmp_path / "no disk").touch()
    async with supervised(tmp_path, "a", "no-disk") as supervisor:
        child = supervisor.children["child-1"]
        async with asyncio.timeout(50):
            await until(lambda: supervisor.trouble)
            assert "child-1" in supervisor.trouble
            await until(lambda: child.starts >= 8)
            (tmp_path / "no disk").unlink()
            await until(lambda: child.alive and not supervisor.trouble)


async def test_a_child_that_refuses_to_start_ends_the_service_at_once(tmp_path: Path) -> None:
    root = tmp_path / "deep" / "root"
    with pytest.raises(UnavailableError, match="service exited with code 1: port 80 is taken"):
        async with supervised(tmp_path, "refuses", "b", root="deep/root"):
            pass
    assert not (tmp_path / "deep").exists()
    assert not list(Path("/tmp").glob(box_dir(root).name.removesuffix("box") + "*"))


async def test_what_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    async with supervised(tmp_path, "stubborn", grace_s=0.2) as supervisor:
        pid = supervisor.children["service"].pid
    assert start_ticks(pid) is None


async def test_two_services_never_share_a_root(tmp_path: Path) -> None:
    async with supervised(tmp_path, "a") as first:
        with pytest.raises(ConflictError, match=f"in use by prorl pid {os.getpid()}"):
            await supervised(tmp_path, "b").__aenter__()
        assert first.config.socket_dir.exists()
        assert (tmp_path / "root" / "service.json").exists()


async def test_a_port_in_use_is_a_clear_error_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as occupied:
        port = occupied.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1: Address already in use"):
            await supervised(tmp_path, "a", http_port=port).__aenter__()
    assert not (tmp_path / "root").exists()


def test_the_next_service_on_a_root_removes_the_sockets_of_a_killed_service(tmp_path: Path) -> None:
    orphan, others = make_socket_dir(tmp_path), make_socket_dir(tmp_path / "other")
    (orphan / "service.sock").touch()
    root = Root(tmp_path)
    root.acquire()
    assert (orphan.exists(), root.socket_dir.exists(), others.exists()) == (False, True, True)
    root.release()
    others.rmdir()


def test_the_children_of_a_service_are_named_after_their_sockets() -> None:
    apart = {"workers": 2, "eval": {"own_processes": 1}, "store": {"own_process": True}}
    config = ServiceConfig.model_validate(apart)
    names = [spec.name for spec in child_specs(config, "service.json")]
    assert names == ["service", "sandboxd", "worker-0", "worker-1", "eval-0", "store"]
