"""Final answers: found, read, compared; the two tables; what hostile texts cost."""

from __future__ import annotations

import json
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.envs.answers import GRADINGS, final_answer, grade, science
from prorl.envs.answers.notation import UnreadableError
from prorl.envs.answers.parse import parse
from prorl.envs.grader import prepare
from tests.envs.math_realistic import misgraded
from tests.envs.math_verify_comparison import ours, written
from tests.growth import Repeated, is_quadratic

TABLES = ("math_table.jsonl", "math_more.jsonl", "math_third.jsonl")
ACCURACY, FALSE_POSITIVES = 0.97, 0.003
SLOWEST_CPU_S = 30.0
"""An answer that its rules do not bound takes hours; a helper has 2.5 s for it."""
_OUTCOMES = {None: "unread", True: "false positive", False: "false negative"}


@pytest.mark.parametrize(
    ("text", "answer", "expected_source"),
    [
        ("#### 42", "42", "####"),
        ("#### 1\nno, #### 2 \n", "2", "####"),
        ("#### Final answer\n5", "5", "####"),
        ("#### Step 1\n3 + 4\n\\boxed{7}", "7", "boxed"),
        (r"so \boxed{\frac{1}{2}} then", r"\frac{1}{2}", "boxed"),
        (r"\boxed{1} \boxed{x_{1}}", "x_{1}", "boxed"),
        (r"\boxed{1} and \boxed{2}", "1, 2", "boxed"),
        (r"\boxed{\boxed{8}}", "8", "boxed"),
        ("x = 2 or x = -5", "x = 2 or x = -5", "last sentence"),
        (r"so \boxed{was left open 3", "3", "last number"),
        ("first 3 then 1,234.5.", "1,234.5", "last number"),
        ("The answer is 12, not 17.", "12, not 17.", "answer is"),
        ("<answer>8</answer>", "8", "answer is"),
        ("It is not 17", "not 17", "last sentence"),
        ("My cat sat down on the mat and slept", "", "none"),
        ("", "", "none"),
        ("The answer is 12. The answer is 13. The answer is 14.", "14.", "answer is"),
        ("The answer is 12; no, the answer is 13", "13", "answer is"),
        (r"<think>so \boxed{14}. Let me check", "", "none"),
        (r"<think>\boxed{1}</think>\boxed{2}<think>\boxed{3}", "2", "boxed"),
        (r"<think>\boxed{1}</think>#### 2", "2", "####"),
    ],
)
def test_final_answer(text: str, answer: str, expected_source: str) -> None:
    assert final_answer(text) == (answer, expected_source)


