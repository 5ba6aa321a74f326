"""The mistakes that a scripted conversation makes, at stated rates, and how each is made."""

from __future__ import annotations

import random
import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Mistakes:
    """Chances of one mistake each, independent of each other."""

    guess: float
    """Answer without `python`."""
    invent_price: float
    """Per item: no look-up, any price."""
    wrong_expression: float
    wrong_hard_expression: float
    """In the forms where the naive reading is wrong; always the naive one, so that even the
    likeliest answer starts wrong there.
    """
    wrong_digit: float
    """One digit of one operand."""
    syntax: float
    give_up: float
    """After a syntax error; else it tries again."""
    wrong_result: float
    """One digit of the tool's result."""


MEDIOCRE = {
    "arith": Mistakes(
        guess=0.4,
        invent_price=0.0,
        wrong_expression=0.2,
        wrong_hard_expression=0.5,
        wrong_digit=0.04,
        syntax=0.07,
        give_up=0.6,
        wrong_result=0.13,
    ),
    "shop": Mistakes(
        guess=0.25,
        invent_price=0.2,
        wrong_expression=0.15,
        wrong_hard_expression=0.0,
        wrong_digit=0.04,
        syntax=0.05,
        give_up=0.6,
        wrong_result=0.09,
    ),
}


def guess_near(result: str, rng: random.Random) -> str:
    """A number about as long as the right one."""
    length = len(result) if result.isdigit() else 2
    return str(rng.randint(10 ** (length - 1), 10**length - 1))


def spoil(expression: str, hard: bool, rng: random.Random, mistakes: Mistakes) -> str:
    """The expression with the mistakes that are drawn for it; right where none is."""
    if hard and rng.random() < mistakes.wrong_hard_expression:
        expression = _naive(expression)
    elif not hard and rng.random() < mistakes.wrong_expression:
        expression = rng.choice((_swap, _other_operator))(expression, rng)
    if rng.random() < mistakes.wrong_digit:
        expression = wrong_digit(expression, rng)
    return expression


def _naive(expression: str) -> str:
    """Without parentheses; without any, the difference the wrong way round.

    >>> _naive("(3+4)*2"), _naive("7-5"), _naive("6*8-40")
    ('3+4*2', '5-7', '40-6*8')
    """
    if "(" in expression:
        return expression.replace("(", "").replace(")", "")
    first, _, second = expression.partition("-")
    return f"{second}-{first}"


def _swap(expression: str, rng: random.Random) -> str:
    """Exchange two numbers of a text."""
    numbers = list(re.finditer(r"\d+", expression))
    first, second = sorted(rng.sample(numbers, 2), key=re.Match.start)
    between = expression[first.end() : second.start()]
    return expression[: first.start()] + second[0] + between + first[0] + expression[second.end() :]


def _other_operator(expression: str, rng: random.Random) -> str:
    operator = rng.choice(list(re.finditer(r"//|[+\-*%]", expression)))
    other = rng.choice([sign for sign in "+-*" if sign != operator[0]])
    return expression[: operator.start()] + other + expression[operator.end() :]


def wrong_digit(text: str, rng: random.Random) -> str:
    """Change one digit; text without digits stays."""
    digits = [match.start() for match in re.finditer(r"\d", text)]
    if not digits:
        return text
    position = rng.choice(digits)
    digit = rng.choice([other for other in "123456789" if other != text[position]])
    return text[:position] + digit + text[position + 1 :]


def break_syntax(expression: str, rng: random.Random) -> str:
    """A syntax error: a lost or an extra character."""
    return rng.choice((expression + ")", expression + "+", "(" + expression))
