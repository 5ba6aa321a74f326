"""Numbers that are written with their base: `1011_2`, `0x1F`, `42 in base five`."""

from __future__ import annotations

import re

from prorl.envs.answers.dress import plain_of
from prorl.envs.answers.notation import join_thousands
from prorl.envs.answers.words import bare

_BASED = re.compile(r"[({]*([0-9A-Za-z]+)[)}]*\s*_\s*\{*\s*\(?(\d{1,2}|[a-z]{3,7})\)?\s*\}*")
_IN_BASE = re.compile(r"([0-9A-Za-z]+)\s*\(?(?:in )?base[ -](\w+)\)?", re.IGNORECASE)
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16, "twenty": 20,
}  # fmt: skip
_PREFIXED = re.compile(r"0([bBoOxX])([0-9A-Fa-f]+)")


def same_in_base(reference: str, answer: str) -> bool | None:
    """Numbers with their base: digits in the reference's base, or the same number in another."""
    wanted, given = _in_base(reference), _in_base(bare(answer))
    if wanted is None:
        if given is None:
            return None
        joined = join_thousands(reference)
        return joined.isdigit() and _value(*given) == int(joined)
    if given is None:
        digits = re.sub(r"[\s,]", "", bare(answer))
        return digits.upper().lstrip("0") == wanted[0].upper().lstrip("0")
    return _value(*wanted) is not None and _value(*wanted) == _value(*given)


def _in_base(text: str) -> tuple[str, int] | None:
    text = plain_of(text.replace("\\_", "_").replace("\\text", ""))
    if found := _PREFIXED.fullmatch(text):
        return found[2], {"b": 2, "o": 8, "x": 16}[found[1].lower()]
    found = _BASED.fullmatch(text) or _IN_BASE.fullmatch(text)
    if found is None or not re.search(r"\d", found[1]):
        return None
    base = int(found[2]) if found[2].isdigit() else _BASES.get(found[2].lower(), 0)
    return (found[1], base) if 2 <= base <= 36 and _value(found[1], base) is not None else None


def _value(digits: str, base: int) -> int | None:
    try:
        return int(digits, base)
    except ValueError:
        return None