@pytest.mark.parametrize("name", TABLES)
def test_the_tables_are_graded_rightly(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """At least 97 % right, at most 0.3 % wrong answers taken for right, every reference read."""
    rows = [json.loads(line) for line in (Path(__file__).parent / name).read_text().splitlines()]
    counts: Counter[tuple[str, str]] = Counter()
    wrong, slowest = [], 0.0
    for row in rows:
        began = time.process_time()
        verdict, path = grade(row["reference"], final_answer(row["answer"]).text)
        slowest = max(slowest, time.process_time() - began)
        outcome = "as it should" if verdict is row["right"] else _OUTCOMES[verdict]
        counts[row["kind"], outcome] += 1
        if outcome != "as it should":
            wrong.append(f"{outcome} by {path}: {row}")
    with capsys.disabled():
        print(f"\n{name}: {len(rows)} rows, slowest {slowest * 1000:.1f} ms of CPU")
        for kind_name in sorted({key for key, _ in counts}):
            total = sum(number for (key, _), number in counts.items() if key == kind_name)
            right = counts[kind_name, "as it should"]
            print(
                f"  {kind_name:<12} {right / total:7.1%} of {total:3},"
                f" false positives {counts[kind_name, 'false positive']}"
            )
    outcomes = Counter({outcome: 0 for _, outcome in counts})
    for (_, outcome), number in counts.items():
        outcomes[outcome] += number
    assert outcomes["as it should"] >= ACCURACY * len(rows), wrong
    assert outcomes["false positive"] <= FALSE_POSITIVES * len(rows), wrong
    assert not outcomes["unread"], wrong
    assert slowest < SLOWEST_CPU_S


def test_answers_as_policies_write_them_are_graded_rightly() -> None:
    """At least 97 % of 1,000 rows are graded rightly, and at most one wrong answer is paid."""
    wrong = misgraded(1, 1000)
    assert len(wrong) <= 1000 * (1 - ACCURACY), wrong
    assert sum(not row.right for row, _ in wrong) <= 1, wrong


def test_answers_that_were_written_before_the_rules_were_read() -> None:
    """At least 97 % of the right whole replies are paid, and at most 1 % of the wrong ones."""
    rows = list(written())
    wrong = [row for row in rows if ours(row) is not row.right]
    missed = [row for row in wrong if row.right]
    assert len(missed) <= (1 - ACCURACY) * sum(row.right for row in rows), missed
    paid = [row for row in wrong if not row.right]
    assert len(paid) <= 0.01 * sum(not row.right for row in rows), paid


@pytest.mark.parametrize(
    ("reference", "answer", "question", "gradings"),
    [
        ("5", "10/2", "", "closed_form value"),
        ("1024", "2^{10}", "", "closed_form value"),
        ("10", "\\binom52", "", "closed_form value"),
        ("2", "\\sqrt4", "", "closed_form value"),
        ("\\frac78", "\\frac{\\frac72}4", "", "closed_form value"),
        ("1", "0.\\overline 9", "", "closed_form value"),
        ("1.5", "150\\%", "", "closed_form value"),
        ("120", "5!", "", "closed_form value"),
        ("7", "3 + 4", "", "value"),
        ("6", "2 \\cdot 3", "", "value"),
        ("10", "\\binom{5}{2}", "Evaluate $\\binom{5}{2}$.", "value"),
        ("10", "\\binom52", "Evaluate $\\dbinom{5}{2}$.", "value"),
        ("10", "20/2", "What is 5 choose 2?", "value"),
        ("12", "144^{1/2}", "What is the square root of 144?", "value"),
        ("343", "7^{3}", "Compute 7^3.", "value"),
        ("3", "12/4", "A tap fills 12 liters in 4 minutes. How many a minute?", "value"),
        ("7", "\\sqrt{49}", "What is 3 + 4?", "value"),
        ("3.5", "7/2", "What is half of seven?", "strict closed_form value"),
        ("2.5", "2\\frac12", "How many are there?", "strict closed_form value"),
        ("5", "x^0 \\cdot 5", "", "value"),
        ("18", "1800\\%", "", ""),
        ("5", "10/3", "", ""),
        ("5", "5!", "", ""),
    ],
)
def test_how_far_an_answer_is_worked_out(
    reference: str, answer: str, question: str, gradings: str
) -> None:
    accepting = [name for name in GRADINGS if grade(reference, answer, question, name)[0]]
    assert accepting == gradings.split()


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("n\\equiv 4\\pmod 7", "n \\equiv 4 \\pmod{7}", True),
        ("n\\equiv 4\\pmod 7", "n \\equiv 11 \\ (\\text{mod } 7)", True),
        ("n\\equiv 4\\pmod 7", "n ≡ 4 (mod 7)", True),
        ("n\\equiv 4\\pmod 7", "4 \\pmod 7", True),
        ("n \\equiv a \\pmod{p}", "n \\equiv a\\pmod p", True),
        ("x \\equiv 4 \\pmod{7}", "x \\equiv 4 \\pmod{9}", False),
        ("x \\equiv 4 \\pmod{7}", "x \\equiv 5 \\pmod{7}", False),
        ("x \\equiv 4 \\pmod{7}", "y \\equiv 4 \\pmod{7}", False),
        ("x \\equiv 4 \\pmod{7}", "x = 4", False),
        ("x \\equiv 4 \\pmod{7}", "x \\equiv 4 \\pmod{7}, x \\equiv 5 \\pmod{7}", False),
        ("x \\equiv 1 \\pmod 4 \\text{ or } x \\equiv 3 \\pmod 5", "x \\equiv 1 \\pmod 4", False),
        ("x \\equiv \\pm 1 \\pmod 8", "x \\equiv 1 \\pmod 8", False),
        ("x \\equiv 4 \\pmod{0}", "x \\equiv 5 \\pmod{0}", False),
    ],
)
def test_congruences(reference: str, answer: str, right: bool) -> None:
    assert grade(reference, answer)[0] is right


