"""Science questions: what is right, however it is written, and what only looks so."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from prorl.envs.answers import science
from prorl.envs.stem import StemEnv
from prorl.errors import TaskError
from prorl.testing import make_task, run
from prorl.types import Json, Task

ENV = StemEnv()


def _judge(task: Task, final: str) -> tuple[bool, str]:
    ENV.check(task)
    data = {**task.data, "answer": ENV.reference(task).answer.removeprefix("#### ")}
    right, *said = science.judge(data, task.prompt, final)
    return right, " ".join(said)


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
    verdict, said = _judge(_choice(), final)
    assert verdict is right, said


@pytest.mark.parametrize(
    ("final", "right"), [("20 newtons", True), ("B) 20 newtons", True), ("20 kg", False)]
)
def test_a_choice_that_is_a_quantity_may_be_said_in_other_units(final: str, right: bool) -> None:
    task = make_task("stem", "Which force?", choices=["10 N", "20 N", "20 kN", "2 N"], answer="B")
    assert _judge(task, f"#### {final}")[0] is right


@pytest.mark.parametrize("answer", ["B", 1, "nitrogen"])
def test_the_reference_may_be_letter_index_or_text(answer: Json) -> None:
    assert _judge(_choice(answer), "#### B")[0]
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
        ("3.0e8 m/s", "3 x 108 m/s", False),
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
        ("vitamin A", "Vitamin a", False),
        ("vitamin A", "Vitamin A", True),
        ("type A blood", "type blood", False),
        ("the cell wall", "a cell wall", True),
        ("oxygen", "oxygen or nitrogen", False),
        ("?", "!", False),
        ("25 °C", "25 K", False),
        ("25 °C", "298.15 K", True),
        ("20 °C", "20 degrees Celsius", True),
        ("1905", "1915", False),
        ("118", "119", False),
        ("206", "205", False),
        ("2024", "2010", False),
        ("5 Mg", "5 mg", False),
        ("1.5 mm", "1.5 Mm", False),
        ("1 M", "1 m", False),
        ("5 nm", "5 Nm", False),
        ("10 mC", "10 MC", False),
        ("2 pF", "2 PF", False),
        ("5 Pa", "5 pA", False),
        ("Co", "CO", False),
        ("No", "NO", False),
        ("HF", "Hf", False),
        ("AaBb", "aabb", False),
        ("X^A X^a", "X^a X^a", False),
        ("Mg", "mg", False),
        ("H2O", "H₂O", True),
        ("H2O", "$\\mathrm{H_2O}$", True),
        ("Ca^{2+}", "Ca²⁺", True),
        ("8 Ω", "8 ohms", True),
        ("1 kWh", "3.6 MJ", True),
        ("20 dB", "20", True),
        ("pH 7.4", "7.4", True),
        ("7.0", "pH 7.0", True),
        ("3 MW", "3 mW", False),
        ("12 %", "0.12", True),
        ("12 %", "0.012", False),
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
        ("3.2e-19 J", "2.0 eV", True),
        ("3.2e-19 J", "2.0 keV", False),
        ("0 °C", "32 °F", True),
        ("0 °C", "32.1 °F", False),
        ("100 °C", "100 C", True),
        ("100 °C", "100 F", False),
        ("100 C", "100 °C", False),
        ("H2SO4", "$\\mathrm{H_2SO_4}$", True),
        ("H2SO4", "H_2SO_3", False),
        ("SO4^2-", "$SO_4^{2-}$", True),
        ("500 nm", "5000 \u212b", True),
        ("50 Hz", "50 1/s", True),
        ("50 Hz", "50 s", False),
        ("pH 3.5", "The pH is 3.5", True),
    ],
)
def test_short_answers(wanted: str, final: str, right: bool) -> None:
    verdict, said = _judge(_short(wanted), f"#### {final}")
    assert verdict is right, said


_AIMED = [
    json.loads(line)
    for line in (Path(__file__).parent / "stem_aimed.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize(
    ("question", "data", "answers"),
    [(row["question"], row["data"], row["answers"]) for row in _AIMED],
)
def test_answers_that_were_aimed_at_the_rules_are_wrong(
    question: str, data: dict[str, Json], answers: list[str]
) -> None:
    assert not [one for one in answers if science.judge(data, question, f"#### {one}")[0]]


def test_tolerance_and_aliases_are_the_tasks() -> None:
    assert _judge(_short("9.81 m/s^2", tolerance=0.05), "#### 10 m/s^2")[0]
    assert not _judge(_short("9.81 m/s^2", tolerance=0), "#### 9.82 m/s^2")[0]
    assert _judge(_short(1905, tolerance=0.01), "#### 1915")[0]
    assert _judge(_short("water", aliases=["H2O"]), "#### H2O")[0]


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
