"""A user's env with turns of its own, in its helper: whole rollouts, and each way to be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.cli.app import dispatch
from prorl.envs import users
from prorl.envs.users import env_by_name, open_env
from prorl.errors import RolloutError, TaskError
from prorl.helper.pool import close
from prorl.testing import Replies, make_task, play, scripted
from prorl.types import FailureCode, Task, ToolCall
from tests.envs import guessing_env

NAME = f"{guessing_env.__file__}:Guessing"


async def test_a_whole_rollout_in_helpers() -> None:
    task = make_task(NAME, "Which number?", number=7)
    env = await open_env(env_by_name, task)
    played = await play(env, task, scripted("oracle", env))
    assert (played.reward, played.trajectory.env_state) == (0.5, '{"hints":1,"wrong":1}')
    replies = "4", ToolCall("hint", {"about": "x"}), ToolCall("hint", {"about": "y"}), "7"
    played = await play(env, task, Replies(*replies))
    assert (played.reward, played.outputs) == (0.5, ["hint 1: odd", "hint 2: odd"])
    close()


AGENT = """
class Solves:
    async def run(self, attempt):
        return (await attempt.solve()).content
"""


async def test_an_agent_of_a_user_plays_the_turns(tmp_path: Path) -> None:
    (tmp_path / "solves.py").write_text(AGENT)
    task = make_task(NAME, "Which number?", number=7)
    env = await open_env(env_by_name, task)
    agent = f"{tmp_path}/solves.py:Solves"
    replies = Replies("5", ToolCall("hint", {"about": "x"}), "7")
    played = await play(env, task, replies, agent=agent)
    assert (played.reward, played.outputs) == (0.5, ["hint 1: odd"])
    roles = [message.role for message in played.trajectory.messages]
    assert roles == ["user", "assistant", "user", "assistant", "tool", "assistant"]
    close()


def test_prorl_check_plays_the_turns(
    tmp_path: Path, sandbox_kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    env = Path(guessing_env.__file__).read_text()
    (tmp_path / "game.py").write_text(
        env.replace("str(number - 1), (str(number),)", "str(number), ()")
    )
    (tmp_path / "half.py").write_text(env.replace("(str(number),)", "()"))
    row = '{"task_id": "g/1", "env": "%s:Guessing", "prompt": "Which?", "data": {"number": 7}}'
    for file, code, words in [
        ("game.py", 0, "1 task: reference right"),
        ("half.py", 1, "the reference solution scores 0"),
    ]:
        (tmp_path / "tasks.jsonl").write_text(row % file)
        assert dispatch(["check", str(tmp_path / "tasks.jsonl"), "--sandbox", sandbox_kind]) == code
        assert words in capsys.readouterr().out


HOOK = """
import os, time
from prorl.envs.base import BaseEnv

class Mine(BaseEnv):
    name = "mine"

    def respond(self, task, messages, state, sandbox):
        {body}
"""
WRONG = {
    'raise LookupError("no such move")': r"mine\.py:Mine\.respond: LookupError: no such move .*:9",
    "time.sleep(600)": r"mine\.py:Mine\.respond took longer than 1\.5 s .*mine\.py:9 in respond",
    "os._exit(7)": r"mine\.py:Mine\.respond.*exit code 7",
    "return 5": r"mine\.respond gave 5; expected a text for the policy, or None for the end",
    'return ""': r"mine\.respond gave ''; expected a text for the policy",
    'return "x" * 300_000': r"mine\.respond gave 300,000 bytes; expected at most 262,144",
    'state["seen"] = {1, 2}': r"mine\.py:Mine\.respond: the env's state is no JSON: .*set",
    'state["log"] = "x" * 70_000': r"mine\.py:Mine\.respond: the env's state has 70,010 bytes",
}


@pytest.mark.parametrize("body", WRONG)
async def test_a_wrong_hook_is_the_tasks_mistake_in_a_single_line(
    body: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "exit" not in body:  # which waits for another start
        monkeypatch.setattr(users, "RESPOND_S", 1.5)
    task = _task(tmp_path, HOOK.format(body=body))
    env = await open_env(env_by_name, task)
    with pytest.raises(RolloutError, match=WRONG[body]) as caught:
        await play(env, task, Replies("hello"))
    assert caught.value.code is FailureCode.BAD_TASK
    assert "\n" not in caught.value.message
    close()


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("def respond(self, task, messages)", r"mine\.respond: too many .*expected def respond\("),
        ("respond = 5 #", r"mine\.respond: 5 is not a callable object; expected def respond\("),
    ],
)
async def test_a_hook_of_another_shape_is_refused_before_the_run(
    written: str, expected: str, tmp_path: Path
) -> None:
    hook = "def respond(self, task, messages, state, sandbox)"
    text = HOOK.format(body="return None").replace(hook, written)
    if written.endswith("#"):
        text = text.replace("        return None", "")
    with pytest.raises(TaskError, match=expected):
        await open_env(env_by_name, _task(tmp_path, text))
    close()


def _task(folder: Path, text: str) -> Task:
    (folder / "mine.py").write_text(text)
    return make_task(f"{folder}/mine.py:Mine", "Move.")