def test_a_bare_answer_is_read_whole() -> None:
    """Each reference of the tables as a reply without a mark: alone, and on the last line."""
    ask = prepare("rules")
    lines = (
        line for name in TABLES for line in (Path(__file__).parent / name).read_text().splitlines()
    )
    references = {json.loads(line)["reference"] for line in lines}
    readable = [reference for reference in sorted(references) if grade(reference, reference)[0]]
    assert len(readable) > 100
    for reference in readable:
        for answer in (reference, f"{reference}.", f"${reference}$", f"So I find:\n\n{reference}"):
            verdict, *_ = ask(("math", reference, answer, ""))
            assert verdict is True, answer


@pytest.mark.parametrize(
    ("reference", "text", "right"),
    [
        ("(-2,2)", "So x lies in (-2, 2).", True),
        ("2", "So x lies in (-2, 2).", False),
        ("2", "(1, 2)", False),
        ("24", "12, 24", False),
        ("24", "24 or 25", False),
        ("2x+1", "2 x + 1", True),
        ("1, 2", "2 and 1", True),
        ("24", "There are 24 (12 each).", False),
        ("24", "24 m", True),
    ],
)
def test_the_last_number_of_an_unfinished_answer_is_no_answer(
    reference: str, text: str, right: bool
) -> None:
    assert grade(reference, final_answer(text).text)[0] is right


@pytest.mark.parametrize(
    "reference",
    [
        "\\int_0^1 f(x)\\,dx",
        "\\sum_{k=1}^n k",
        "\\begin{cases} 1 \\\\ 2 \\end{cases}",
        "{",
        "2^{9^9}",
    ],
)
def test_a_reference_that_cannot_be_read_is_no_verdict(reference: str) -> None:
    assert grade(reference, "2")[0] is None
    assert grade(reference, reference) == (True, "text")


@pytest.mark.parametrize(
    ("reference", "answer"),
    [("5'", '5"'), ("5'", "5"), ("\\text{Co}", "CO"), ("\\sum_{k=1}^n k", "\\sum_{k=1}^n K")],
)
def test_capitals_and_primes_count_where_a_reference_cannot_be_read(
    reference: str, answer: str
) -> None:
    assert grade(reference, answer)[0] is False
    assert grade(reference, reference)[0] is True


def test_brackets_too_deep_are_not_read() -> None:
    assert parse("(" * 9 + "1" + ")" * 9)
    with pytest.raises(UnreadableError, match="too deep"):
        parse("(" * 60 + "1" + ")" * 60)


def test_only_the_last_boxes_are_a_list() -> None:
    answer = final_answer(", ".join(f"\\boxed{{{number}}}" for number in range(1000))).text
    assert answer == ", ".join(map(str, range(980, 1000)))


@pytest.mark.parametrize(
    ("reference", "answer", "right"),
    [
        ("90^\\circ", "\\frac{\\pi}{2}", True),
        ("90^\\circ", "\\frac{\\pi}{3}", False),
        ("\\frac{\\pi}{6}", "30^\\circ", True),
        ("\\frac{\\pi}{6}", "60^\\circ", False),
        ("30", "30^\\circ", True),
        ("243_5", "243_{\\text{five}}", True),
        ("243_5", "243_{\\text{six}}", False),
    ],
)
def test_angles_and_bases(reference: str, answer: str, right: bool) -> None:
    assert grade(reference, answer)[0] is right


