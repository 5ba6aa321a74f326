"""Run as a program: kill something that writes a run at its k-th step, for many k; look at it
as a reader would, let a second one finish, look again. Prints the last k.

    python -m tests.storage.kill_script write|compact|score ROOT FIRST STRIDE

A process of its own because it forks before any thread exists.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from prorl.storage.files.durable import TEMP_MARK, WriteDurably, write_durably
from prorl.storage.files.layout import RunDir
from prorl.storage.keep.compact import collect, compact

Step = Callable[[str], None]


class Steps:
    """Counts what is done, and dies at a step."""

    def __init__(self, kill_at: int) -> None:
        self._remaining = kill_at

    def __call__(self, name: str) -> None:
        self._remaining -= 1
        if self._remaining == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def removing(self, run: RunDir) -> RunDir:
        """A step before each removal."""
        remove = run.fs.rm_file

        def removing(path: str) -> None:
            self("remove")
            remove(path)

        run.fs.rm_file = removing
        return run

    def around(self, write: WriteDurably) -> WriteDurably:
        """Three steps of each write: before it, half of it, after it."""

        def writing(fs: Any, path: str, content: Any) -> None:
            self("before")
            if not Path(path).exists():  # what is there is compared, and not written again
                # As a kill in the middle of a write leaves it.
                half = Path(path).with_name(f"{TEMP_MARK}{os.getpid()}-{Path(path).name}")
                half.write_bytes(bytes(memoryview(content))[: len(memoryview(content)) // 2])
            self("half")
            write(fs, path, content)
            self("after")

        return writing


def tidy(root: Path, steps: Steps) -> None:
    """Compact, remove what was replaced, merge what was appended."""
    run, write = steps.removing(RunDir(root / "demo")), steps.around(write_durably)
    compact(run, write=write)
    collect(run, grace_s=0, write=write)


def score(root: Path, steps: Steps) -> None:
    """Scores as `prorl rescore && prorl gc` do, except for one who asks again for a name that is
    given.
    """
    from tests.storage.kill_scenarios import rescored

    rescored(root, steps, steps.around(write_durably))
    collect(steps.removing(RunDir(root / "demo")), grace_s=0)


def write(root: Path, steps: Steps) -> None:
    """One life of a writer."""
    from tests.storage.kill_scenarios import written

    written(root, steps, steps.around(write_durably))


WORK: dict[str, Callable[[Path, Steps], None]] = {
    "write": write,
    "compact": tidy,
    "score": score,
}


def in_child(work: Callable[[], None], what: str) -> bool:
    """Returns whether the child was killed; raises when it failed in another way."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            sys.stderr.flush()
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    if os.WEXITSTATUS(status):
        raise SystemExit(f"it failed: {what}")
    return False


def make(name: str, root: Path) -> None:
    """The run, made in a child of its own, which may start threads."""
    from tests.storage.kill_scenarios import MAKE

    MAKE[name](root)


def main(name: str, root: Path, first: int, stride: int) -> None:
    """Every `stride`-th k, until one lives through all its steps."""
    in_child(lambda: make(name, root / "original"), "making the run")
    roots, kill_at, killed = [], first, True
    work = WORK[name]
    while killed:
        here = root / str(kill_at)
        shutil.copytree(root / "original", here)
        steps = Steps(kill_at)
        killed = in_child(lambda: work(here, steps), f"step {kill_at}")  # noqa: B023
        shutil.copytree(here, root / f"{kill_at}-dead")
        in_child(lambda: work(here, Steps(0)), f"after step {kill_at}")  # noqa: B023
        roots.append((root / f"{kill_at}-dead", here))
        kill_at += stride
    from tests.storage.kill_scenarios import CHECK

    CHECK[name](root / "original", roots)
    sys.stdout.write(f"{kill_at} steps\n")


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *(int(number) for number in sys.argv[3:]))
