"""Science questions: what is right, however it is written, and what only looks so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from prorl.envs.answers import science
from prorl.envs.stem import StemEnv
from prorl.errors import TaskError
from prorl.testing import Replies, make_task, play
from prorl.types import Json, Task

ENV = StemEnv()


def _grade(task: Task, final: str) -> tuple[bool, str]:
    ENV.check(task)
    data = {**task.data, "answer": ENV.reference(task).answer.removeprefix("#### ")}
    right, *reasons = science.grade(data, task.prompt, final)
    return right, " ".join(reasons)


CHOICES = ["oxygen", "nitrogen", "the argon", "A and B"]


def _choice(answer: Json = "B") -> Task:
    return make_task("stem", "Most of air is", choices=CHOICES, answer=answer)


def _short(answer: Json, **data: Json) -> Task:
    return make_task("stem", "How much?", answer=answer, **data)


@pytest.mark.parametrize(
    ("final", "right"),
    [
        ("#### B", True),
        ("so it is nitrogen.\n#### b)", True),
        ("\\boxed{\\text{B}}", True),
        ("The answer is (B).", True),
        ("**Answer: B) Nitrogen**", True),
        ("#### nitrogen", True),
        ("A is wrong.\nB", True),
        ("The most common gas in air is nitrogen.", True),
        ("The wrong one is nitrogen.", False),
        ("It is not nitrogen.", False),
        ("#### A", False),
        ("#### A or B", False),
        ("#### B and C", False),
        ("#### A, B", False),
        ("#### B) oxygen", False),
        ("#### Bromine", False),
        ("#### E", False),
        ("#### not B", False),
        ("#### ", False),
        ("", False),
        ("Both are fine", False),
    ],
)
def test_choices(final: str, right: bool) -> None:
    verdict, reason = _grade(_choice(), final)
    assert verdict is right, reason


@pytest.mark.parametrize(
    ("final", "right"), [("20 newtons", True), ("B) 20 newtons", True), ("20 kg", False)]
)
def test_a_choice_that_is_a_quantity_may_be_answered_in_other_units(
    final: str, right: bool
) -> None:
    task = make_task("stem", "Which force?", choices=["10 N", "20 N", "20 kN", "2 N"], answer="B")
    assert _grade(task, f"#### {final}")[0] is right


@pytest.mark.parametrize("answer", ["B", 1, "nitrogen"])
def test_the_reference_may_be_letter_index_or_text(answer: Json) -> None:
    assert _grade(_choice(answer), "#### B")[0]
    assert "A) oxygen\nB) nitrogen" in ENV.messages(_choice(answer))[1].content


def _table(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parent / name).read_text().splitlines()]


@pytest.mark.parametrize("row", _table("stem_table.jsonl"), ids=lambda row: row["answer"])
def test_short_answers(row: dict[str, Any]) -> None:
    verdict, reason = _grade(_short(row["reference"]), f"#### {row['answer']}")
    assert verdict is row["right"], reason


@pytest.mark.parametrize("row", _table("stem_aimed.jsonl"), ids=lambda row: row["question"][:40])
def test_answers_that_were_aimed_at_the_rules_are_wrong(row: dict[str, Any]) -> None:
    answers = row["answers"]
    texts = [form.format(answer) for answer in answers for form in ("#### {}", "{}", "It is {}.")]
    graded = [science.grade(row["data"], row["question"], answer)[0] for answer in texts]
    assert not any(graded), answers


def test_tolerance_and_aliases_are_the_tasks() -> None:
    assert _grade(_short("9.81 m/s^2", tolerance=0.05), "#### 10 m/s^2")[0]
    assert not _grade(_short("9.81 m/s^2", tolerance=0), "#### 9.82 m/s^2")[0]
    assert _grade(_short(1905, tolerance=0.01), "#### 1915")[0]
    assert _grade(_short("water", aliases=["H2O"]), "#### H2O")[0]


async def test_the_oracle_is_right() -> None:
    for task in (_choice(), _choice("the argon"), _short("3 m"), _short("water")):
        reference = ENV.reference(task)
        oracle = Replies(*reference.calls, reference.answer)
        assert (await play(ENV, task, oracle)).reward == 1
        assert (await play(ENV, task, Replies("I do not know."))).reward == 0


@pytest.mark.parametrize(
    ("data", "says"),
    [
        ({"answer": None}, "data.answer is None"),
        ({"answer": "E", "choices": CHOICES}, "one of A, B, C, D, an index"),
        ({"answer": 4, "choices": CHOICES}, "data.answer is 4"),
        ({"answer": "A", "choices": ["one"]}, "1 choices; expected 2 to 26"),
        ({"answer": "A", "choices": "AB"}, "data.choices is 'AB'"),
        ({"answer": "1", "tolerance": 2}, "data.tolerance"),
    ],
)
def test_bad_tasks_are_refused(data: dict[str, Json], says: str) -> None:
    with pytest.raises(TaskError, match=says):
        ENV.check(make_task("stem", "q", **data))
