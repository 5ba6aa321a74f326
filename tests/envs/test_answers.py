"""Final answers: found, read as numbers, compared."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.envs.answers import final_answer, last_number, normalise, number


@pytest.mark.parametrize(
    ("text", "answer", "found"),
    [
        ("#### 42", "42", "####"),
        ("#### 1\nno, #### 2 \n", "2", "####"),
        ("####\n5", "5", "last number"),
        (r"so \boxed{\frac{1}{2}} then", r"\frac{1}{2}", "boxed"),
        (r"\boxed{1} \boxed{x_{1}}", "x_{1}", "boxed"),
        (r"\boxed{never closed 3", "3", "last number"),
        ("first 3 then 1,234.5.", "1234.5", "last number"),
        ("I do not know", "", "none"),
        ("", "", "none"),
    ],
)
def test_final_answer(text: str, answer: str, found: str) -> None:
    got = final_answer(text)
    assert got.found == found
    assert got.text.rstrip(".") == answer


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("$1,234", Fraction(1234)),
        ("-0.5", Fraction(-1, 2)),
        (r"\dfrac{3}{4}", Fraction(3, 4)),
        ("+7.", Fraction(7)),
        ("1/0", None),
        ("12%", None),
        ("seven", None),
        ("1 2", Fraction(12)),
        ("9" * 900, Fraction(int("9" * 900))),
    ],
)
def test_number(text: str, value: Fraction | None) -> None:
    assert number(text) == value


@given(st.integers(-(10**12), 10**12))
def test_numbers_are_read_with_and_without_separators(value: int) -> None:
    assert number(str(value)) == number(f"{value:,}") == last_number(f"{value:,} dollars") == value


@given(st.text(max_size=300))
def test_any_text_is_judged_quickly(text: str) -> None:
    began = time.perf_counter()
    answer = final_answer(text).text
    number(answer), last_number(answer), normalise(answer)
    assert time.perf_counter() - began < 1.0
