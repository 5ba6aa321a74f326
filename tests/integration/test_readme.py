"""The README's trainer runs as it stands there, beside the very command that stands there, is
killed and started again.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

import prorl
from tests.user_package import installed
from tests.waiting import wait_until

README = Path(__file__).parents[2] / "README.md"
EXTENDING = README.parent / "docs" / "extending.md"
TASKS = "train.jsonl"
COMMAND = "prorl serve --root prorl-runs --policy flaky"
NUM_GROUPS, GROUPS_PER_BATCH = 8, 2


@asynccontextmanager
async def running(
    folder: Path, *argv: str, stdin: int = asyncio.subprocess.DEVNULL
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program in `folder`, ended with the block."""
    env = {key: value for key, value in os.environ.items() if key != "PRORL_TOKEN"}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *argv, cwd=folder, env=env, stdin=stdin, stdout=pipe
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGINT)
        await process.wait()


async def line_of(process: asyncio.subprocess.Process) -> str:
    assert process.stdout
    return (await process.stdout.readline()).decode()


async def steps_of(folder: Path, script: Path, kill_after: int = 0) -> list[str]:
    """The cursors of the steps that the trainer began; SIGKILL after so many, as far as it has got
    by then.
    """
    steps: list[str] = []
    # Each step is heard of when it begins, not when a buffer is full.
    async with running(folder, sys.executable, "-u", str(script)) as trainer:
        while line := await line_of(trainer):
            steps.append(line.split()[1])
            if len(steps) == kill_after:
                trainer.kill()
        await trainer.wait()
    assert trainer.returncode == (-signal.SIGKILL if kill_after else 0)
    return steps


async def test_your_trainer_in_ten_lines(tmp_path: Path, sandbox_kind: str) -> None:
    pytest.importorskip("torch", reason="the example hands out torch tensors (extra `torch`)")
    text = README.read_text()
    code_block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert code_block
    assert COMMAND in text
    rows = [
        {
            "question": f"What is {i} + {i}?",
            "answer": f"It is <<{i}+{i}={2 * i}>>{2 * i}.\n#### {2 * i}",
        }
        for i in range(1, NUM_GROUPS + 1)
    ]
    (tmp_path / TASKS).write_text("\n".join(json.dumps(row) for row in rows))
    script = tmp_path / "trainer.py"
    script.write_text(code_block[1])
    argv = [*COMMAND.split()[1:], "--set", f"service.sandbox.kind={sandbox_kind}"]
    async with running(tmp_path, sys.executable, "-m", "prorl.cli", *argv) as service:
        while "stop" not in await line_of(service):
            assert service.returncode is None
        killed = await steps_of(tmp_path, script, kill_after=2)
        checkpoint = (tmp_path / "checkpoint.txt").read_text()
        again = await steps_of(tmp_path, script)
        assert await steps_of(tmp_path, script) == [], "a finished run has nothing more"
    # The kill falls before or after the last step's checkpoint: it goes on behind what is durable.
    durable = killed[: killed.index(checkpoint) + 1]
    ends = [int(cursor.removeprefix("mine@")) for cursor in durable + again]
    assert ends[:-1] == list(range(GROUPS_PER_BATCH, ends[-1], GROUPS_PER_BATCH))
    assert len(ends) > 2, "the filter left too little to see a resume"


def _python(section: str) -> list[str]:
    """The code blocks of a section."""
    text = EXTENDING.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def test_an_env_of_your_own(tmp_path: Path, sandbox_kind: str) -> None:
    def prorl(*argv: str) -> str:
        return _output(tmp_path, "prorl.cli", *argv)

    env, test = _python("An env of your own")
    assert len(env.splitlines()) <= 30
    assert len(test.splitlines()) <= 10
    prorl("new", "env", "capitals")
    assert (tmp_path / "capitals/capitals.py").read_text() == env
    assert (tmp_path / "capitals/test_capitals.py").read_text() == test
    assert "1 passed" in _output(tmp_path, "pytest", "-q", "capitals")
    output = prorl("check", "capitals/tasks.jsonl", "--sandbox", sandbox_kind)
    assert "2 tasks: reference right, twice the same; useless answer wrong" in output
    output = prorl("run", "--tasks", "capitals/tasks.jsonl", "--set", "service.workers=0")
    assert "rewarded 2 of 2 valid" in output


