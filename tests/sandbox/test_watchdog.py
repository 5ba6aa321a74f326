"""Real hogs under the watchdog, with control groups switched off: ended with the right code,
neighbours and modest ones untouched.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.linux import procfs
from prorl.sandbox.client import ConnectedSandbox, connected
from prorl.sandbox.node import watchdog
from prorl.sandbox.node.pool import SandboxPool
from prorl.sandbox.node.settings import Settings
from prorl.sandbox.node.watchdog import disk_bytes
from prorl.types import FailureCode, SandboxSpec
from tests.faults.leftovers import marked
from tests.sandbox.conftest import kind, why_not  # noqa: F401 - a fixture
from tests.waiting import until

SPEC = SandboxSpec(tools=("bash",), memory_bytes=256 << 20, workspace_bytes=32 << 20)
EATERS = (
    'for i in 1 2 3; do python3 -c \'import time; x = bytearray(b"x") * (120 << 20);'
    " time.sleep(60)' & done; wait"
)
SHARERS = (
    "import os, time\nx = bytearray(b'x') * (120 << 20)\nfor _ in range(3):\n  if os.fork() == 0:"
    " time.sleep(60); os._exit(0)\nprint('shared', flush=True); time.sleep(60)"
)
MANY = (
    "import os\nfor i in range(20_000): os.close(os.open(f'f{i}', os.O_CREAT))\nprint('made',"
    " flush=True)\nimport time; time.sleep(60)"
)


@asynccontextmanager
async def pool(name: str, folder: Path) -> AsyncIterator[SandboxPool]:
    """A pool without control groups, so that the watchdog has to do it."""
    made = SandboxPool(name, folder, "node", Settings(warm=0, cgroups=False))
    await made.open()
    try:
        yield made
    finally:
        await made.close()


@asynccontextmanager
async def two(
    name: str, folder: Path
) -> AsyncIterator[tuple[SandboxPool, ConnectedSandbox, ConnectedSandbox]]:
    """Such a pool, and two sandboxes of it."""
    async with pool(name, folder) as sandboxes:
        refs = [await sandboxes.start(f"run/{number}/1", "run", SPEC) for number in (1, 2)]
        async with (
            connected(refs[0], sandboxes.fate) as first,
            connected(refs[1], sandboxes.fate) as other,
        ):
            yield sandboxes, first, other


async def ended(sandbox: ConnectedSandbox, command: str) -> SandboxError:
    """Run a command that the sandbox does not outlive; what the caller is told."""
    async with asyncio.timeout(40):
        with pytest.raises(SandboxError) as caught:
            await sandbox.exec(["bash", "-c", command], 60.0)
    return caught.value


async def test_memory_of_all_processes_together(kind: str, folder: Path) -> None:  # noqa: F811
    async with two(kind, folder) as (sandboxes, hog, neighbour):
        error = await ended(hog, EATERS)
        assert error.code is FailureCode.SANDBOX_BROKEN, "the policy did it"
        assert "memory of 268435456 bytes" in error.message
        assert (await neighbour.exec(["echo", "fine"], 20.0)).output == "fine\n"
        await until(lambda: sandboxes.status()["live"] == 1)


async def test_memory_that_is_shared_counts_once(kind: str, folder: Path) -> None:  # noqa: F811
    mark = f"sharers{os.getpid()}"
    async with pool(kind, folder) as sandboxes:
        ref = await sandboxes.start("run/1/1", "run", SPEC)
        async with connected(ref, sandboxes.fate) as sandbox:
            await sandbox.put("share.py", SHARERS.encode())
            command = (
                f"python3 share.py {mark} > out & until grep -q shared out; do sleep 0.02; done"
            )
            assert (await sandbox.call("bash", {"command": command}, 20.0)).exit_code == 0
            resident = [procfs.stat(pid) for pid in marked(mark)]
            assert sum(usage.rss_bytes for usage in resident if usage) > SPEC.memory_bytes
            await sandboxes._maker._watchdog.look()
            assert (await sandbox.exec(["echo", "fine"], 20.0)).output == "fine\n"


HOARD = """
import os, time
for _ in range(2):
    if os.fork() == 0:
        kept = [os.openpty() for _ in range(150)]
        time.sleep(60)
time.sleep(60)
"""


@pytest.mark.parametrize("name", ["local", pytest.param("apptainer", marks=pytest.mark.apptainer)])
async def test_terminals_of_a_kind_that_does_not_bound_them(name: str, folder: Path) -> None:
    if why_not(name):
        pytest.skip(why_not(name))
    async with two(name, folder) as (_, hog, other):
        with pytest.raises(SandboxError, match="more than 16 terminals") as caught:
            await hog.exec(["python3", "-c", HOARD], 30.0)
        assert caught.value.code is FailureCode.SANDBOX_BROKEN, "the policy did it"
        assert (await other.exec(["echo", "fine"], 20.0)).output == "fine\n"


@pytest.mark.parametrize(
    "hog", ["head -c 40M /dev/zero > big; sleep 60", f'python3 -c "{MANY}"'], ids=["bytes", "files"]
)
async def test_a_workspace_on_disk(folder: Path, hog: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watchdog, "RESCAN_S", 0.5)
    async with two("local", folder) as (_, greedy, neighbour):
        await neighbour.exec(["bash", "-c", "head -c 20M /dev/zero > modest"], 20.0)
        error = await ended(greedy, hog)
        assert error.code is FailureCode.SANDBOX_BROKEN, "the policy did it"
        assert "workspace is larger than 33554432 bytes" in error.message
        assert (await neighbour.exec(["ls"], 20.0)).output == "modest\n"
        assert list((folder / "work").iterdir()) != []
    assert not (folder / "work").exists()


@pytest.mark.parametrize("name", ["pyns", "local"])
async def test_it_looks_only_at_what_the_kernel_does_not_bound(folder: Path, name: str) -> None:
    made = SandboxPool(name, folder, "node", Settings(warm=0))
    await made.open()
    status = made.status()
    await made.close()
    assert ("memory" in status["watchdog"]) != ("memory" in status["cgroups"])
    assert ("workspace" in status["watchdog"]) == (name == "local")


async def test_it_costs_what_it_may(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looks that cost much become rare."""
    monkeypatch.setattr(watchdog, "PERIOD_S", 0.0)
    async with pool("local", folder) as sandboxes:
        await sandboxes.start("run/1/1", "run", SPEC)
        begin, before = asyncio.get_running_loop().time(), sandboxes._maker._watchdog.cpu_s
        await asyncio.sleep(2.0)
        spent_s = sandboxes._maker._watchdog.cpu_s - before
        assert 0 < spent_s < 5 * watchdog.SHARE * (asyncio.get_running_loop().time() - begin)


def test_disk_bytes(tmp_path: Path) -> None:
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(os.urandom(1 << 20))
    (tmp_path / "root").symlink_to("/")
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(1 << 40)
    entries = 6 * (watchdog.ENTRY_BYTES + 8192)
    assert 1 << 20 <= disk_bytes(str(tmp_path), 1 << 40) <= (1 << 20) + entries
    assert 1 << 10 < disk_bytes(str(tmp_path), 1 << 10) < 3 << 20
    assert disk_bytes(str(tmp_path / "gone"), 1) == 0
