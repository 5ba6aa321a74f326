r"""Final answers: finding them in a text, and comparing them as numbers or as text.

Pure functions, no I/O.

An answer is what follows the last `####`, else what the last `\boxed{}` holds, else the last
number. Numbers are compared exactly, as fractions: `0.5`, `1/2`, `\frac{1}{2}` and `50/100` are one
answer, `0.33` and `1/3` are two.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

MAX_ANSWER_CHARS = 1000
"""A longer final answer is no answer; it bounds what a grader can be made to chew on."""

_MARK = re.compile(r"####[ \t]*([^\n]*)")
_NUMBER = re.compile(r"[-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:\s*/\s*\d+(?:\.\d+)?)?")
_FRACTION = re.compile(r"\\[dt]?frac\s*\{\s*([-+]?\d+)\s*\}\s*\{\s*(\d+)\s*\}")
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")
_TEXT = re.compile(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}")
_NOISE = re.compile(r"\\left|\\right|\\[!,;: ]|\\\$|\$")


class Answer(NamedTuple):
    """A final answer and how it was found: `####`, `boxed`, `last number` or `none`."""

    text: str
    found: str


def final_answer(text: str) -> Answer:
    r"""The final answer of a text.

    >>> texts = "48/2 = 24\n#### 24", r"so \boxed{\frac{1}{2}}"
    >>> *(final_answer(text).text for text in texts), final_answer("It is 7").found
    ('24', '\\frac{1}{2}', 'last number')
    """
    marks = [mark for mark in _MARK.findall(text) if mark.strip()]
    if marks:
        return Answer(marks[-1].strip(), "####")
    boxed = _last_boxed(text)
    if boxed:
        return Answer(boxed, "boxed")
    numbers = _NUMBER.findall(_THOUSANDS.sub("", text))
    return Answer(numbers[-1], "last number") if numbers else Answer("", "none")


def _last_boxed(text: str) -> str:
    start = text.rfind("\\boxed{")
    if start < 0:
        return ""
    depth, begin = 0, start + len("\\boxed")
    for index in range(begin, min(len(text), begin + MAX_ANSWER_CHARS + 2)):
        depth += {"{": 1, "}": -1}.get(text[index], 0)
        if depth == 0:
            return text[begin + 1 : index].strip()
    return ""


def normalise(text: str) -> str:
    r"""An answer without what does not change it: spaces, `$`, `\text{}`, thousands separators, a
    final full stop.

    >>> normalise(r"$\text{ East }$."), normalise("1,234 "), normalise(r"12\%")
    ('east', '1234', '12%')
    """
    text = _NOISE.sub("", _TEXT.sub(r"\1", text)).replace("\\%", "%")
    text = _THOUSANDS.sub("", text)
    return re.sub(r"\s+", "", text).rstrip(".").casefold()


def number(text: str) -> Fraction | None:
    """The number that a text is, or None.

    >>> number("1,000.50"), number("1/2"), number("x = 3"), number("1e9")
    (Fraction(2001, 2), Fraction(1, 2), None, None)
    """
    plain = _FRACTION.sub(r"\1/\2", normalise(text)).removeprefix("+")
    if not _NUMBER.fullmatch(plain):
        return None
    numerator, _, denominator = plain.partition("/")
    divisor = Fraction(denominator or "1")
    return Fraction(numerator) / divisor if divisor else None


def last_number(text: str) -> Fraction | None:
    """The last number in a text with other words, such as `42 dollars`."""
    found = _NUMBER.findall(_THOUSANDS.sub("", _FRACTION.sub(r"\1/\2", text)))
    return number(found[-1]) if found else None
