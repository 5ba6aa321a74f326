"""Reward functions that a task adds to its env's own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from prorl.envs import get_env
from prorl.errors import TaskError
from prorl.service.core.submissions import known_env
from prorl.testing import make_task, run
from prorl.types import Json, Task

ENV = get_env("math")


def _task(**data: Json) -> Task:
    return make_task("math", "6 * 7?", answer="42", **data)


def test_parts_of_a_tasks_own_are_added_and_stored() -> None:
    task = _task(rewards={"format": 0.5, "length": -0.1}, length_chars=10)
    played = run(ENV, task, "#### 42")
    assert [(part.name, part.value, part.weight) for part in played.score.parts] == [
        ("correct", 1.0, 1.0),
        ("format", 1.0, 0.5),
        ("length", 1.0, -0.1),
    ]
    assert played.reward == pytest.approx(1.4)
    assert run(ENV, task, "It is 42").score.parts[1].value == 0
    assert run(ENV, task, "x" * 15).score.parts[2].value == 0.5
    assert run(ENV, task, "x" * 30).score.parts[2].value == 0


async def test_a_function_of_ones_own(tmp_path: Path) -> None:
    code = "from prorl.rubric import reward\n@reward('polite')\ndef polite(task, artefact):\n"
    (tmp_path / "mine.py").write_text(f"{code}    return float(b'please' in artefact)\n")
    task = _task(rewards={f"{tmp_path}/mine.py:polite": 0.25})
    played = await asyncio.to_thread(lambda: run(ENV, task, "please: #### 42"))
    assert played.reward == 1.25
    with pytest.raises(TaskError, match="does not load"):
        known_env(load_code=False)(task)
    found = known_env(load_code=True)(task)
    assert found is not None
    await found


@pytest.mark.parametrize(
    ("rewards", "says"),
    [
        (["format"], "data.rewards is"),
        ({"format": "much"}, "the weight of 'format' is 'much'"),
        ({"format": float("nan")}, "a finite number"),
        ({"formt": 1}, "unknown reward 'formt'.*did you mean 'format'"),
        ({"prorl.rewards:GROUP": 1}, "made by prorl.rubric.reward"),
        ({"format": 1, "prorl.rewards:format_": 1}, "two rewards are named 'format'"),
    ],
)
def test_what_is_no_reward_is_refused_with_the_task(rewards: Json, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        ENV.check(_task(rewards=rewards))
