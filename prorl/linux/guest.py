"""One guest, from its start to its reward, in a folder of its own; nothing of it is left behind.

    python -m prorl.linux.guest PARENT_PID    < {"argv", "env", "task"}
                                               > {"exit_code", "output", "reward"}

    folder/ task.json    PRORL_TASK
            output       of the guest and all that it starts
            work/        where it runs, and leaves reward.json

What the guest has started ends with it, and all of it when the parent dies or says SIGTERM.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from prorl.linux import calls, guard

MAX_REWARD_BYTES = 64 << 10
MAX_OUTPUT_BYTES = 8000
"""The part of its output that is kept, the end of it."""
EXIT_NO_PROGRAM = 127


def play(folder: Path, argv: list[str], env: dict[str, str], task: str) -> dict[str, Any]:
    """Run a guest to its end; what came of it, or nothing where it was stopped."""
    (folder / "task.json").write_text(task)
    (folder / "work").mkdir()
    with open(folder / "output", "wb") as output:
        try:
            child = subprocess.Popen(
                argv,
                cwd=folder / "work",
                env={**os.environ, **env, "PRORL_TASK": str(folder / "task.json")},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_begin,
            )
        except OSError as error:
            why = f"{argv[0]}: {error.strerror}"
            return {"exit_code": EXIT_NO_PROGRAM, "output": why, "reward": None}
    status = guard.watch(child.pid)
    child.returncode = 0  # reaped
    guard.end_all()
    if status is None:
        return {}
    return {
        "exit_code": os.waitstatus_to_exitcode(status),
        "output": _end_of(folder / "output"),
        "reward": _reward(folder / "work" / "reward.json"),
    }


def _begin() -> None:
    calls.die_with_parent(signal.SIGKILL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, guard.WATCHED)


def _end_of(path: Path) -> str:
    with open(path, "rb") as file:
        file.seek(max(0, path.stat().st_size - MAX_OUTPUT_BYTES))
        return file.read().decode("utf-8", "replace")


def _reward(path: Path) -> str | None:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_REWARD_BYTES).decode("utf-8", "replace")
    except OSError:
        return None


def main() -> None:
    guard.become(int(sys.argv[1]))
    if not (text := sys.stdin.read()):
        return  # it was cancelled before it was told anything
    job = json.loads(text)
    folder = Path(tempfile.mkdtemp(prefix="prorl-guest-"))
    try:
        outcome = play(folder, job["argv"], job["env"], job["task"])
        sys.stdout.write(json.dumps(outcome))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
