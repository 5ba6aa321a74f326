"""SIGKILL of each process of the chain while it holds sandboxes: nothing is left, and the right one
is blamed.

Once each; a hundred times is `tests/faults/test_storms.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.linux import procfs
from prorl.sandbox.client import ConnectedSandbox
from prorl.sandbox.host import UnixSandboxHost
from prorl.types import FailureCode, SandboxRef, SandboxSpec
from tests.faults.leftovers import tool_server
from tests.sandbox.conftest import Sandboxd, end, is_usable, start_daemon, until_live
from tests.sandbox.small_image import as_ordinary_user
from tests.waiting import until

SPEC = SandboxSpec()


def all_processes() -> set[int]:
    """Every pid on this machine that is not a zombie."""
    return {pid for pid in procfs.pids() if procfs.start_ticks(pid) is not None}


async def until_exited(pids: set[int]) -> None:
    await until(lambda: not pids & all_processes(), "they have ended")


async def busy(daemon: Sandboxd, sandbox: ConnectedSandbox) -> None:
    await sandbox.exec(["bash", "-c", "setsid nohup sleep 301 >/dev/null 2>&1 & echo"], 10.0)
    await sandbox.call("bash", {"command": "sleep 300"}, 300.0)


def num_asleep(daemon: Sandboxd) -> int:
    """Returns how many tool calls have come as far as their `sleep 300`."""
    pids = procfs.descendants(daemon.process.pid)
    return sum(procfs._read(f"/proc/{pid}/cmdline") == b"sleep\x00300\x00" for pid in pids)


async def kill_while_busy(daemon: Sandboxd, victim: int) -> tuple[set[int], FailureCode]:
    """Two busy sandboxes; SIGKILL one process; the processes that were below sandboxd, and what the
    clients were told.
    """
    host = daemon.host
    refs = [await host.start(f"run/{number}/1", "run", SPEC) for number in (1, 2)]
    async with host.connect(refs[0]) as first, host.connect(refs[1]) as second:
        work = [asyncio.create_task(busy(daemon, sandbox)) for sandbox in (first, second)]
        await until(lambda: num_asleep(daemon) == 2)
        pids = set(procfs.descendants(daemon.process.pid))
        assert len(pids) >= 5
        launcher = next(
            entry["pid"]
            for entry in (await host.status())["sandboxes"]
            if entry["id"] == refs[0].sandbox_id
        )
        chain = {
            0: daemon.process.pid,
            1: (await host.status())["zygote_pid"],
            2: launcher,
            3: tool_server(launcher),
        }
        mine = set(procfs.descendants(launcher)) if victim >= 2 else pids
        os.kill(chain[victim], signal.SIGKILL)
        with pytest.raises(SandboxError) as caught:
            await work[0]
        if victim < 2:
            with pytest.raises(SandboxError):
                await work[1]
        else:
            work[1].cancel()
            await asyncio.gather(work[1], return_exceptions=True)
    return mine | ({launcher} if victim >= 2 else set()), caught.value.code


async def test_sandboxd(kind: str, folder: Path) -> None:
    daemon = await start_daemon(kind, folder)
    pids, code = await kill_while_busy(daemon, 0)
    await daemon.process.wait()
    assert code is FailureCode.SANDBOX_LOST
    await until_exited(pids)
    await daemon.host.close()
    # What is left on disk, the next daemon in this root removes.
    assert list((folder / "root" / "live").iterdir()) != []
    after = await start_daemon(kind, folder)
    assert list((folder / "root" / "live").iterdir()) == []
    assert list((folder / "root" / "work").iterdir()) == []
    assert (await after.host.status())["live"] == 0
    await is_usable(after.host, "run/3/1")
    await end(after)


async def test_zygote(kind: str, folder: Path) -> None:
    daemon = await start_daemon(kind, folder)
    pids, code = await kill_while_busy(daemon, 1)
    assert code is FailureCode.SANDBOX_LOST
    await until_exited(pids)
    await until_live(daemon.host, 0)
    assert list((folder / "root" / "live").iterdir()) == []
    await is_usable(daemon.host, "run/3/1")
    await end(daemon)


@pytest.mark.parametrize("victim", [2, 3], ids=["launcher", "what_it_guards"])
async def test_killing_a_process_ends_its_own_sandbox_only(
    kind: str, folder: Path, victim: int
) -> None:
    daemon = await start_daemon(kind, folder)
    pids, code = await kill_while_busy(daemon, victim)
    # There the agent itself can have done that: it has the uid of the launcher only without root.
    blames_policy = kind == "local" and (victim == 3 or os.getuid() != 0)
    assert code is (FailureCode.SANDBOX_BROKEN if blames_policy else FailureCode.SANDBOX_LOST)
    await until_exited(pids)
    await until_live(daemon.host, 1)
    (survivor,) = (await daemon.host.status())["sandboxes"]
    assert survivor["owner"] == "run/2/1"
    socket = json.loads((folder / "root" / "live" / survivor["id"]).read_text())["socket"]
    async with daemon.host.connect(SandboxRef("", survivor["id"], socket)) as neighbour:
        assert (await neighbour.call("bash", {"command": "echo on"}, 20.0)).output == "on\n"
    await end(daemon)


@pytest.mark.skipif(os.getuid() != 0, reason="an ordinary user runs all the others like this one")
async def test_as_an_ordinary_user(kind: str, folder: Path) -> None:
    """Without root nobody can end what is left by its uid: each process must follow the one above
    it.
    """
    folder.chmod(0o777)
    daemon = await start_daemon(kind, folder, prefix=as_ordinary_user())
    pids, code = await kill_while_busy(daemon, 2)
    blames_policy = kind == "local"  # there the agent has the launcher's uid
    assert code is (FailureCode.SANDBOX_BROKEN if blames_policy else FailureCode.SANDBOX_LOST)
    await until_exited(pids)
    pids = set(procfs.descendants(daemon.process.pid))
    assert len(pids) >= 3
    daemon.process.kill()
    await daemon.process.wait()
    await daemon.host.close()
    await until_exited(pids)
    # takes away what is left on disk
    await end(await start_daemon(kind, folder, prefix=as_ordinary_user()))


async def test_parent_of_sandboxd(kind: str, folder: Path) -> None:
    """The supervisor dies: sandboxd and everything below follow."""
    code = (
        "import os, subprocess, sys, time; from prorl.sandbox.spawn import command\n"
        "subprocess.Popen(command(sys.argv[1], sys.argv[2], warm=0)); time.sleep(300)"
    )
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, str(folder), kind, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    assert await parent.stdout.readline() == b"ready\n"
    host = UnixSandboxHost(str(folder / "sd"))
    await host.start("run/1/1", "run", SPEC)
    await host.close()
    pids = set(procfs.descendants(parent.pid))
    assert len(pids) >= 3
    parent.kill()
    await parent.wait()
    await until_exited(pids)
