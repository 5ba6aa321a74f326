"""Ctrl-C to the real program: it finishes cleanly, keeps what was done, says how to go on; a second
one leaves at once.
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

import orjson

from prorl.linux.procfs import descendants
from tests.integration.run_checks import check_complete, check_no_leftovers, rows
from tests.waiting import wait_until

COUNT = 40


@contextmanager
def _prorl(*argv: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "prorl.cli", *argv]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def _tasks(folder: Path) -> str:
    path = folder / "tasks.jsonl"
    path.write_bytes(
        b"\n".join(
            orjson.dumps({"task_id": str(i), "env": "noop", "prompt": "do nothing"})
            for i in range(COUNT)
        )
    )
    return str(path)


def _kind(sandbox_kind: str) -> tuple[str, str]:
    return ("--set", f"service.sandbox.kind={sandbox_kind}")


def test_the_first_ctrl_c_keeps_what_was_done_and_the_run_goes_on(
    tmp_path: Path, sandbox_kind: str
) -> None:
    before = set(descendants(os.getpid()))
    root = tmp_path / "root"
    slow = (
        "--policy",
        "oracle?delay_s=0.5",
        "--set",
        "service.run.slots=2",
        "--name",
        "r",
        *_kind(sandbox_kind),
    )
    with _prorl("run", "--tasks", _tasks(tmp_path), "--root", str(root), *slow) as process:
        wait_until(lambda: list(root.glob("r/commits/*.json")), "a commit")
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
    assert f"`prorl run --resume r --root {root}` continues" in stderr
    assert "Traceback" not in stderr
    check_no_leftovers(root, before)
    with _prorl(
        "run", "--resume", "r", "--root", str(root), "--set", "service.run.slots=16", "--json"
    ) as process:
        out, stderr = process.communicate(timeout=90)
        assert process.returncode == 0, stderr
    summary = orjson.loads(out)
    assert (summary["rollouts"], summary["rewarded"]) == (COUNT, COUNT)
    check_no_leftovers(root, before)
    stored = check_complete(root / "r", COUNT)
    assert rows(stored, "select count(*) as n from rollouts where failure_code <> ''") == [{"n": 0}]


def test_the_second_ctrl_c_leaves_at_once_and_nothing_behind(
    tmp_path: Path, workers: int, sandbox_kind: str
) -> None:
    before = set(descendants(os.getpid()))
    root = tmp_path / "root"
    slow = (
        "--policy",
        "oracle?delay_s=30",
        "--set",
        f"service.workers={workers}",
        "--name",
        "r",
        *_kind(sandbox_kind),
    )
    with _prorl("run", "--tasks", _tasks(tmp_path), "--root", str(root), *slow) as process:
        wait_until(lambda: (root / "r" / "job.json").exists())
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=60)
        assert process.returncode == 130, stderr
    check_no_leftovers(root, before, killed=True)
