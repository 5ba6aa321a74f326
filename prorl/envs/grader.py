"""The program in which answers are read and compared; `grading.py` asks it.

Of programs with cases a text is right when its lines are equal but for space at their ends, or word
by word, numbers with a decimal point within 1e-6. A value is right when it is equal as Python
compares (`2.0` is 2, True is 1; as LiveCodeBench does), tuples being lists, and decimals within
1e-6.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from prorl.envs.answers import MARKED, MAX_ANSWER_CHARS, final_answer, grade, science
from prorl.envs.answers.find import in_format
from prorl.helper.child import Answer, serve

TOLERANCE = 1e-6


def prepare(kind: str) -> Answer:
    """`rules` answers (name of a grader, arguments), `math-verify` (reference, answer)."""
    if kind == "math-verify":
        _equal("1", "1")
        return lambda question: _equal(*question)
    graders: Mapping[str, Callable[..., object]] = {
        "math": _math,
        "science": _science,
        "case": same_output,
    }
    return lambda question: graders[question[0]](*question[1:])


def _math(
    reference: str,
    text: str,
    question: str,
    grading: str = "closed_form",
    answer_format: str = "any",
) -> tuple[bool | None, str, str, str]:
    """Returns (verdict, the rule that decided, the answer that was found, how)."""
    text = in_format(text, answer_format)
    answer = final_answer(text)
    if answer.method not in MARKED:
        *_, last = ("", *filter(str.strip, text.splitlines()))
        if len(last) <= MAX_ANSWER_CHARS and _spoken(last) == _spoken(reference):
            return True, "text", last.strip(), "last line"
    return *grade(reference, answer.text, question, grading), *answer


def _science(
    data: Mapping[str, Any], question: str, text: str, answer_format: str = "any"
) -> tuple[bool, str, str, str]:
    """Grades an answer of science; the result is that of `_math`."""
    return science.grade(data, question, in_format(text, answer_format))


def _spoken(text: str) -> str:
    return " ".join(text.strip().rstrip(".").strip("$* ").split())


def _equal(reference: str, answer: str) -> bool:
    """Returns whether math-verify takes them for equal. Raises ValueError for a bad reference."""
    from math_verify import parse, verify

    # its own limits count by the clock and turn a time-out into "wrong"
    expected = parse(f"${reference}$", parsing_timeout=0, raise_on_error=True)
    if not expected:
        raise ValueError(f"the reference answer {reference!r} does not parse")
    actual = parse(f"${answer}$", parsing_timeout=0)
    return bool(verify(expected, actual, timeout_seconds=0, raise_on_error=True))


def same_output(output: str, expected: Any, is_value: bool) -> str:
    """Returns why an output is wrong; empty when it is right. A value comes as JSON."""
    if not is_value:
        return "" if same_text(output, expected) else _differs(output, expected)
    try:
        value = json.loads(output)["value"]
        return "" if same_value(value, expected) else _differs(output, expected)
    except (ValueError, LookupError, TypeError, RecursionError):
        return "gave no value that is JSON"


def _differs(output: str, expected: Any) -> str:
    return f"gave {output[:200]!r}, expected {str(expected)[:200]!r}"


def same_text(output: str, expected: str) -> bool:
    lines = [[line.rstrip() for line in text.rstrip().split("\n")] for text in (output, expected)]
    if lines[0] == lines[1]:
        return True
    words, expected_words = output.split(), expected.split()
    return len(words) == len(expected_words) and all(map(_same_word, words, expected_words))


def _same_word(word: str, expected: str) -> bool:
    """Returns whether both are equal, or numbers in ASCII of which the expected one has a decimal
    point or exponent.
    """
    if word == expected:
        return True
    if not any(char in expected for char in ".eE") or not word.isascii() or "_" in word:
        return False
    try:
        return _same_number(float(word), float(expected))
    except ValueError:
        return False


def _same_number(value: float, expected: float) -> bool:
    """Returns whether both agree within TOLERANCE: relative, for smaller numbers absolute."""
    near = TOLERANCE if not expected or abs(expected) >= TOLERANCE else 0.0
    return math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=near)


def same_value(value: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(value, int | float):
        return _same_number(value, expected)
    if isinstance(value, list) and isinstance(expected, list):
        return len(value) == len(expected) and all(map(same_value, value, expected))
    if isinstance(value, dict) and isinstance(expected, dict):
        return value.keys() == expected.keys() and all(
            same_value(value[key], expected[key]) for key in expected
        )
    return bool(value == expected)


if __name__ == "__main__":
    serve(prepare)
