r"""Rows as policies write them: references of GSM8K and of MATH's shapes, half answered rightly.

Built from a seed, so that no rule is fitted to its rows: another seed is another table.
`python -m tests.envs.math_realistic SEED` prints what is graded wrongly.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

from prorl.envs.answers import final_answer, grade

GSM8K = Path(__file__).parents[2] / "../shared/data/gsm8k/train-2000.jsonl"
_ENDS = (
    "#### {}",
    "So we get the total.\n#### {}",
    r"\boxed{{{}}}",
    r"Therefore the answer is $\boxed{{{}}}$.",
    r"\[ \boxed{{{}}} \]",
    "The answer is {}.",
    "**Answer:** {}",
    "The final answer is ${}$.",
    "<answer>{}</answer>",
)


class Row(NamedTuple):
    """An answer to a question, and whether it is the reference."""

    question: str
    reference: str
    text: str
    right: bool


def rows(seed: int, size: int) -> list[Row]:
    """So many rows, half of them with a question of GSM8K where its file is there."""
    dice = random.Random(seed)
    graded_rows: list[Row] = []
    words = list(_word_problems(dice)) if GSM8K.exists() else []
    for index in range(size):
        if words and index % 2:
            question, reference, rights, wrongs = words[index % len(words)]
        else:
            question, (reference, rights, wrongs) = "", dice.choice(_SHAPES)(dice)
        is_right = index % 4 < 2
        answer = dice.choice(rights if is_right else wrongs)
        end = dice.choice(_ENDS[:5] if "," in answer and "\\" not in answer else _ENDS)
        graded_rows.append(Row(question, reference, end.format(answer), is_right))
    return graded_rows


def _word_problems(dice: random.Random) -> Iterator[tuple[str, str, list[str], list[str]]]:
    """Yields word problems of GSM8K with the unit that the question asks for and its solution
    writes.
    """
    lines = GSM8K.read_text().splitlines()
    for line in dice.sample(lines, len(lines)):
        task = json.loads(line)
        question, answer = (
            task["question"],
            task["answer"].split("####")[1].strip().replace(",", ""),
        )
        if not re.fullmatch(r"-?\d+", answer):
            continue
        value = int(answer)
        rights = [answer, f"{value:,}", f"{value}.0", f"x = {value}" * (" x " not in question)]
        unit_match = re.search(r"[Hh]ow many (\w+s) (?:do|does|did|are|will|were|can)\b", question)
        if unit_match:
            unit = unit_match[1]
            rights += [f"{value} {unit}", f"{value}\\text{{ {unit}}}", f"{value} \\text{{ {unit}}}"]
        money = re.search(
            r"[Hh]ow much (?:money )?(?:do|does|did|will|would) \w+ (?:earn|pay|spend|make|owe)",
            question,
        )
        if money and "$" in question:
            rights += [f"${value}", f"\\${value}", f"{value} dollars", f"\\${value}.00"]
        wrong = value + dice.choice((1, -1, 2, 10, -10, value, 5))
        wrongs = [str(wrong) if wrong != value else str(value + 1), str(-value or 1)]
        wrongs += [f"{value}%"] * ("percent" not in question)
        wrongs += [f"{value}0", f"{value}.5", f"{value},000", f"{value} or {value + 1}"]
        wrongs += [f"{wrong if wrong != value else value + 3:,}", f"1/{value or 2}" * (value != 1)]
        yield question, answer, list(filter(None, rights)), list(filter(None, wrongs))


Shape = tuple[str, list[str], list[str]]


def _fraction(dice: random.Random) -> Shape:
    value = Fraction(dice.randint(1, 40), dice.choice((3, 4, 5, 6, 7, 8, 9, 11, 12, 16)))
    if value.denominator == 1:
        value += Fraction(1, 7)
    a, b = value.numerator, value.denominator
    rights = [
        f"\\frac{{{a}}}{{{b}}}",
        f"\\dfrac{{{a}}}{{{b}}}",
        f"{a}/{b}",
        f"x = \\frac{{{a}}}{{{b}}}",
    ]
    if a > b:
        rights.append(f"{a // b}\\frac{{{a % b}}}{{{b}}}")
    if 10**6 % b == 0:
        rights.append(str(a / b))
    wrongs = [f"\\frac{{{b}}}{{{a}}}", f"\\frac{{{a + 1}}}{{{b}}}", f"-\\frac{{{a}}}{{{b}}}"]
    wrongs += [f"{a}/{b + 1}", str(a), f"{a}{b}", f"{a / b:.2f}1"]
    return f"\\frac{{{a}}}{{{b}}}", rights, wrongs


def _tuple(dice: random.Random) -> Shape:
    a, b = dice.sample(range(-9, 15), 2)
    rights = [f"({a},{b})", f"({a}, {b})", f"\\left({a},{b}\\right)", f"(x,y) = ({a},{b})"]
    wrongs = [f"({b},{a})", f"({a},{b + 1})", f"({-a or 1},{b})", f"({a},{b},0)", f"{a}"]
    return f"({a},{b})", rights, wrongs


def _interval(dice: random.Random) -> Shape:
    a = dice.randint(-9, 5)
    b = a + dice.randint(1, 9)
    rights = [f"[{a},{b})", f"\\left[{a}, {b}\\right)", f"x \\in [{a},{b})", f"{a} \\le x < {b}"]
    wrongs = [f"[{a},{b}]", f"({a},{b})", f"({a},{b}]", f"[{a},{b + 1})", f"{a} < x < {b}"]
    return f"[{a},{b})", rights, wrongs


def _half_line(dice: random.Random) -> Shape:
    a = dice.randint(-9, 9)
    rights = [f"(-\\infty,{a}]", f"x \\le {a}", f"(-\\infty, {a}]", f"\\left(-\\infty, {a}\\right]"]
    wrongs = [f"(-\\infty,{a})", f"[{a},\\infty)", f"x < {a}", f"x \\ge {a}", f"(-\\infty,{a + 1}]"]
    return f"(-\\infty,{a}]", rights, wrongs


def _set(dice: random.Random) -> Shape:
    a, b, c = sorted(dice.sample(range(-12, 20), 3))
    rights = [f"\\{{{a},{b},{c}\\}}", f"\\{{{c}, {a}, {b}\\}}", f"{a}, {b}, {c}"]
    wrongs = [f"\\{{{a},{b}\\}}", f"\\{{{a},{b},{c + 1}\\}}", f"{a}, {b}", f"{a},{b},{c},{c + 2}"]
    return f"\\{{{a},{b},{c}\\}}", rights, wrongs


def _roots(dice: random.Random) -> Shape:
    a, b = sorted(dice.sample(range(-12, 20), 2))
    rights = [f"{a}, {b}", f"{b}, {a}", f"x = {a}, {b}", f"x = {a} \\text{{ or }} x = {b}"]
    rights += [f"{a} and {b}", f"x={b} or x={a}"]
    wrongs = [f"{a}", f"{a}, {b + 1}", f"{-a or 7}, {b}", f"{a}, {b}, {b + 4}", f"{a + b}{b}"]
    return f"{a}, {b}", rights, wrongs


def _polynomial(dice: random.Random) -> Shape:
    a, b = dice.randint(2, 9), dice.randint(1, 9)
    rights = [f"{a}x^2+{b}x", f"{a}x^{{2}} + {b}x", f"{b}x + {a}x^2", f"x({a}x+{b})"]
    wrongs = [f"{a}x^2-{b}x", f"{a + 1}x^2+{b}x", f"{a}x+{b}", f"{a}x^3+{b}x", f"{a}x^2+{b}"]
    return f"{a}x^2+{b}x", rights, wrongs


def _root(dice: random.Random) -> Shape:
    a, b = dice.randint(2, 9), dice.choice((2, 3, 5, 6, 7, 10, 11))
    rights = [f"{a}\\sqrt{{{b}}}", f"{a} \\sqrt{b}" if b < 10 else f"\\sqrt{{{a * a * b}}}"]
    rights += [f"\\sqrt{{{a * a * b}}}", f"{a}\\cdot\\sqrt{{{b}}}", f"{a}√{b}"]
    wrongs = [f"{a}\\sqrt{{{b + 1}}}", f"{a + 1}\\sqrt{{{b}}}", f"-{a}\\sqrt{{{b}}}", f"{a * b}"]
    return f"{a}\\sqrt{{{b}}}", rights, wrongs


def _pi(dice: random.Random) -> Shape:
    a = dice.randint(2, 90)
    rights = [f"{a}\\pi", f"{a} \\pi", f"{a}π", f"{a}\\pi \\text{{ cm}}^2"]
    wrongs = [f"{a + 1}\\pi", f"{a}", f"\\frac{{{a}}}{{\\pi}}", f"-{a}\\pi", f"{a}\\pi^2"]
    return f"{a}\\pi", rights, wrongs


def _unit(dice: random.Random) -> Shape:
    a, unit = dice.randint(2, 900), dice.choice(("cm", "kg", "m/s", "hours", "cm^2", "miles"))
    rights = [f"{a} \\text{{ {unit}}}", f"{a} {unit}", f"{a}", f"{a}\\ \\text{{{unit}}}"]
    wrongs = [
        f"{a + 1} {unit}",
        f"{a} \\text{{ apples}}",
        f"{a} \\text{{ A}}",
        f"-{a} {unit}",
        f"{a}0",
    ]
    return f"{a} \\text{{ {unit}}}", rights, wrongs


def _percent(dice: random.Random) -> Shape:
    a = dice.randint(2, 99)
    rights = [f"{a}\\%", f"{a}%", f"{a} \\%", f"{a} percent", f"{a}"]
    wrongs = [f"{a + 1}\\%", f"{a / 1000}", f"-{a}\\%", f"{100 - a or 1}.5\\%", f"{a}00\\%"]
    return f"{a}\\%", rights, wrongs


def _matrix(dice: random.Random) -> Shape:
    a, b, c, d = dice.sample(range(-9, 12), 4)

    def spelled(kind: str, *values: int) -> str:
        p, q, r, s = values
        return f"\\begin{{{kind}}} {p} & {q} \\\\ {r} & {s} \\end{{{kind}}}"

    rights = [spelled(kind, a, b, c, d) for kind in ("pmatrix", "bmatrix")]
    wrongs = [spelled("pmatrix", *v) for v in ((b, a, c, d), (a, c, b, d), (a, b, c, d + 1))]
    return spelled("pmatrix", a, b, c, d), rights, wrongs


def _thousands(dice: random.Random) -> Shape:
    a = dice.randint(1000, 9_999_999)
    rights = [
        f"{a}",
        f"{a:,}",
        f"{a:,}".replace(",", "{,}"),
        f"{a:,}".replace(",", "\\,"),
        f"n = {a}",
    ]
    wrongs = [f"{a + 1:,}", f"{a // 1000}", f"{a / 10}1", f"{a},000", f"-{a:,}", f"{a} thousand"]
    return dice.choice((f"{a}", f"{a:,}")), rights, wrongs


def _integer(dice: random.Random) -> Shape:
    a = dice.choice((-1, 1)) * dice.randint(2, 500)
    rights = [f"{a}", f"x = {a}", f"{a}.", f"{a}.0", f"= {a}", f"$ {a} $"]
    wrongs = [f"{-a}", f"{a + 1}", f"{a}.5", f"{a} or {a + 1}", f"{a}x", f"x > {a}", f"{a}^2"]
    return f"{a}", rights, wrongs


def _choice(dice: random.Random) -> Shape:
    right, wrong = dice.sample("ABCDE", 2)
    rights = [right, f"({right})", f"\\text{{{right}}}", f"\\textbf{{({right})}}", f"{right}."]
    wrongs = [wrong, f"({wrong})", f"{right} or {wrong}", f"\\text{{{wrong}}}", f"{right}, {wrong}"]
    return dice.choice((right, f"\\text{{({right})}}")), rights, wrongs


def _equation(dice: random.Random) -> Shape:
    a, b = dice.randint(2, 9), dice.randint(1, 9)
    rights = [f"y = {a}x + {b}", f"y={a}x+{b}", f"y = {b} + {a}x", f"{a}x - y + {b} = 0"]
    wrongs = [f"y = {a}x - {b}", f"y = {a + 1}x + {b}", f"x = {a}y + {b}", f"{a}x + y + {b} = 0"]
    return f"y = {a}x + {b}", rights, wrongs


def _complex(dice: random.Random) -> Shape:
    a, b = dice.randint(1, 9), dice.randint(2, 9)
    rights = [f"{a}+{b}i", f"{a} + {b}i", f"{b}i + {a}", f"z = {a}+{b}i"]
    wrongs = [f"{a}-{b}i", f"{b}+{a}i" if a != b else f"{a}", f"{a}+{b}", f"-{a}+{b}i"]
    return f"{a}+{b}i", rights, wrongs


_SHAPES = (
    _fraction, _tuple, _interval, _half_line, _set, _roots, _polynomial, _root, _pi, _unit,
    _percent, _matrix, _thousands, _integer, _integer, _choice, _equation, _complex,
)  # fmt: skip


def misgraded(seed: int, size: int) -> list[tuple[Row, str]]:
    """The rows whose verdict is not theirs, with the answer that was found."""
    wrong = []
    for row in rows(seed, size):
        answer = final_answer(row.text).text
        if bool(grade(row.reference, answer, row.question)[0]) is not row.right:
            wrong.append((row, answer))
    return wrong


if __name__ == "__main__":
    for row, answer in misgraded(int(sys.argv[1]), 1000):
        verdict = "refused" if row.right else "TAKEN"
        print(f"{verdict} {row.question[-90:]!r} {row.reference!r} {answer!r}")
