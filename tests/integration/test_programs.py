"""Programs and guests through the real service."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from prorl.agents.programs import carried
from prorl.cli.job import JobPlan
from prorl.cli.run_job import run_plan
from prorl.cli.summary import lines, summarise
from prorl.errors import ConfigError
from prorl.storage.read.catalog import StoredRun
from tests.agents.test_guest import ASK, GRADE
from tests.agents.test_guest_broker import PULL, free_port
from tests.agents.test_program import LOOP
from tests.integration.conftest import SLOW_IN_A_SINGLE_PROCESS
from tests.integration.run_checks import check_complete, rows

Make = Callable[..., JobPlan]


@SLOW_IN_A_SINGLE_PROCESS
async def test_a_program_and_a_guest_play_beside_each_other(make_plan: Make, workers: int) -> None:
    """The env `guest` brings its own agent, whatever the run's is."""
    plays = {"task_id": "noop/1", "env": "noop", "prompt": "Say anything."}
    data = {"argv": [sys.executable, "-c", ASK + GRADE], "answer": "42"}
    asks = {"task_id": "guest/1", "env": "guest", "prompt": "?", "data": data}
    data = {"guest": "lake", "answer": "42"}
    comes = {"task_id": "guest/2", "env": "guest", "prompt": "?", "data": data}
    port = free_port()
    plan = make_plan(
        [plays, asks, comes],
        f"service.workers={workers}",
        f"service.guests={port}",
        f"run.agent=command: python3 -c {shlex.quote(LOOP)}",
        policy="noop",
        n=2,
    )
    (plan.directory.parent / "token").parent.mkdir(exist_ok=True)
    (plan.directory.parent / "token").write_text("owner")
    words = (f"http://127.0.0.1:{port}", "lake", "2", "--", sys.executable, "-c", ASK + GRADE)
    puller = await asyncio.create_subprocess_exec(
        sys.executable, str(PULL), *words, env={**os.environ, "PRORL_TOKEN": "owner"}
    )
    try:
        assert await run_plan(plan, json=True) == 0
    finally:
        puller.terminate()
        await puller.wait()
    stored = check_complete(plan.directory, 6)
    assert rows(
        stored,
        "select task_id, status, attempt, reward, rendered_calls from rollouts group by all"
        " order by 1",
    ) == [
        {
            "task_id": "guest/1",
            "status": "completed",
            "attempt": 1,
            "reward": 0.0,
            "rendered_calls": 1,
        },
        {
            "task_id": "guest/2",
            "status": "completed",
            "attempt": 1,
            "reward": 0.0,
            "rendered_calls": 1,
        },
        {
            "task_id": "noop/1",
            "status": "completed",
            "attempt": 1,
            "reward": 1.0,
            "rendered_calls": 1,
        },
    ]
    assert any(line.startswith("  endpoint  0 of 6") for line in lines(summarise(plan.directory)))


@pytest.mark.parametrize(
    ("outcome", "message"),
    [("reward=1", "left a reward of 1"), ("failed='task', message='no level'", "no level")],
)
async def test_a_guest_that_asked_the_policy_nothing_is_not_played_again(
    make_plan: Make, workers: int, outcome: str, message: str
) -> None:
    """It would leave the same again, as Harbor's `oracle` does."""
    data = {"argv": [sys.executable, "-c", f"{ASK}leave({outcome})"]}
    task = {"task_id": "guest/1", "env": "guest", "prompt": "?", "data": data}
    plan = make_plan([task], f"service.workers={workers}", policy="noop")
    await run_plan(plan, json=True)
    listing = "select status, attempt, failure_code, failure_message from rollouts"
    (row,) = rows(check_complete(plan.directory, 1), listing)
    assert (row["status"], row["attempt"], row["failure_code"]) == ("failed", 1, "bad_task")
    assert message in row["failure_message"]


TWO = """
import json, os, urllib.request
tools = [{"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}]
for prompt in ("main", "sub"):
    body = {"messages": [{"role": "user", "content": prompt}], "tools": tools}
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode())).read()
"""


