"""Science questions: what is right, however it is written, and what only looks so."""

from __future__ import annotations

import pytest

from prorl.envs.stem import StemEnv
from prorl.errors import TaskError
from prorl.testing import make_task, run
from prorl.types import Json, Task

ENV = StemEnv()
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
    played = run(ENV, _choice(), final)
    assert (played.reward == 1) is right, played.score.log


@pytest.mark.parametrize("answer", ["B", 1, "nitrogen"])
def test_the_reference_may_be_letter_index_or_text(answer: Json) -> None:
    assert run(ENV, _choice(answer), "#### B").reward == 1
    assert "A) oxygen\nB) nitrogen" in ENV.messages(_choice(answer))[1].content


@pytest.mark.parametrize(
    ("wanted", "final", "right"),
    [
        ("3.0e8 m/s", "3 x 10^8 m/s", True),
        ("3.0e8 m/s", "$3.00 \\times 10^{8}\\ \\mathrm{m\\,s^{-1}}$", True),
        ("3.0e8 m/s", "3×10⁸ m s⁻¹", True),
        ("3.0e8 m/s", "300,000 km/s", True),
        ("3.0e8 m/s", "3e8", True),
        ("3.0e8 m/s", "3e8 m", False),
        ("3.0e8 m/s", "3e8 km/s", False),
        ("500 m", "0.5 km", True),
        ("500 m", "505 m", True),
        ("500 m", "506 m", False),
        ("500 m", "-500 m", False),
        ("8.314 J/(mol K)", "8.31 J mol^-1 K^-1", True),
        ("2 N m", "2 J", True),
        ("1 g/cm^3", "1000 kg/m3", True),
        ("25 °C", "25 degC", True),
        ("p < 0.05", "p > 0.05", False),
        ("p < 0.05", "P < 0.05.", True),
        ("C#", "C", False),
        ("C#", "**C#**", True),
        ("a*b", "a/b", False),
        ("a*b", "a*b", True),
        ("vitamin A", "vitamin", False),
        ("vitamin A", "Vitamin a", True),
        ("type A blood", "type blood", False),
        ("the cell wall", "a cell wall", True),
        ("oxygen", "oxygen or nitrogen", False),
        ("?", "!", False),
        ("25 °C", "25 K", False),
        ("12 %", "0.12", False),
        ("12 %", "12", True),
        ("12 %", "12\\%", True),
        ("5 kΩ", "5000 ohm", True),
        ("0.25", "1/4", True),
        ("42", "42 apples", False),
        ("42", "not 42", False),
        ("42", "41 or 42", False),
        ("42", "v = 42", True),
        ("1,234", "1234", True),
        ("0", "0.001", False),
        ("3", "3 3", False),
        ("mitochondrion", "The mitochondrion.", True),
        ("mitochondrion", "ribosome", False),
        ("H2O", "h2o", True),
    ],
)
def test_short_answers(wanted: str, final: str, right: bool) -> None:
    played = run(ENV, _short(wanted), f"#### {final}")
    assert (played.reward == 1) is right, played.score.log


def test_tolerance_and_aliases_are_the_tasks() -> None:
    assert run(ENV, _short("9.81 m/s^2", tolerance=0.05), "#### 10 m/s^2").reward == 1
    assert run(ENV, _short("9.81 m/s^2", tolerance=0), "#### 9.82 m/s^2").reward == 0
    assert run(ENV, _short("water", aliases=["H2O"]), "#### H2O").reward == 1


def test_the_oracle_is_right() -> None:
    for task in (_choice(), _choice("the argon"), _short("3 m"), _short("water")):
        reference = ENV.reference(task)
        assert run(ENV, task, *reference.calls, reference.answer).reward == 1
        assert run(ENV, task, "I do not know.").reward == 0


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
