"""A whole service is stopped for a while (`docker pause`, `scontrol suspend`, a laptop's lid) and
goes on: nobody is charged, and no policy pays for it.
"""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

import prorl
from prorl.linux.procfs import descendants
from prorl.types import Task
from tests.integration.checks import check_complete, rows

COUNT, RUN_S, STOPPED_S = 24, 12.0, 20.0
TASKS = [Task(task_id=f"t{i}", env="noop", prompt=f"say {i}") for i in range(COUNT)]


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_stop_of_the_whole_service_is_charged_to_nobody(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prorl.cli", "serve", "--root", str(tmp_path)]
    policy = ["--policy", "scripted:random?delay_s=2"]
    before = set(descendants(os.getpid()))
    with subprocess.Popen([*command, *policy], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            next(line for line in process.stdout if line.startswith("serving"))
            with prorl.connect(tmp_path) as client:
                client.create_run(run_id="r", limits={"run_s": RUN_S})
                client.submit("r", TASKS, n=1, key="k", last=True)
                while not client.run("r")["counts"]["running"]:
                    time.sleep(0.05)
                ours = [pid for pid in descendants(os.getpid()) if pid not in before]
                for pid in ours:
                    os.kill(pid, signal.SIGSTOP)
                time.sleep(STOPPED_S)
                for pid in ours:
                    os.kill(pid, signal.SIGCONT)
                while client.run("r")["state"] != "finished":
                    time.sleep(0.2)
            process.terminate()
            process.communicate(timeout=60)
        finally:
            process.kill()
    stored = check_complete(tmp_path / "r", COUNT)
    (longest,) = rows(stored, "select max(run_s) as run_s from rollouts")
    assert longest["run_s"] < STOPPED_S, "the stop is no part of what an attempt has spent"
    with closing(sqlite3.connect(tmp_path / "control.db")) as log:
        charges = log.execute("SELECT sum(infra_failures), sum(worker_losses) FROM rollouts")
        assert charges.fetchone() == (0, 0)
