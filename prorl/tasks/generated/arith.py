"""The set `arith`: twelve forms of integer arithmetic in words, to be worked out with a `python`
tool.

`data` of a task: `operands`, `expression` (the right Python expression), `answer` (its value as
text), `form`. Invariants: answers are integers >= 0; the same (split, seed, n) gives the same tasks
on every machine.
"""

from __future__ import annotations

import random
from functools import partial
from typing import NamedTuple

from prorl.tasks.generated.split import Split, distinct, split_of, wordings
from prorl.types import Task

OPENINGS = (
    "What is {}?",
    "Compute {}.",
    "Find {}.",
    "Work out {}.",
    "Calculate {}.",
    "Tell me {}.",
)


class Form(NamedTuple):
    """One kind of question, with its numbers and its answer.

    Letters in `expression` and `phrases` are operands with `digits` digits at most, in order.
    """

    name: str
    expression: str
    phrases: tuple[str, ...]
    digits: tuple[int, ...]


FORMS = (
    Form(
        "multiply_add",
        "{a}*{b}+{c}",
        ("{a} times {b} plus {c}", "{c} more than {a} times {b}"),
        (2, 2, 3),
    ),
    Form(
        "multiply_subtract",
        "{a}*{b}-{c}",
        ("{a} times {b} minus {c}", "{c} less than {a} times {b}"),
        (2, 2, 2),
    ),
    Form(
        "add_multiply",
        "({a}+{b})*{c}",
        ("the sum of {a} and {b}, times {c}", "{c} times the sum of {a} and {b}"),
        (3, 3, 1),
    ),
    Form(
        "subtract_multiply",
        "({a}-{b})*{c}",
        ("{a} minus {b}, all times {c}", "{c} times the difference of {a} and {b}"),
        (3, 3, 1),
    ),
    Form("add", "{a}+{b}", ("{a} plus {b}", "the sum of {a} and {b}"), (3, 3)),
    Form("less_than", "{b}-{a}", ("{a} less than {b}", "{b} minus {a}"), (3, 3)),
    Form("multiply", "{a}*{b}", ("{a} times {b}", "the product of {a} and {b}"), (3, 2)),
    Form("remainder", "{a}%{b}", ("the remainder of {a} divided by {b}", "{a} modulo {b}"), (3, 2)),
    Form(
        "quotient",
        "{a}//{b}",
        ("the whole part of {a} divided by {b}", "{a} divided by {b}, rounded down"),
        (3, 1),
    ),
    Form(
        "average",
        "({a}+{b})//2",
        ("the average of {a} and {b}", "half the sum of {a} and {b}"),
        (3, 3),
    ),
    Form(
        "add_three",
        "{a}+{b}+{c}",
        ("{a} plus {b} plus {c}", "the sum of {a}, {b} and {c}"),
        (2, 3, 2),
    ),
    Form(
        "square_add",
        "{a}*{a}+{b}",
        ("the square of {a} plus {b}", "{b} more than the square of {a}"),
        (2, 3),
    ),
)


def generate(split: Split, seed: int, n: int) -> list[Task]:
    """n different tasks. Raises TaskError when the set has not that many."""
    rng = random.Random(f"arith:{split}:{seed}")
    return distinct(n, rng, partial(_draw, split, seed))


def _draw(split: Split, seed: int, rng: random.Random, index: int) -> Task | None:
    """A task, or None for a question of the other split or one that is not fair."""
    form = rng.choice(FORMS)
    operands = tuple(_operand(rng, digits) for digits in form.digits)
    letters = dict(zip("abc", operands, strict=False))
    expression = form.expression.format(**letters)
    answer = eval(expression)
    first, second = operands[:2]
    is_fair = {
        "remainder": first >= second,
        "quotient": first >= second,
        "average": (first + second) % 2 == 0,
    }.get(form.name, answer >= 0)
    if not is_fair or split_of(operands) != split:
        return None
    opening, phrase = rng.choice(wordings(OPENINGS, form.phrases, split))
    data = {
        "operands": list(operands),
        "expression": expression,
        "answer": str(answer),
        "form": form.name,
    }
    prompt, task_id = opening.format(phrase.format(**letters)), f"arith:{split}:{seed}:{index}"
    return Task(task_id=task_id, env="arith", prompt=prompt, data=data, data_source="arith")


def _operand(rng: random.Random, digits: int) -> int:
    """Between 2 and `digits` digits, each length as likely."""
    length = rng.randint(1, digits)
    return rng.randint(max(2, 10 ** (length - 1)), 10**length - 1)
