"""The pool's warm sandboxes: lent first, replaced, and never lent dead."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from prorl.sandbox.client import connected
from prorl.sandbox.node.pool import SandboxPool
from prorl.sandbox.node.settings import Settings
from prorl.types import FailureCode, SandboxSpec
from tests.sandbox.conftest import why_not
from tests.waiting import until

SPEC = SandboxSpec(tools=("bash",))
OTHER = SandboxSpec(tools=("bash",), processes=64)


@pytest_asyncio.fixture
async def pool(folder: Path) -> AsyncIterator[SandboxPool]:
    if why_not("pyns"):
        pytest.skip(why_not("pyns"))
    pool = SandboxPool("pyns", folder / "root", "n", Settings(warm=1))
    await pool.open()
    yield pool
    await pool.close()
    assert not (folder / "root" / "live").exists()


async def warm_sandbox(pool: SandboxPool) -> tuple[str, int]:
    """Wait for the one that is kept ready: its id and its launcher's pid."""
    await until(lambda: pool.status()["warm"] == 1)
    (idle,) = (entry for entry in pool.status()["sandboxes"] if not entry["owner"])
    return idle["id"], idle["pid"]


async def test_a_start_uses_the_warm_sandbox_and_has_it_replaced(pool: SandboxPool) -> None:
    await pool.start("run/1/1", "run", SPEC)
    ready, _ = await warm_sandbox(pool)
    assert (await pool.start("run/2/1", "run", SPEC)).sandbox_id == ready
    assert (await warm_sandbox(pool))[0] != ready


async def test_another_spec_does_not_get_it(pool: SandboxPool) -> None:
    await pool.start("run/1/1", "run", SPEC)
    ready, _ = await warm_sandbox(pool)
    assert (await pool.start("run/2/1", "run", OTHER)).sandbox_id != ready


async def test_a_dead_warm_sandbox_is_not_lent(pool: SandboxPool) -> None:
    await pool.start("run/1/1", "run", SPEC)
    ready, pid = await warm_sandbox(pool)
    os.kill(pid, signal.SIGKILL)
    ref = await pool.start("run/2/1", "run", SPEC)  # perhaps before its end was heard of
    await until(lambda: ready not in [entry["id"] for entry in pool.status()["sandboxes"]])
    if ref.sandbox_id == ready:  # lent in the moment of its death: its caller hears why
        assert (await pool.fate(ref)).code is FailureCode.SANDBOX_LOST
        ref = await pool.start("run/3/1", "run", SPEC)
    async with connected(ref, pool.fate) as sandbox:
        assert (await sandbox.call("bash", {"command": "echo on"}, 10.0)).output == "on\n"


@pytest.mark.skipif(
    os.getuid() != 0,
    reason="only root's sandboxes have a uid and control groups, whose end has to be waited for",
)
async def test_the_blame_is_decided_before_all_is_cleaned_up(pool: SandboxPool) -> None:
    ref = await pool.start("run/1/1", "run", SPEC)
    (pid,) = (entry["pid"] for entry in pool.status()["sandboxes"] if entry["id"] == ref.sandbox_id)
    there: list[bool] = []
    fate = pool._maker.sandboxes[ref.sandbox_id].fate
    fate.add_done_callback(
        lambda _: there.append(
            ref.sandbox_id in [entry["id"] for entry in pool.status()["sandboxes"]]
        )
    )
    os.kill(pid, signal.SIGKILL)
    assert (await pool.fate(ref)).code is FailureCode.SANDBOX_LOST
    assert there == [True]
