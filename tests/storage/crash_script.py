"""Run as a program: kill a writer at its k-th step, let a second one finish, check the directory;
for many k. Prints the last k.

A process of its own because it forks before any thread exists, which is cheap; pytest's process
could not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from prorl.control import Rows
from prorl.storage.files.durable import write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.write.writer import RunWriter
from prorl.types import AttemptKey, FailureCode
from tests.grown import only
from tests.storage.control_log import FileLog
from tests.storage.directory import event, new_run
from tests.storage.rows import scored, terminal

ROLLOUTS = 6


def write(root: Path, kill_at: int) -> None:
    """One life of a writer: everything that was not acked comes again; dies at its `kill_at`-th
    step.
    """
    steps = 0

    def step(name: str) -> None:
        nonlocal steps
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def publishing(fs: Any, path: str, content: Any) -> None:
        step("publish.before")
        write_durably(fs, path, content)
        step("publish.after")

    log = FileLog(root / "log.json", hook=step)
    acked = root / "acked"

    def add(writer: RunWriter, rollout_id: int) -> None:
        code = FailureCode.BACKEND_PROTOCOL if rollout_id == 5 else FailureCode.NONE
        row = only(scored(rollout_id, code=code))
        writer.add(
            AttemptKey("demo", rollout_id, 1), row, lambda: acked.joinpath(str(rollout_id)).touch()
        )

    async def live() -> None:
        writer = RunWriter(
            RunDir(root / "demo"), "demo", log, flush_s=0.0, flush_bytes=1 << 20, write=publishing
        )
        await writer.open(log.news())
        log.tell(writer)
        task = asyncio.create_task(writer.run())
        waiting = [i for i in range(ROLLOUTS) if not acked.joinpath(str(i)).exists()]
        for rollout_id in waiting[:3]:
            add(writer, rollout_id)
        await asyncio.sleep(0.05)
        for rollout_id in waiting[3:]:
            add(writer, rollout_id)
        writer.drain()
        await task

    asyncio.run(live())


def in_child(root: Path, kill_at: int) -> bool:
    """Whether the child was killed; raises when it failed in another way."""
    pid = os.fork()
    if pid == 0:
        try:
            write(root, kill_at)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit(f"the writer failed with kill_at={kill_at}")
    return False


def check(root: Path) -> None:
    """Everything is stored once and acked, nothing is left over."""
    from prorl.storage.read.catalog import StoredRun
    from prorl.storage.read.verify import verify

    findings = [str(finding) for finding in verify(root / "demo")]
    assert findings == [], findings
    stored = StoredRun(root / "demo")
    assert sorted(stored.read("rollouts").column("rollout_id").to_pylist()) == [0, 1, 2, 3, 4, 7]
    assert stored.partial().column("rollout_id").to_pylist() == [5]
    assert stored.read("groups").num_rows == 1
    assert sorted(path.name for path in (root / "acked").iterdir()) == [
        str(i) for i in range(ROLLOUTS)
    ]
    log = FileLog(root / "log.json")
    assert (log.news().unpublished, log.state["outbox"]) == ((), [])


def prepare(root: Path) -> None:
    """A fresh run: six rollouts on their way, one ended without a trajectory, one group event."""
    new_run(root)
    (root / "acked").mkdir()
    log = FileLog(root / "log.json")
    log.accept(*((i, 1) for i in range(ROLLOUTS)))
    log.end(terminal(7))
    log.say(Rows(events=(event(0, 0, "decided"),)))


def main(root: Path, first: int, stride: int) -> None:
    """Every `stride`-th k, until a writer lives through all its steps."""
    roots, kill_at = [], first
    while True:
        here = root / str(kill_at)
        prepare(here)
        roots.append(here)
        killed = in_child(here, kill_at)
        if not killed:
            break
        in_child(here, 0)
        kill_at += stride
    for here in roots:
        check(here)
    sys.stdout.write(f"{kill_at} steps\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(number) for number in sys.argv[2:]))
