"""Rubrics: the weighted sum, and what a failing measure does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.errors import ConfigError, GraderError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import Grade, Task

TASK = Task(task_id="t", env="e", prompt="")
numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(numbers, numbers), max_size=4))
def test_the_reward_is_the_weighted_sum(parts: list[tuple[float, float]]) -> None:
    rubric = Rubric(
        *(
            (reward(str(i))(lambda task, artifact, value=value: value), weight)
            for i, (value, weight) in enumerate(parts)
        )
    )
    score = asyncio.run(rubric.score(TASK, b"", None, Deadline(1.0)))
    assert score.reward == pytest.approx(sum(value * weight for value, weight in parts))
    assert [part.name for part in score.parts] == [str(i) for i in range(len(parts))]


@pytest.mark.parametrize(
    ("function", "budget_s", "expected"),
    [
        (lambda task, artifact: float("nan"), 1.0, "odd gave nan; expected a finite number"),
        (lambda task, artifact: float("inf"), 1.0, "odd gave inf"),
        (lambda task, artifact: "many", 1.0, "odd gave 'many'"),
        (lambda task, artifact: 1 / 0, 1.0, "odd: ZeroDivisionError"),
        (lambda task, artifact: 1.0, 0.0, "no time was left for odd"),
    ],
)
async def test_what_no_reward_comes_of_is_the_graders_failure(
    function: Callable[..., object], budget_s: float, expected: str
) -> None:
    with pytest.raises(GraderError, match=expected):
        await Rubric((reward("odd")(function), 1.0)).score(TASK, b"", None, Deadline(budget_s))


def test_names_are_unique_and_weights_finite() -> None:
    same_reward = reward("same")(lambda task, artifact: 1.0)
    with pytest.raises(ConfigError, match="same"):
        Rubric((same_reward, 1.0), (same_reward, 1.0))
    with pytest.raises(ConfigError, match="finite"):
        Rubric((same_reward, float("nan")))


async def test_a_function_may_wait_look_into_the_sandbox_and_say_why() -> None:
    @reward("slow")
    async def slow(task: Task, artifact: bytes, sandbox: Sandbox | None, until: Deadline) -> object:
        await asyncio.sleep(0)
        return Grade(0.5, f"{until.budget_s:g} s, sandbox {sandbox}")

    plain = reward("plain")(lambda task, artifact: len(artifact))
    score = await Rubric((slow, 1.0), (plain, 2.0)).score(TASK, b"ab", None, Deadline(3.0))
    assert score.reward == 4.5
    assert score.log == "3 s, sandbox None\nplain = 2 (weight 2)"


def test_a_function_of_other_arguments_is_refused_where_it_is_marked() -> None:
    with pytest.raises(ConfigError, match="'odd' takes 1 argument"):
        reward("odd")(lambda task: 1.0)
