"""The math env: what is right, wrong or a grader's failure, and its own oracle."""

from __future__ import annotations

from pathlib import Path

import pytest

from prorl.envs.math import MathEnv
from prorl.errors import TaskError
from prorl.limits import Deadline
from prorl.tasks import load_tasks
from prorl.testing import LocalSandbox, Replies, play
from prorl.types import Json, Stage, Task, ToolCall

# one loop: its grader stays warm from one test to the next
pytestmark = pytest.mark.asyncio(loop_scope="module")

DATA = Path(__file__).parents[2] / "../shared/data/gsm8k/train-2000.jsonl"
ENV = MathEnv()


def _task(answer: Json, **data: Json) -> Task:
    return Task(task_id="t", env="math", prompt="?", data={"answer": answer, **data})


async def _reward(answer: Json, text: str) -> float:
    return (await ENV.score(_task(answer), text.encode(), None, Deadline(60.0))).reward


@pytest.mark.parametrize(
    ("answer", "text", "reward"),
    [
        ("42", "#### 42", 1),
        ("42", "#### 42.0", 1),
        ("42", "#### 42 dollars", 1),
        ("1234", "so\n#### $1,234", 1),
        (0.5, r"\boxed{\frac{1}{2}}", 1),
        ("42", "It is 42.", 1),
        ("42", "#### 43", 0),
        ("42", "42 is my guess\n#### unknown", 0),
        ("42", "", 0),
        ("42", "I give up.", 0),
        ("42", "#### " + "42 " * 2000, 0),
        ("East", r"\boxed{\text{east}}", 1),
    ],
)
async def test_reward(answer: Json, text: str, reward: float) -> None:
    assert await _reward(answer, text) == reward


@pytest.mark.parametrize("answer", [None, "", True, ["42"], "9" * 1001])
async def test_a_task_without_a_usable_answer_is_refused(answer: Json) -> None:
    with pytest.raises(TaskError, match=r"data\.answer"):
        ENV.check(_task(answer))


async def test_a_setting_says_how_far_an_answer_is_worked_out() -> None:
    for grading, rewards in {"strict": [0, 0], "closed_form": [1, 0], "value": [1, 1]}.items():
        task = _task("10", settings={"grading": grading})
        ENV.check(task)
        actual = [
            (await ENV.score(task, f"#### {text}".encode(), None, Deadline(60.0))).reward
            for text in (r"\binom52", "3 + 7")
        ]
        assert actual == rewards, grading


BOXED, LAST, EARLY = r"So it is \boxed{42}, I think.", "It is 6*7.\n42\n", "#### 42\nThat is it."


@pytest.mark.parametrize(
    ("answer_format", "rewards", "words"),
    [
        ("any", [1, 1, 1], "in the form `#### answer`"),
        ("boxed", [1, 0, 0], r"in \boxed{}"),
        ("last_line", [1, 1, 0], "alone on a last line."),
    ],
)
async def test_a_setting_says_where_the_answer_must_stand(
    answer_format: str, rewards: list[int], words: str
) -> None:
    task = _task("42", settings={"answer_format": answer_format, "tools": []})
    ENV.check(task)
    actual = [
        (await ENV.score(task, text.encode(), None, Deadline(60.0))).reward
        for text in (BOXED, LAST, EARLY)
    ]
    assert actual == rewards
    system, _ = ENV.messages(task)
    assert words in system.content
    assert "python" not in system.content
    assert ENV.sandbox(task, Stage.RUN) is None
    played = await play(ENV, task, Replies(ENV.reference(task).answer))
    assert played.reward == 1


async def test_invalid_calls_are_reported_and_not_run(tmp_path: Path) -> None:
    sandbox = LocalSandbox(tmp_path)
    for call, words in [
        (ToolCall("pyton", {}), "did you mean 'python'"),
        (ToolCall("python", {}), "lacks code"),
        (ToolCall("python", {"code": 1}), "code is int, not string"),
        (ToolCall("python", {"code": "1", "x": 1}), "not 'x'"),
        (ToolCall("", {}, "not JSON"), "not JSON"),
    ]:
        result = await ENV.call(_task("1"), sandbox, call, 60.0)
        assert result.exit_code == 2
        assert words in result.output
    assert sandbox.calls == []


async def test_sandboxes_are_for_run_alone() -> None:
    assert ENV.sandbox(_task("1"), Stage.RUN) is not None
    assert ENV.sandbox(_task("1"), Stage.EVAL) is None


async def test_the_oracle_solves_its_tasks(tmp_path: Path) -> None:
    task = _task("24", solution="48/2 = <<48/2=24>>24 and << 05*1=5>>\n#### 24")
    reference = ENV.reference(task)
    assert reference.calls[0].arguments["code"] == "print(48/2)"
    assert (
        await ENV.call(task, LocalSandbox(tmp_path), reference.calls[0], 10.0)
    ).output == "24.0\n"
    assert (await ENV.score(task, reference.answer.encode(), None, Deadline(10.0))).reward == 1
    assert ENV.reference(_task(7)).calls[0].arguments["code"] == "print('7')"


async def test_all_gsm8k_references_are_right() -> None:
    if not DATA.exists():
        pytest.skip("the GSM8K file is not beside this checkout")
    for task in load_tasks(DATA):
        ENV.check(task)
        reference = ENV.reference(task)
        compile(reference.calls[0].arguments["code"], "call", "exec")
        assert (await ENV.score(task, reference.answer.encode(), None, Deadline(10.0))).reward == 1
