"""A sandboxd of one's own: what it leaves behind."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from prorl.sandbox.spawn import PREFIX, spawned

HOLD = """
import asyncio
from prorl.sandbox.spawn import spawned

async def hold():
    async with spawned("local") as (_, pid):
        print(pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(hold())
"""


def _folders() -> set[Path]:
    return set(Path("/tmp").glob(f"{PREFIX}*"))


@pytest.mark.slow
async def test_the_folder_of_an_owner_that_was_killed_goes_with_the_next_start() -> None:
    before = _folders()
    owner = await asyncio.create_subprocess_exec(
        sys.executable, "-c", HOLD, stdout=asyncio.subprocess.PIPE
    )
    assert owner.stdout is not None
    await owner.stdout.readline()
    (left,) = _folders() - before
    async with spawned("local"):
        assert left.exists(), "its owner lives"
    owner.kill()
    await owner.communicate()
    assert left.exists()
    async with spawned("local"):
        assert not left.exists()
    assert not _folders() - before
