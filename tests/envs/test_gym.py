"""A Gym-style env by its own package: acting, the return, and what is not believed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from prorl.envs import get_env
from prorl.envs.gym import HISTORY, GymEnv, _actions
from prorl.errors import GraderError, TaskError
from prorl.limits import Deadline
from prorl.testing import LocalSandbox, make_task, run
from prorl.types import Json, Task, ToolCall

pytestmark = pytest.mark.skipif(
    find_spec("gymnasium") is None, reason="gymnasium is not installed (extra `gym`)"
)
ENV = GymEnv()
RIGHT, DOWN = 2, 1
WAY = [DOWN, DOWN, RIGHT, RIGHT, DOWN, RIGHT]
"""Through the frozen lake of 4 by 4, where it is not slippery."""


def _lake(**data: Json) -> Task:
    return make_task(
        "gym",
        "Reach the goal.",
        gym="FrozenLake-v1",
        arguments={"is_slippery": False},
        solution=WAY,
        **data,
    )


def _step(action: Json) -> ToolCall:
    return ToolCall("step", {"action": action})


def test_the_oracle_reaches_the_goal_and_the_idle_does_not() -> None:
    reference = ENV.reference(_lake())
    played = run(get_env("gym"), _lake(), *reference.calls, reference.answer)
    assert played.reward == 1
    assert played.outputs[-1].startswith("You see: 15")
    assert "The game is over." in played.outputs[-1]
    assert run(ENV, _lake(), "I am there.").reward == 0
    assert run(ENV, _lake(), "[2, 2, 1, 1, 1, 2] reward 1 #### 1").reward == 0


def test_the_first_message_says_what_is_seen_and_can_be_done() -> None:
    said = ENV.messages(_lake())[1].content
    assert "You see: 0" in said
    assert "Discrete(4)" in said


def test_actions_that_are_none_are_told_and_not_taken() -> None:
    played = run(ENV, _lake(), _step(9), _step("up"), _step(True), _step("1"), "Done.")
    assert ["no action" in output for output in played.outputs] == [True, True, True, False]
    assert played.outputs[3].startswith("You see: 4")


def test_steps_after_the_end_do_not_count() -> None:
    into_the_hole = [_step(RIGHT), _step(DOWN), *map(_step, WAY)]
    played = run(ENV, _lake(), *into_the_hole, "Done.")
    assert played.reward == 0
    assert "no further step counts" in played.outputs[-1]
    assert run(ENV, _lake(max_steps=3), *map(_step, WAY), "Done.").reward == 0


ODD: list[Json] = [
    "--1",
    "²",
    "9" * 5000,
    "1_0",
    10**30,
    -(10**30),
    1e400,
    [10**30],
    [[[]]],
    {},
    None,
]


@pytest.mark.parametrize("action", ODD, ids=lambda action: repr(action)[:12])
async def test_no_action_makes_the_game_fail(action: Json, tmp_path: Path) -> None:
    """By the tool, and by the file that the agent may write."""
    sandbox = LocalSandbox(tmp_path)
    await ENV.prepare(_lake(), sandbox)
    told = await ENV.call(_lake(), sandbox, _step(action), 9.0)
    assert "no action of" in told.output
    assert len(told.output) < 200
    score = await ENV.score(_lake(), json.dumps([action]).encode(), None, Deadline(60))
    assert score.reward == 0


async def test_a_spoilt_history_is_the_policys_and_a_missing_one_is_empty(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    assert await ENV.artefact(_lake(), "", sandbox) == b"[]"
    assert (await ENV.call(_lake(), sandbox, _step(DOWN), 9.0)).output.startswith("You see: 4")
    for spoilt in (b"", b"{}", b"\xff"):
        (tmp_path / HISTORY).write_bytes(spoilt)
        assert "no step counts" in (await ENV.call(_lake(), sandbox, _step(DOWN), 9.0)).output
        artefact = await ENV.artefact(_lake(), "", sandbox)
        score = await ENV.score(_lake(), artefact, None, Deadline(60))
        assert score.reward == 0
        assert "spoilt" in score.log


async def test_the_artefact_is_played_again_and_not_believed() -> None:
    async def reward(artefact: bytes) -> float:
        return (await ENV.score(_lake(), artefact, None, Deadline(60))).reward

    assert await reward(b"[1, 1, 2, 2, 1, 2]") == 1
    for artefact in (b"[]", b"", b'{"reward": 1}', b"[15]", b'["goal"]', b"[[1, 1, 2]]", b"[1.5]"):
        assert await reward(artefact) == 0


async def test_a_game_that_cannot_be_played_again_is_a_grader_error() -> None:
    task = make_task("gym", gym="NoSuchGame-v0")
    with pytest.raises(GraderError, match="played again"):
        await ENV.score(task, b"[]", None, Deadline(60))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"gym": "NoSuchGame-v0"}, "NoSuchGame"),
        ({"gym": "FrozenLake-v1", "arguments": {"no_such": 1}}, "no_such"),
        ({"gym": "FrozenLake-v1", "max_steps": 0}, "max_steps"),
        ({"gym": "FrozenLake-v1", "target": 0}, "target"),
    ],
)
def test_bad_tasks_are_refused(data: dict[str, Json], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        ENV.check(make_task("gym", "q", **data))


@pytest.mark.parametrize("artefact", [b"", b"{}", b"[" * 100_000, b"\xff"])
def test_what_is_no_list_of_actions_is_none(artefact: bytes) -> None:
    assert _actions(artefact) is None
