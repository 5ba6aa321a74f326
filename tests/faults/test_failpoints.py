"""A process dies, freezes or fails at each durable step: the run ends whole all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from prorl.linux.failpoints import FAILPOINTS, parse
from prorl.linux.procfs import descendants
from tests.integration.checks import check_complete, check_nothing_left

COUNT = 40


@pytest.mark.faults
@pytest.mark.timeout(180)
@pytest.mark.parametrize("fault", ["kill", "freeze", "error", "delay"])
@pytest.mark.parametrize("name", FAILPOINTS)
def test_a_fault_at_a_durable_step_loses_nothing(
    tmp_path: Path, name: str, fault: str, sandbox_kind: str
) -> None:
    before = set(descendants(os.getpid()))
    tasks = tmp_path / "tasks.jsonl"
    rows = [
        {"task_id": f"t{i}", "env": "math", "prompt": f"{i} + 7?", "data": {"answer": str(i + 7)}}
        for i in range(COUNT)
    ]
    tasks.write_bytes(b"\n".join(map(orjson.dumps, rows)))
    argv = [sys.executable, "-m", "prorl.cli", "run", "--tasks", str(tasks), "--name", "r"]
    argv += ["--root", str(tmp_path / "root"), "--quiet", "--policy", "scripted:random"]
    sets = [f"service.sandbox.kind={sandbox_kind}", "run.limits.max_attempts=40"]
    argv += [word for one in sets for word in ("--set", one)]
    at = 1 if name == "manifest.written" else 3
    ended = subprocess.run(
        argv,
        env={**os.environ, "PRORL_FAILPOINTS": f"{name}:{fault}@{at}"},
        capture_output=True,
        timeout=170,
    )
    assert ended.returncode == 0, ended.stderr.decode()
    check_nothing_left(tmp_path / "root", before)
    check_complete(tmp_path / "root" / "r", COUNT)


@pytest.mark.parametrize("text", ["log.writen:kill", "log.written:die", "log.written:kill@x"])
def test_a_fault_that_does_not_exist_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="expected NAME:FAULT"):
        parse(text)
