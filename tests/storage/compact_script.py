"""Run as a program: kill a compaction and the removal after it at their k-th step, for many k; look
at the run as a reader would, let a second one finish, look again. Prints the last k.

A process of its own because it forks before any thread exists.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

from prorl.storage.compact import collect, compact
from prorl.storage.durable import TEMP_MARK, write_durably
from prorl.storage.layout import RunDir


def tidy(root: Path, kill_at: int) -> None:
    """Compact, remove what was replaced; dies at its `kill_at`-th step."""
    steps = 0

    def step(name: str) -> None:
        nonlocal steps
        steps += 1
        if steps == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def publishing(fs: Any, path: str, content: Any) -> None:
        step("before")
        # As a kill in the middle of a write leaves it.
        half = Path(path).with_name(f"{TEMP_MARK}{os.getpid()}-{Path(path).name}")
        half.write_bytes(bytes(memoryview(content))[: len(memoryview(content)) // 2])
        step("half")
        write_durably(fs, path, content)
        step("after")

    run = RunDir(root / "demo")
    compact(run, write=publishing, step=step)
    collect(run, grace_s=0, step=step)


def in_child(root: Path, kill_at: int) -> bool:
    """Whether the child was killed; raises when it failed in another way."""
    pid = os.fork()
    if pid == 0:
        try:
            tidy(root, kill_at)
            os._exit(0)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit(f"compaction failed with kill_at={kill_at}")
    return False


def make(root: Path) -> None:
    """The run, made in a child of its own, which may start threads."""
    if os.fork() == 0:
        from tests.storage.compacting import run_of_many_parts

        run_of_many_parts(root)
        os._exit(0)
    os.wait()


def main(root: Path, first: int, stride: int) -> None:
    """Every `stride`-th k, until a compaction lives through all its steps."""
    make(root / "original")
    roots, kill_at, killed = [], first, True
    while killed:
        here = root / str(kill_at)
        shutil.copytree(root / "original", here)
        killed = in_child(here, kill_at)
        shutil.copytree(here, root / f"{kill_at}-dead")
        in_child(here, 0)
        roots.append((root / f"{kill_at}-dead", here))
        kill_at += stride
    check(root / "original", roots)
    sys.stdout.write(f"{kill_at} steps\n")


def check(original: Path, roots: list[tuple[Path, Path]]) -> None:
    """The same rows when it was killed, and the same rows and no other file in the end."""
    from prorl.storage.verify import verify
    from tests.storage.compacting import content, expected_files, files

    rows = content(RunDir(original / "demo"))
    for dead, done in roots:
        assert content(RunDir(dead / "demo")) == rows, dead
        run = RunDir(done / "demo")
        assert content(run) == rows, done
        assert files(run) == expected_files(run), done
        findings = [str(finding) for finding in verify(run.root)]
        assert findings == [], findings


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(number) for number in sys.argv[2:]))
