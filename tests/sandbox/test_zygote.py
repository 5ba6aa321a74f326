"""The zygote of a kind without launchers: what it starts is pid 1 of the sandbox itself."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from prorl.linux import procfs
from prorl.linux.forked import EXIT_CRASHED
from prorl.sandbox import kinds
from prorl.sandbox.launch.spec import Launch
from prorl.sandbox.launch.zygote_client import Exit, ZygoteClient, read_status
from prorl.types import SandboxSpec
from tests.sandbox.conftest import end, start_daemon, why_not
from tests.user_package import installed
from tests.waiting import until

UID = 70_000 if os.getuid() == 0 else -1
OLD_KERNEL = """
    from prorl.sandbox.kinds import pyns

    pyns.OPENER_DECIDES = False
    KIND = pyns.KIND
"""
"""Where a control group lets in what its writer may let in, not its opener: Linux before 5.16."""

pytestmark = pytest.mark.skipif(bool(why_not("pyns")), reason="pyns does not work here")


class Starts:
    """A zygote, and what it says of each start: `None` while a sandbox lives."""

    def __init__(self) -> None:
        self.pids: dict[str, int] = {}
        self.exits: dict[str, Exit] = {}
        self.zygote = ZygoteClient(
            kinds.place("pyns"), self.pids.__setitem__, self.exits.__setitem__, lambda: None
        )
        self.zygote.start()

    async def start(self, folder: Path, name: str, image: str = "") -> str:
        """Returns the message of the status pipe."""
        launch = Launch(
            sandbox_id=name,
            spec=SandboxSpec(tools=("bash",)),
            uid=UID,
            image=image,
            under=(),
            layer="",
            folder="",
            server=str(folder / "server.pyz"),
            cgroups=(),
            user_tools="",
        )
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(folder / name))
            listener.listen()
            self.zygote.launch(launch, listener, write)
        os.close(write)
        try:
            return await read_status(read, 20.0)
        finally:
            os.close(read)

    async def end(self, name: str) -> Exit:
        self.zygote.kill(name, signal.SIGKILL)
        await until(lambda: name in self.exits, "the zygote has reaped it")
        return self.exits[name]

    def fds(self) -> int:
        return len(os.listdir(f"/proc/{self.zygote.pid}/fd"))


@pytest_asyncio.fixture
async def starts() -> AsyncIterator[Starts]:
    made = Starts()
    yield made
    made.zygote.close()


async def test_pid_1_is_the_zygotes_own_child(starts: Starts, folder: Path) -> None:
    assert await starts.start(folder, "a") == "ok"
    await until(lambda: "a" in starts.pids, "the zygote says its pid")
    pid = starts.pids["a"]
    assert procfs.children(starts.zygote.pid) == [pid]
    assert procfs.is_init(pid)
    score = Path(f"/proc/{pid}/oom_score_adj").read_text()
    assert score.strip() == "1000", "it goes before anything else of the machine"
    inside = procfs.descendants(pid)
    assert os.WTERMSIG((await starts.end("a")).status) == signal.SIGKILL
    assert not any(procfs.start_ticks(each) for each in (pid, *inside))


async def test_a_start_that_fails_says_why_and_leaves_the_zygote_as_it_was(
    starts: Starts, folder: Path
) -> None:
    assert await starts.start(folder, "a") == "ok"
    await starts.end("a")
    before = starts.fds()
    for number in range(5):
        message = await starts.start(folder, f"b{number}", image="/no/such/image")
        assert "No such file" in message
        await until(lambda: f"b{number}" in starts.exits, "the zygote says that it has ended")  # noqa: B023
        assert os.WEXITSTATUS(starts.exits[f"b{number}"].status) == EXIT_CRASHED
    assert starts.fds() == before
    assert await starts.start(folder, "c") == "ok"
    await starts.end("c")
    assert procfs.children(starts.zygote.pid) == []
    assert starts.fds() == before


async def test_it_dies_with_the_zygote_whenever_that_dies(folder: Path) -> None:
    """While it serves and in the middle of a start: nobody else would end it without root."""
    seen: set[int] = set()
    for number in range(12):
        made = Starts()
        assert await made.start(folder, f"serves{number}") == "ok"
        start = asyncio.create_task(made.start(folder, f"begins{number}"))
        await asyncio.sleep(number * 0.002)
        seen.update(procfs.descendants(made.zygote.pid))
        os.kill(made.zygote.pid, signal.SIGKILL)
        await start
        made.zygote.close()
    assert len(seen) >= 2 * 12
    await until(lambda: not any(procfs.start_ticks(pid) for pid in seen), "all of them have ended")


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user has no control groups here")
async def test_control_groups_of_an_old_kernel(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"prorl.sandbox_kinds": {"old": "old_kernel:KIND"}}
    files = {"old_kernel.py": OLD_KERNEL}
    with installed(tmp_path, "old-kernel", files, points, monkeypatch):
        daemon = await start_daemon("old", folder)
        if not (await daemon.host.status())["cgroups"]:
            await end(daemon)
            pytest.skip("no control groups here")
        ref = await daemon.host.start("run/1/1", "run", SandboxSpec())
        (entry,) = (await daemon.host.status())["sandboxes"]
        groups = Path(f"/proc/{entry['pid']}/cgroup").read_text()
        assert f"/{ref.sandbox_id}\n" in groups
        async with daemon.host.connect(ref) as sandbox:
            assert (await sandbox.call("bash", {"command": "echo on"}, 20.0)).output == "on\n"
        await end(daemon)
