"""Rubrics: the weighted sum, and what a failing judgement does."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.errors import ConfigError, GraderError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import Judgement, Task

TASK = Task(task_id="t", env="e", prompt="")
numbers = st.floats(-1e6, 1e6)


@given(st.lists(st.tuples(numbers, numbers), max_size=4))
def test_the_reward_is_the_weighted_sum(parts: list[tuple[float, float]]) -> None:
    rubric = Rubric(
        *(
            (reward(str(i))(lambda task, artefact, value=value: value), weight)
            for i, (value, weight) in enumerate(parts)
        )
    )
    score = asyncio.run(rubric.score(TASK, b"", None, Deadline(1.0)))
    assert score.reward == pytest.approx(sum(value * weight for value, weight in parts))
    assert [part.name for part in score.parts] == [str(i) for i in range(len(parts))]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "many"])
async def test_what_is_no_finite_number_is_the_graders_failure(value: float) -> None:
    with pytest.raises(GraderError, match="odd"):
        await Rubric((reward("odd")(lambda task, artefact: value), 1.0)).score(
            TASK, b"", None, Deadline(1.0)
        )


async def test_a_function_that_raises_is_the_graders_failure() -> None:
    with pytest.raises(GraderError, match="broken: ZeroDivisionError"):
        await Rubric((reward("broken")(lambda task, artefact: 1 / 0), 1.0)).score(
            TASK, b"", None, Deadline(1.0)
        )


async def test_a_deadline_ends_before_the_next_function() -> None:
    with pytest.raises(GraderError, match="no time"):
        await Rubric((reward("late")(lambda task, artefact: 1.0), 1.0)).score(
            TASK, b"", None, Deadline(0.0)
        )


def test_names_are_unique_and_weights_finite() -> None:
    one = reward("same")(lambda task, artefact: 1.0)
    with pytest.raises(ConfigError, match="same"):
        Rubric((one, 1.0), (one, 1.0))
    with pytest.raises(ConfigError, match="finite"):
        Rubric((one, float("nan")))


async def test_a_function_may_wait_look_into_the_sandbox_and_say_why() -> None:
    @reward("slow")
    async def slow(task: Task, artefact: bytes, sandbox: Sandbox | None, until: Deadline) -> object:
        await asyncio.sleep(0)
        return Judgement(0.5, f"{until.budget_s:g} s, sandbox {sandbox}")

    plain = reward("plain")(lambda task, artefact: len(artefact))
    score = await Rubric((slow, 1.0), (plain, 2.0)).score(TASK, b"ab", None, Deadline(3.0))
    assert score.reward == 4.5
    assert score.log == "3 s, sandbox None\nplain = 2 (weight 2)"


def test_a_function_of_other_arguments_is_refused_where_it_is_marked() -> None:
    with pytest.raises(ConfigError, match="'odd' takes 1 argument"):
        reward("odd")(lambda task: 1.0)