@pytest.mark.slow
def test_each_new_part_works_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sandbox_kind: str
) -> None:
    def prorl(*argv: str) -> str:
        return _output(tmp_path, "prorl.cli", *argv)

    run = ("run", "--tasks", "arith:train?n=8", "--policy", "flaky", "--set", "service.workers=0")
    assert "my_agent/my_agent.py:MyAgent" in prorl("new", "agent", "my_agent")
    assert "1 passed" in _output(tmp_path, "pytest", "-q", "my_agent")
    assert " 8 groups" in prorl(*run, "--agent", "my_agent/my_agent.py:MyAgent")
    assert "my_filter/my_filter.sql" in prorl("new", "filter", "my_filter")
    assert re.search(r"\((spread|too_even)\)", prorl(*run, "--filter", "my_filter/my_filter.sql"))
    prorl("new", "tool", "letters")
    project = tomllib.loads((tmp_path / "letters/pyproject.toml").read_text())["project"]
    with installed(tmp_path / "letters", "letters", {}, project["entry-points"], monkeypatch):
        assert "2 passed" in _output(tmp_path, "pytest", "-q", "letters")
        output = prorl("check", "letters/tasks.jsonl", "--sandbox", sandbox_kind)
        assert "1 task: reference right, twice the same; useless answer wrong" in output


def _output(folder: Path, *argv: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *argv], cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def _shell(section: str) -> list[list[str]]:
    """Words of the commands of a section of the README, without what stands behind `#`."""
    text = README.read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    return [shlex.split(line, comments=True) for line in re.findall(r"^    (\S.*)$", text, re.M)]


def _kill(service: prorl.Client, role: str) -> int:
    """SIGKILL of a role by the pid that `prorl status` prints, when work is under way."""
    while True:
        status = service.status()
        workers = {worker["role"]: worker["pid"] for worker in status["workers"]}
        pid = {**workers, "gateway": status["pid"]}.get(role)
        if pid and any(run["counts"]["completed"] for run in status["runs"]):
            os.kill(pid, signal.SIGKILL)
            return int(pid)
        time.sleep(0.1)  # of a test's poll: the test has its limit


def test_the_commands_of_crash_safety_and_inspection_work(
    tmp_path: Path, sandbox_kind: str
) -> None:
    run, status, kill, verify = _shell("Crash safety")
    view, sql, report, _replay = _shell("Inspect runs")
    assert (status[1:], kill[:2], view[1:]) == (["status"], ["kill", "-9"], ["view"])
    rows = [
        {"question": f"What is {i} + 1?", "answer": f"It is {i + 1}.\n#### {i + 1}"}
        for i in range(1, 401)
    ]
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "configs").symlink_to(README.parent / "configs")
    assert run[-3:] == ["--limit", "400", "&"]
    argv = [sys.executable, "-m", "prorl.cli", *run[1:-2], "100"]
    argv += ["--set", f"service.sandbox.kind={sandbox_kind}"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=tmp_path, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            wait_until(lambda: (tmp_path / "prorl-runs" / "service.json").exists())
            with prorl.connect(tmp_path / "prorl-runs", retry_s=60) as service:
                killed = [_kill(service, role) for role in ("run", "store", "gateway")]
            output, notes = process.communicate()
        finally:
            process.kill()
    assert len(set(killed)) == 3
    assert process.returncode == 0, output + notes
    restart = "service was killed by SIGKILL: started again; its rollouts go on or begin anew\n"
    assert notes.count(restart) == 3, notes
    assert "are right" in _output(tmp_path, "prorl.cli", *verify[1:])
    count = "select count(*) as n, count(distinct rollout_id) as m from rollouts"
    counted = _output(tmp_path, "prorl.cli", "sql", verify[2], count)
    assert re.findall(r"\b400\b", counted) == ["400"] * 2, counted
    assert len(_output(tmp_path, "prorl.cli", *sql[1:]).splitlines()) >= 5
    _output(tmp_path, "prorl.cli", *report[1:])
    assert "<title>" in (tmp_path / f"{report[2]}.html").read_text()