@pytest.mark.parametrize(
    "reference",
    [
        "\\sqrt{2}",
        "\\pi",
        "x^2",
        "[0, \\pi]",
        "\\{1, \\sqrt{2}\\}",
        "30^\\circ",
        "x = \\pi",
        "5 km",
        "1:\\pi",
    ],
)
@pytest.mark.parametrize(
    "answer",
    [
        "10^{400}",
        "-10^{400}",
        "(10^{400}, 2)",
        "[0, 10^{400}]",
        "\\{10^{400}, 1\\}",
        "x = 10^{400}",
        "x < 10^{400}",
        "\\max(10^{400}, \\pi)",
        "\\lfloor 10^{400} \\cdot \\pi \\rfloor",
        "\\lfloor e^{e^{e^{9}}} \\rfloor",
        "\\lfloor \\infty \\rfloor",
        "|10^{400} + i|",
        "\\sin(10^{400})",
        "\\cos(10^{400} i)",
        "\\sqrt[3]{-10^{401}}",
        "10^{400}:1",
        "10^{400} km",
        "10^{400}^\\circ",
        "\\frac{x}{x - x}",
        "\\log_{1} 2",
        "10^{400}\\%",
    ],
)
def test_no_answer_makes_the_rules_fail(reference: str, answer: str) -> None:
    """Exact values that are no doubles, and divisions by 0, are wrong answers."""
    assert grade(reference, answer)[0] is False


@given(st.integers(-(10**12), 10**12))
def test_numbers_are_read_with_and_without_separators(value: int) -> None:
    assert grade(str(value), f"{value:,}")[0]
    assert grade(f"{value:,}", f"{value} dollars")[0]
    assert not grade(str(value), str(value + 1))[0]


@given(st.fractions(max_denominator=10**6))
def test_fractions_are_equal_in_all_their_spellings(value: Fraction) -> None:
    spelled = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    for answer in (str(value), rf"\dfrac{{{2 * value.numerator}}}{{{2 * value.denominator}}}"):
        assert grade(spelled, answer)[0]
    assert not grade(spelled, str(value + Fraction(1, 7)))[0]


@given(st.text(alphabet="0123456789xyz+-*/^()[]{}|,.!=<>\\ #%$_fracsqtboxedtextinpm", max_size=200))
def test_any_text_has_a_verdict_and_costs_little(text: str) -> None:
    began = time.process_time()
    for reference in ("5", "x^2+1", "\\{1,2\\}", "[2,5)", "B", text or "1"):
        grade(reference, final_answer(text).text)
    try:
        parse(text)
    except UnreadableError:
        pass
    assert time.process_time() - began < SLOWEST_CPU_S


@pytest.mark.parametrize(
    "text",
    [
        "(" * 1000,
        "[" * 400 + "1" + "]" * 400,
        "-" * 1000 + "1",
        "{" * 1000,
        "\\frac{1}{" * 80 + "2" + "}" * 80,
        "\\sqrt{" * 150 + "2" + "}" * 150,
        "9" * 1000,
        "9" * 300 + "^" + "9" * 300,
        "((2^{9999})^{9999})",
        "*".join(["2^{9000}"] * 90),
        "+".join(["\\frac{1}{" + str(10**20 + n) + "}" for n in range(30)]),
        "2499!" + "*2499!" * 90,
        "\\binom{2400}{1200}^{7}",
        "x^{9999}" + "+x^{9999}" * 80,
        "(x+1)" + "(x+1)" * 150,
        "\\pm 1" * 150,
        "1" + "\\pm 1" * 30,
        "1e5000" + "*1e5000" * 100,
        ",".join(["1"] * 180),
        "1 and " * 150 + "1",
        "=".join(["x"] * 180),
        "1 " * 480,
        "0." + "142857" * 100 + "...",
        "one hundred " * 80,
        "| " * 450,
        "⦃" * 500,
        "a" * 1000,
        "$" * 999,
        "\\text{" * 150,
        "x<" * 190 + "1",
    ],
)
def test_hostile_answers_cost_little(text: str) -> None:
    for reference in ("7", "x^2", "\\{1, 2\\}", "(2,5]", "y=x", "25\\%", "5 km", text):
        began = time.process_time()
        verdict = grade(reference, text)[0]
        assert time.process_time() - began < SLOWEST_CPU_S
        assert reference == text or not verdict or text.startswith("1 ")


