"""Numbers in words (`twenty-one`, `three quarters`, `1.5 million`) as digits.

Pure functions over short texts; English only.
"""

from __future__ import annotations

import re
from fractions import Fraction

_SCALES = {
    "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9, "trillion": 10**12,
    "dozen": 12,
}  # fmt: skip
_UNITS = re.findall(
    r"\w+",
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen"
    " sixteen seventeen eighteen nineteen",
)
_TENS = re.findall(r"\w+", "twenty thirty forty fifty sixty seventy eighty ninety")
_SMALL = {word: number for number, word in enumerate(_UNITS)} | {
    word: 10 * number for number, word in enumerate(_TENS, start=2)
}
_PARTS = {
    "half": 2, "halves": 2, "third": 3, "quarter": 4, "fourth": 4, "fifth": 5, "sixth": 6,
    "seventh": 7, "eighth": 8, "ninth": 9, "tenth": 10, "eleventh": 11, "twelfth": 12,
    "sixteenth": 16, "twentieth": 20, "hundredth": 100, "thousandth": 1000,
}  # fmt: skip
_SCALED = re.compile(
    r"^([-+]?[\d.,]*\d)\s*(hundred|thousand|million|billion|trillion|dozen)\b", re.IGNORECASE
)
_NEGATIVE = re.compile(r"(?:negative|minus)\s+(?=[\d.\\(])", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z]+|[^A-Za-z\s]+")


def numerals(text: str) -> str:
    """Returns a text whose first words are a number, with that number in digits.

    >>> numerals("negative twenty-one km"), numerals("three quarters"), numerals("1.5 million")
    ('-21 km', '(3/4)', '1500000')
    """
    if scaled := _SCALED.match(text):
        number = Fraction(scaled[1].replace(",", "")) * _SCALES[scaled[2].lower()]
        return _digits(number) + text[scaled.end() :]
    if signed := _NEGATIVE.match(text):
        return "-" + text[signed.end() :]
    words = [word for word in _WORD.finditer(text) if word[0] != "-"]
    num_words, number = _spoken([word[0].casefold() for word in words])
    return _digits(number) + text[words[num_words - 1].end() :] if num_words else text


def _digits(number: Fraction) -> str:
    return str(number) if number.denominator == 1 else f"({number})"


def _spoken(words: list[str]) -> tuple[int, Fraction]:
    """Returns how many of the words are a number at their beginning, and that number."""
    if words[:1] not in (["negative"], ["minus"]):
        return _unsigned(words)
    num_words, number = _unsigned(words[1:])
    return (num_words + 1, -number) if num_words else (0, number)


def _unsigned(words: list[str]) -> tuple[int, Fraction]:
    place, total = _beginning(words)
    if 0 < total < 1:
        return place, total
    current = total if total < 1000 else Fraction(0)
    scale = total if total >= 1000 else Fraction(10**15)
    total -= current
    for word in words[place:]:
        small, size = _SMALL.get(word), _SCALES.get(word, 0)
        if small is not None and (not place or ((total or current) and _goes_on(current, small))):
            current += small
        elif word == "hundred" and 0 < current < 100:
            current *= 100
        elif size > 100 and size < scale and current:
            total, current, scale = total + current * size, Fraction(0), Fraction(size)
        elif word == "dozen" and not total:
            total, current, scale = (current or Fraction(1)) * size, Fraction(0), Fraction(1)
        else:
            return _end(words, place, total + current) if place else (0, Fraction(0))
        place += 1
    return place, total + current


def _goes_on(current: Fraction, small: int) -> bool:
    """Returns whether a number so far may be followed by this word: `twenty` by `one`, not by
    `eleven`.
    """
    tens = current % 100
    return small > 0 and (not tens or (tens >= 20 and not tens % 10 and small < 10))


def _beginning(words: list[str]) -> tuple[int, Fraction]:
    """Returns how many words `half`, `a third` or `a hundred` are, and their number; 0 for any
    other.
    """
    if words[:1] == ["half"]:
        return 1, Fraction(1, 2)
    if words[:1] in (["a"], ["an"]) and len(words) > 1:
        if words[1] in _PARTS:
            return 2, Fraction(1, _PARTS[words[1]])
        if words[1] in _SCALES:
            return 2, Fraction(_SCALES[words[1]])
    return 0, Fraction(0)


def _end(words: list[str], place: int, number: Fraction) -> tuple[int, Fraction]:
    """Returns the end of a number that has, at `place`, `and a half`, `point five`, `thirds`."""
    word, rest = words[place], words[place + 1 :]
    if word == "and" and rest:
        num_words, part = _spoken(rest)
        if num_words and part < max(1, _SCALES.get(words[place - 1], 1)):
            return place + 1 + num_words, number + part
    elif word == "point":
        digits = [str(_SMALL[name]) for name in rest if _SMALL.get(name, 10) < 10]
        if digits and digits == [str(_SMALL.get(name)) for name in rest][: len(digits)]:
            return place + 1 + len(digits), number + Fraction("0." + "".join(digits))
    elif word in _PARTS if number == 1 else word.endswith("s"):  # `twenty-fifth` is none of these
        size = _PARTS.get(word if word == "halves" else word.removesuffix("s"))
        return (place + 1, number / size) if size else (place, number)
    return place, number
