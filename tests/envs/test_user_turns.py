"""A simulated user: what an env says to the policy's answers, and how such a rollout ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from prorl.envs import get_env
from prorl.envs.base import BaseEnv
from prorl.errors import RolloutError, TaskError
from prorl.rubric import Rubric, reward
from prorl.testing import make_task, run
from prorl.types import Message, StopReason, Task, ToolCall


def _task(*user: str) -> Task:
    return make_task("math", "Half of 48?", answer="24", user=list(user))


def test_the_script_is_said_in_order_and_the_last_answer_counts() -> None:
    played = run(get_env("math"), _task("Sure?", "Really?"), "#### 23", "Hm. #### 25", "#### 24")
    assert played.reward == 1
    assert [message.role for message in played.trajectory.messages][2:] == [
        "assistant",
        "user",
        "assistant",
        "user",
        "assistant",
    ]
    assert len(played.trajectory.turns) == 3
    assert len(played.trajectory.sequences) == 1
    assert played.trajectory.stop_reason is StopReason.DONE


def test_a_first_answer_does_not_count_when_a_later_one_does() -> None:
    assert run(get_env("math"), _task("Sure?"), "#### 24", "#### 25").reward == 0


def test_tools_between_answers_are_no_turns_of_the_user() -> None:
    call = ToolCall("python", {"code": "print(48 / 2)"})
    played = run(get_env("math"), _task("Compute it."), "#### 20", call, "#### 24")
    assert played.reward == 1
    assert played.outputs == ["24.0"]


@reward("said")
def _said(task: Task, artefact: bytes) -> float:
    return float(artefact == b"bye")


class _Chat(BaseEnv):
    name = "chat"
    rubric = Rubric((_said, 1.0))

    async def user_turn(self, task: Task, messages: Sequence[Message]) -> str | None:
        if messages[-1].content == "crash":
            raise KeyError("the user is away")
        return None if messages[-1].content == "bye" else f"You said {messages[-1].content}."


def test_an_env_may_answer_what_was_said() -> None:
    played = run(_Chat(), make_task("chat", "Talk."), "hello", "bye")
    assert played.reward == 1
    assert "You said hello." in [message.content for message in played.trajectory.messages]


def test_a_user_that_fails_is_not_the_policys_fault() -> None:
    with pytest.raises(RolloutError, match=r"stage_error: chat\.user_turn: KeyError"):
        run(_Chat(), make_task("chat", "Talk."), "crash")


def test_a_script_that_is_none_is_refused() -> None:
    with pytest.raises(TaskError, match=r"data\.user"):
        get_env("math").check(make_task("math", answer="1", user="Sure?"))