@pytest.mark.parametrize(
    "unit",
    [
        "\\boxed{",
        "#### Answer\n",
        "#### a ",
        "<answer>",
        "the answer is ",
        "= 3 ",
        "$1$ ",
        ", not ",
        "7. ",
    ],
)
def test_long_texts_are_searched_in_linear_time(unit: str) -> None:
    assert not is_quadratic(final_answer, Repeated("", unit).of, 64 << 10)


TOKENS = (
    " ", "\t", "\n", "a", "A", "5", "-", "+", "*", "_", "$", "#", "(", ")", "[", "{", "}", "|",
    ",", ".", ";", ":", "=", "<", "!", "'", "\"", "%", "°", "≈", "/", "\\", "^", "&", "~", "`",
    "é", "½", "²", "∞", "yes ", "or ", "and ", "about ", "is ", "the ", "not ", "x = ", "1,",
    "1, ", "1/", "1 ", "1.", "2^", "\\frac", "\\text{", "\\text{a}", "\\boxed{", "\\sqrt",
    "\\pi ", "\\pm ", "\\approx ", "\\,", "\\\\", "$1$ ", "(1,", "one ", "hundred ", "hours ",
    "A, ", "\\left(", "\\cdot ", "####", "answer is ", "≤", "∪", "**", "}{", "1e9", "km/",
    "\\circ", "\\begin{", "0.", "...", "| ", "x", "ab ",
)  # fmt: skip


_AIMED = [
    json.loads(line)
    for line in (Path(__file__).parent / "math_aimed.jsonl").read_text().splitlines()
]
"""Answers that were aimed at the rules after reading them, and right ones that look like them. A
new leniency of the rules needs a row here that it still refuses. `closed` are closed forms of
numbers: right by `closed_form`, wrong by `strict`.
"""


def _graded(
    row: dict[str, Any], answers: str, verdict: bool, grading: str = "closed_form"
) -> list[str]:
    """Returns the answers of a row that are graded so."""
    return [
        answer
        for answer in row.get(answers, ())
        if grade(row["reference"], final_answer(f"#### {answer}").text, row["question"], grading)[0]
        is verdict
    ]


@pytest.mark.parametrize("row", _AIMED, ids=lambda row: row["reference"][:40])
def test_answers_that_were_aimed_at_the_rules_are_graded_rightly(row: dict[str, Any]) -> None:
    assert _graded(row, "answers", True) == []
    assert _graded(row, "right", False) == []
    assert _graded(row, "closed", False) == []
    assert _graded(row, "closed", True, "strict") == []


_WHOLE = [
    json.loads(line)
    for line in (Path(__file__).parent / "answers_whole.jsonl").read_text().splitlines()
]


@pytest.mark.parametrize("row", _WHOLE, ids=lambda row: row["question"][:40])
def test_endings_as_policies_write_them(row: dict[str, Any]) -> None:
    """Boxed, behind `####`, or said in the last sentence."""
    data, question = row["data"], row["question"]
    for text in (*row["right"], *row.get("wrong", ())):
        if row["env"] == "stem":
            verdict, *_ = science.grade(data, question, text)
        else:
            verdict = prepare("rules")(("math", data["answer"], text, question))[0]
        assert verdict is (text in row["right"]), text


def _read(text: str) -> None:
    """Grades a text's end, and finds the answer in a text 30 times as long."""
    for reference in ("5", "(1,2)"):
        grade(reference, text[:1000], "How many apples does he have left?")
    final_answer(text * 30)


@pytest.mark.parametrize(
    "prefix",
    [
        "5",
        *(
            pytest.param(prefix, marks=pytest.mark.slow)
            for prefix in ("", "A", "x = 5 ", "\\boxed{", "The answer is 5")
        ),
    ],
)
def test_every_pattern_is_linear(prefix: str) -> None:
    """`prefix + token * k + suffix` costs about twice as much at 2k, whatever the token."""
    for token in TOKENS:
        for suffix in ("", "about", "≈", "$"):
            text = Repeated(prefix, token, suffix)
            assert not is_quadratic(_read, text.of, 480), text