@pytest.mark.parametrize(
    ("train", "weights"),
    [("", {"main": 1.0, "subagent": 0.0}), ("subagent", {"main": 0.5, "subagent": 0.5})],
)
@SLOW_IN_A_SINGLE_PROCESS
async def test_a_run_says_which_conversations_train(
    make_plan: Make, workers: int, train: str, weights: dict[str, float]
) -> None:
    plan = make_plan(
        [{"task_id": "noop/1", "env": "noop", "prompt": "Say anything."}],
        f"service.workers={workers}",
        f"run.agent=command: python3 -c {shlex.quote(TWO)}",
        *([f'run.train=["main", "{train}"]'] if train else []),
        policy="noop",
    )
    assert await run_plan(plan, json=True) == 0
    stored = check_complete(plan.directory, 1)
    sequences = rows(stored, "select lineage, weight from sequences")
    assert {row["lineage"]: row["weight"] for row in sequences} == weights


@SLOW_IN_A_SINGLE_PROCESS
async def test_rows_that_wait_for_a_guest_hold_nobody_up(make_plan: Make, workers: int) -> None:
    """Twelve rows of an absent guest and two slots of RUN: the others end, then it comes."""
    data = {"guest": "absent", "answer": "42"}
    waits = [
        {"task_id": f"guest/{i}", "env": "guest", "prompt": "?", "data": data} for i in range(12)
    ]
    plays = [{"task_id": f"noop/{i}", "env": "noop", "prompt": "Say anything."} for i in range(4)]
    port = free_port()
    settings = (f"service.workers={workers}", f"service.guests={port}", "service.run.slots=2")
    plan = make_plan([*waits, *plays], *settings, policy="noop")
    (plan.directory.parent / "token").parent.mkdir(exist_ok=True)
    (plan.directory.parent / "token").write_text("owner")
    running = asyncio.ensure_future(run_plan(plan, json=True))
    ended = "select count(*) as n from rollouts where task_id like 'noop/%'"
    while True:
        await asyncio.sleep(0.5)
        assert not running.done(), "its guest has not come"
        stored = any(plan.directory.glob("commits/*.json"))
        if stored and rows(StoredRun(plan.directory), ended) == [{"n": 4}]:
            break
    words = (f"http://127.0.0.1:{port}", "absent", "8", "--", sys.executable, "-c", ASK + GRADE)
    puller = await asyncio.create_subprocess_exec(
        sys.executable, str(PULL), *words, env={**os.environ, "PRORL_TOKEN": "owner"}
    )
    try:
        assert await running == 0
    finally:
        puller.terminate()
        await puller.wait()
    check_complete(plan.directory, 16)


@SLOW_IN_A_SINGLE_PROCESS
async def test_the_script_of_the_page_is_an_agent(
    make_plan: Make, workers: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "docs" / "agents.md").read_text()
    (script,) = re.findall(r"^(    import json.*\n(?:    .*\n|\n)+)", page, re.MULTILINE)
    (tmp_path / "loop.py").write_text(textwrap.dedent(script))
    monkeypatch.chdir(tmp_path)
    task = {"question": "What is 3 times 4?", "answer": "#### 12"}
    plan = make_plan(
        [task],
        f"service.workers={workers}",
        "run.agent='command: python3 @loop.py'",
        policy="oracle",
    )
    assert await run_plan(plan, json=True) == 0
    outcomes = rows(check_complete(plan.directory, 1), "select reward, num_turns from rollouts")
    assert outcomes == [{"reward": 1.0, "num_turns": 2}]


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("command: python3 @gone.py", "@gone.py of the agent: No such file"),
        ("command: python3 @large.py", "65,537 bytes of the agent's files; expected 64 KiB"),
    ],
)
def test_files_that_cannot_be_carried_are_reported_before_anything_starts(
    tmp_path: Path, command: str, why: str
) -> None:
    (tmp_path / "large.py").write_bytes(b"#" * ((64 << 10) + 1))
    with pytest.raises(ConfigError, match=re.escape(why)):
        carried(command, tmp_path)


def test_a_command_without_files_stays_as_it_is(tmp_path: Path) -> None:
    for name in ("native", "codex", "command: python3 -c 'print(1)' a@b"):
        assert carried(name, tmp_path) == name
