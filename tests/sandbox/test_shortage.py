"""sandboxd when the machine has not what it needs: one clear error each, nothing left, and on it
goes when there is enough again.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.linux import procfs
from prorl.sandbox.node.cgroups import Cgroups
from prorl.sandbox.spawn import command
from prorl.types import FAILURE_CLASS, FailureClass, SandboxSpec
from tests.faults.leftovers import Watched
from tests.sandbox.conftest import end, is_usable, start_daemon
from tests.waiting import until

SPEC = SandboxSpec(tools=("bash",))


async def test_starts_without_free_descriptors_fail_and_recover(kind: str, folder: Path) -> None:
    """Starts fail as infrastructure, whichever of their steps lacks one, ends do not; with
    descriptors again nothing is left, and the next start works.
    """
    daemon = await start_daemon(kind, folder)
    pid = daemon.process.pid
    first = await daemon.host.start("run/0/1", "run", SPEC)
    watched = Watched(Path(first.socket_path).parent.name, daemon.root, "no such mark")
    await daemon.host.stop(first)
    await watched.until_none()
    used, before = _descriptors(pid), resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # groups and note want one, the pipe two, the socket a third, the zygote copies of two
    for free in range(5):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + free, before[1]))
        with pytest.raises(SandboxError) as caught:
            await daemon.host.start(f"run/{free}/2", "run", SPEC)
        assert FAILURE_CLASS[caught.value.code] is FailureClass.INFRA
        assert "Too many open files" in caught.value.message
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    leftovers, _ = await watched.until_none()
    assert (leftovers.total, _descriptors(pid)) == (0, used), leftovers

    stopped = await daemon.host.start("run/0/3", "run", SPEC)
    await daemon.host.start("run/1/3", "run", SPEC)
    (killed,) = (
        sandbox["pid"]
        for sandbox in (await daemon.host.status())["sandboxes"]
        if sandbox["owner"] == "run/1/3"
    )
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (_descriptors(pid), before[1]))
    os.kill(killed, signal.SIGKILL)
    await daemon.host.stop(stopped)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
    leftovers, _ = await watched.until_none()
    assert (leftovers.total, (await daemon.host.status())["live"]) == (0, 0), leftovers
    await is_usable(daemon.host, "run/1/4")
    await end(daemon)


def _descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


async def test_no_room_on_the_disk_of_its_notes(folder: Path) -> None:
    """A root that cannot be written: the start fails, uid and groups go back."""
    daemon = await start_daemon("local", folder)
    first = await daemon.host.start("run/0/1", "run", SPEC)
    watched = Watched(Path(first.socket_path).parent.name, daemon.root, "no such mark")
    before = resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE)
    # a note does not fit
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (8, before[1]))
    with pytest.raises(SandboxError) as caught:
        await daemon.host.start("run/1/1", "run", SPEC)
    assert FAILURE_CLASS[caught.value.code] is FailureClass.INFRA
    resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, before)
    await daemon.host.stop(first)
    await daemon.host.stop(await daemon.host.start("run/2/1", "run", SPEC))
    leftovers, _ = await watched.until_none()
    assert leftovers.total == 0, leftovers
    await end(daemon)


async def test_a_root_with_a_long_path(kind: str, folder: Path) -> None:
    """Slurm and Lustre paths pass the 107 bytes of a socket's path easily; sockets have a short
    folder of their own.
    """
    deep = folder / ("d" * 100) / ("e" * 100)
    deep.mkdir(mode=0o755, parents=True)
    (folder / ("d" * 100)).chmod(0o755)
    daemon = await start_daemon(kind, folder, root=str(deep / "root"))
    assert len((await is_usable(daemon.host, "run/0/1")).socket_path) < 60
    await end(daemon)


def test_a_socket_with_a_long_path_is_refused_in_a_single_line(folder: Path) -> None:
    long = folder / ("s" * 120)
    argv = command(folder, "local", socket=str(long))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "socket path of" in done.stderr
    assert len(done.stderr.splitlines()) == 1


async def test_a_node_short_of_memory_takes_fewer(folder: Path) -> None:
    """In a control group that another process has nearly filled, one sandbox at a time is begun."""
    groups = Cgroups(f"short-{os.getpid()}")
    if "memory" not in groups.enforced:
        pytest.skip("no group with memory can be made here")
    group = next(
        controller
        for controller in groups.make("box", 370 << 20, 400, 0.0)
        if "memory" in controller
    )
    hog = subprocess.Popen(
        [sys.executable, "-I", "-c", "input(); x = bytearray(b'x') * (320 << 20); input()"],
        stdin=subprocess.PIPE,
    )
    daemon = await start_daemon("pyns", folder)
    try:
        for pid in (hog.pid, daemon.process.pid):
            (Path(group) / "cgroup.procs").write_text(str(pid))
        assert hog.stdin is not None
        hog.stdin.write(b"\n")
        hog.stdin.flush()
        await until(lambda: procfs.pss_bytes(hog.pid) >= 320 << 20)
        first = await daemon.host.start("run/0/1", "run", SPEC)
        second = asyncio.create_task(daemon.host.start("run/1/1", "run", SPEC))
        await asyncio.sleep(1.0)
        assert not second.done()
        assert (await daemon.host.status())["short_of_memory"]
        await daemon.host.stop(first)
        await daemon.host.stop(await asyncio.wait_for(second, 60))
    finally:
        hog.kill()
        hog.communicate()
        await end(daemon)
        groups.close()
