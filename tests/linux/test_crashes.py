"""Tests of what a process was doing when it died, as its parent reads it, and who is charged with
it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prorl.linux import crashes

CHILD = """
import asyncio, os, signal, sys, time
from prorl.linux import crashes

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
    if how == "exit":
        os._exit(3)
    if how == "task":
        await asyncio.create_task(below())
    if how == "callback":
        loop, mine = asyncio.get_running_loop(), crashes.current()
        loop.call_soon(lambda: loop.create_task(mine(below())))
    await asyncio.sleep(600)

async def below():
    await asyncio.sleep(0)
    os.abort()

async def main():
    crashes.start()
    names = asyncio.gather(
        *(crashes.attribute_steps(f"good/{n}/1", innocent()) for n in range(5)),
        crashes.attribute_steps("bad/7/2", guilty(sys.argv[1])),
    )
    await names

asyncio.run(main())
"""


@contextmanager
def _at_work(how: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    page = crashes.page()
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, how],
        env={**os.environ, crashes.VARIABLE: str(page)},
        pass_fds=(page,),
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"now\n"
        yield child, page
        child.kill()
    os.close(page)


@pytest.mark.parametrize("how", ["hang", "crash", "exit", "task", "callback"])
def test_a_process_that_dies_names_the_step_that_it_was_in(how: str) -> None:
    with _at_work(how) as (child, page):
        if how == "hang":
            time.sleep(0.2)
            child.send_signal(signal.SIGKILL)
        child.wait()
        assert crashes.read(page) == "bad/7/2"


async def test_without_a_parent_that_reads_nothing_is_marked() -> None:
    async def work() -> int:
        return 7

    marked = work()
    assert crashes.attribute_steps("a/1/1", marked) is marked
    assert await marked == 7


def test_a_run_that_kills_its_process_at_every_attempt_is_quarantined(tmp_path: Path) -> None:
    folder = tmp_path / "quarantine"
    for number in range(crashes.MOST_OF_RUN):
        assert not crashes.quarantine_reason(folder, "r/99/1")[0]
        crashes.charge(folder, f"r/{number}/1", "silent, in think")
    why, is_of_run = crashes.quarantine_reason(folder, "r/99/1")
    assert is_of_run
    assert "in think" in why
    assert crashes.quarantine_reason(folder, "other/99/1") == ("", False)
    crashes.clear_crashes(folder, "r/98/1")
    assert crashes.quarantine_reason(folder, "r/99/1") == ("", False)
    crashes.charge(folder, "r/0/2", "silent")
    assert crashes.quarantine_reason(folder, "r/0/3")[0]


def test_two_deaths_of_whatever_attempts_are_enough(tmp_path: Path) -> None:
    folder = tmp_path / "quarantine"
    assert not crashes.quarantine_reason(folder, "r/5/1")[0]
    assert crashes.charge(folder, "r/5/1", "silent") == 1
    assert not crashes.quarantine_reason(folder, "r/5/2")[0]
    assert crashes.charge(folder, "r/5/2", "silent") == 2
    assert crashes.quarantine_reason(folder, "r/5/3")[0]
    assert not crashes.quarantine_reason(folder, "r/55/1")[0]
    crashes.forget(folder, "other")
    assert crashes.quarantine_reason(folder, "r/5/3")[0]
    crashes.forget(folder, "r")
    assert list(folder.iterdir()) == []
