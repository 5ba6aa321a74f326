"""`prorl serve` is told to stop in the middle of long rollouts, and started again on its root."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

import prorl
from prorl.backends.embedded import TOY
from prorl.errors import ProrlError
from prorl.journal import ToolAnswer
from prorl.linux.procfs import descendants
from prorl.storage.read.catalog import StoredRun
from prorl.types import Task
from tests.integration.run_checks import check_complete, check_no_leftovers, rows
from tests.journal.journal_records import look
from tests.waiting import wait_until

TURNS, COUNT = 30, 6
ENV = str(Path(__file__).with_name("counting_env.py")) + ":Counting"
TASKS = [
    Task(task_id=f"c/{i}", env=ENV, prompt=f"Count {i}.", data={"turns": TURNS, "pause": 0.4})
    for i in range(COUNT)
]


@contextmanager
def _serving(root: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """The real program on a root."""
    options = {"sandbox.kind": kind, "load_code": "true", "tokenizer": str(TOY), "run.slots": "8"}
    sets = [
        word for name, value in options.items() for word in ("--set", f"service.{name}={value}")
    ]
    command = [sys.executable, "-m", "prorl.cli", "serve", "--root", str(root)]
    policy = ["--policy", "scripted:oracle?delay_s=0.1"]
    process = subprocess.Popen([*command, *policy, *sets], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("serving"):
                break
        yield process
    finally:
        process.kill()
        process.communicate()


def _stopped(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert process.returncode == 0


def _answers(path: Path) -> int:
    snapshot = look(path)
    return sum(isinstance(record, ToolAnswer) for record in snapshot.records) if snapshot else 0


def _begun(root: Path) -> bool:
    journals = list(root.glob("journal/run-0/*.journal"))
    return len(journals) == COUNT and all(_answers(path) >= 5 for path in journals)


def _finished(client: prorl.Client) -> bool:
    try:
        return bool(client.run("r")["state"] == "finished")
    except ProrlError:
        return False


def _run(root: Path, kind: str) -> StoredRun:
    """The run, stopped in its middle and gone on with."""
    before = set(descendants(os.getpid()))
    with _serving(root, kind) as process:
        with prorl.connect(root) as client:
            client.create_run(run_id="r", limits={"max_turns": TURNS + 1}, seed=5)
            client.submit("r", TASKS, n=1, key="k", last=True)
            wait_until(lambda: _begun(root), "it is in its middle")
        _stopped(process)
    check_no_leftovers(root, before)
    with _serving(root, kind) as process:
        with prorl.connect(root) as client:
            wait_until(lambda: _finished(client), "it goes on to its end")
        _stopped(process)
    check_no_leftovers(root, before)
    return check_complete(root / "r", COUNT)


def _charges(root: Path) -> list[tuple[int, int]]:
    """Failures of infrastructure and losses of workers that rollouts were charged, in the log."""
    query = "SELECT DISTINCT infra_failures, worker_losses FROM rollouts"
    with closing(sqlite3.connect(root / "control.db")) as control:
        return list(control.execute(query))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_what_a_stopped_service_could_not_end_begins_anew_charged_to_nobody(
    tmp_path: Path, sandbox_kind: str
) -> None:
    stored = _run(tmp_path, sandbox_kind)
    ends = "select distinct reward, num_turns, resumes from rollouts"
    assert rows(stored, ends) == [{"reward": 1.0, "num_turns": TURNS + 1, "resumes": 0}]
    assert _charges(tmp_path) == [(0, 0)]
