"""What a process was at when it died, as its parent reads it, and who is charged with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from prorl.linux import at_work

CHILD = """
import asyncio, os, sys, time
from prorl.linux import at_work

async def innocent():
    while True:
        await asyncio.sleep(0.001)

async def guilty(how):
    await asyncio.sleep(0.1)
    print("now", flush=True)
    if how == "hang":
        time.sleep(600)
    if how == "crash":
        os.abort()
    await asyncio.sleep(600)

async def main():
    at_work.start()
    names = asyncio.gather(
        *(at_work.during(f"good/{n}/1", innocent()) for n in range(5)),
        at_work.during("bad/7/2", guilty(sys.argv[1])),
    )
    await names

asyncio.run(main())
"""


@pytest.mark.parametrize(("how", "found"), [("hang", "bad/7/2"), ("crash", "bad/7/2")])
def test_a_process_that_dies_names_the_step_that_it_was_in(how: str, found: str) -> None:
    page = at_work.page()
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, how],
        env={**os.environ, at_work.VARIABLE: str(page)},
        pass_fds=(page,),
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"now\n"
    if how == "hang":
        time.sleep(0.2)
        child.send_signal(signal.SIGKILL)
    child.wait()
    assert at_work.read(page) == found
    child.stdout.close()
    os.close(page)


async def test_without_a_parent_that_reads_nothing_is_marked() -> None:
    async def work() -> int:
        return 7

    marked = work()
    assert at_work.during("a/1/1", marked) is marked
    assert await marked == 7


def test_two_deaths_of_whatever_attempts_are_enough(tmp_path: Path) -> None:
    folder = tmp_path / "poison"
    assert not at_work.poison(folder, "r/5/1")
    assert at_work.charge(folder, "r/5/1", "silent") == 1
    assert not at_work.poison(folder, "r/5/2")
    assert at_work.charge(folder, "r/5/2", "silent") == 2
    assert at_work.poison(folder, "r/5/3")
    assert not at_work.poison(folder, "r/55/1")
    at_work.forget(folder, "other")
    assert at_work.poison(folder, "r/5/3")
    at_work.forget(folder, "r")
    assert list(folder.iterdir()) == []
