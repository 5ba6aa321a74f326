r"""Whether a final answer is the reference.

As a choice, as text, in another base, as a time of the day or as mathematics, in this order.

Three-valued: right, wrong, or None where these rules cannot read the *reference*; an answer that
they cannot read is wrong. Pure, bounded work (at most tens of milliseconds).

>>> judge("3\\frac{1}{2}", "7/2"), judge("5", "not 5"), judge("\\int_0^1 f", "2")[0]
((True, 'mathematics'), (False, 'mathematics'), None)
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction

from prorl.envs.answers.bases import same_in_base
from prorl.envs.answers.dress import plain_of, undress
from prorl.envs.answers.find import MAX_ANSWER_CHARS
from prorl.envs.answers.measures import fits, ratio
from prorl.envs.answers.numerals import numerals
from prorl.envs.answers.readings import parsed, same_mathematics
from prorl.envs.answers.times import same_time
from prorl.envs.answers.words import bare, doubtful, plain_text, same_words

_MEANT = {
    "all real numbers": "\\mathbb{R}", "all reals": "\\mathbb{R}", "any real number": "\\mathbb{R}",
    "no solution": "\\emptyset", "no solutions": "\\emptyset", "empty set": "\\emptyset",
    "no real solution": "\\emptyset", "no real solutions": "\\emptyset",
    "there are no solutions": "\\emptyset", "there is no solution": "\\emptyset",
    "infinity": "\\infty", "positive infinity": "\\infty", "negative infinity": "-\\infty",
    "minus infinity": "-\\infty",
}  # fmt: skip
_CHOICE = re.compile(r"\(?\s*([A-J])\s*[).:]?")
_LETTERED = re.compile(r"\(([A-J])\)\s*[:.]?\s*(.+)")
_EXCEPT = re.compile(
    r"all real (?:numbers|values)(?: of [a-z])? (?:except|but|other than)(?: for)? (.+)"
)
_COMPOUND = re.compile(
    r"(\d+(?:\.\d+)?)\s*([a-z]+)[\s,]*(?:and\s+)?(\d+(?:\.\d+)?)\s*([a-z]+)", re.IGNORECASE
)
_CHOSEN = re.compile(
    r"(?:(?:the )?(?:correct |best )?(?:answer|option|choice)(?: is)?[\s:]*)*"
    r"[(\[{]?\s*([A-Ja-j])\s*(?:[)\]}.:,]+|$)(?:\s*(.*))?",
    re.IGNORECASE,
)
_WORDLIKE = re.compile(r"[^\W\d_][\w\s'’.,&/()-]*")
_PREPOSITION = re.compile(r"^(?:on|in|at|by|it is|it's)\s+(?=[A-Za-z])", re.IGNORECASE)

Rule = Callable[[str, str], bool | None]


def judge(reference: str, answer: str) -> tuple[bool | None, str]:
    """(right, wrong or None for an unreadable reference; the rule that decided)."""
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS:
        return False, "no usable answer"
    reference, answer = undress(reference), undress(answer)
    for name, rule in _RULES:
        verdict = rule(reference, answer)
        if verdict is not None:
            return verdict, name
    meant = [_meaning(text) for text in (reference, answer)]
    return same_mathematics(*meant), "mathematics"


def _meaning(text: str) -> str:
    """Phrases that stand for a set or for infinity, in notation; two units of one kind as a sum."""
    plain = plain_text(text)
    if excepted := _EXCEPT.fullmatch(plain):
        return f"\\mathbb{{R}} \\setminus \\{{{excepted[1]}\\}}"
    compound = _COMPOUND.fullmatch(bare(plain_of(text)))
    if compound and fits(compound[2], compound[4]):
        factor = ratio(compound[2], compound[4])
        total = Fraction(compound[1]) + Fraction(compound[3]) * factor
        return f"({total}) {compound[2]}" if factor != 1 else text
    return _MEANT.get(plain, text)


# ---- rules by which a text is right or wrong before it is read as mathematics


def _choice(reference: str, answer: str) -> bool | None:
    """A reference that is one capital letter, with or without the text of the choice."""
    letter = _CHOICE.fullmatch(plain_of(reference))
    if letter is None:
        return _choice_with_text(reference, answer)
    found = _CHOSEN.fullmatch(bare(plain_of(answer)))
    if found is None or (found[2] and re.search(r"\b(?:or|and|not)\b", found[2])):
        return False
    if found[2] and re.fullmatch(r"[\s,]*\(?[A-J]\)?", found[2]):
        return False
    return found[1].upper() == letter[1]


def _choice_with_text(reference: str, answer: str) -> bool | None:
    """A reference such as `(B) 24`: its letter, its text or both."""
    found = _LETTERED.fullmatch(plain_of(reference).replace("~", " "))
    if found is None:
        return None
    letter, text = found[1], found[2]
    given = _LETTERED.fullmatch(plain_of(bare(answer)).replace("~", " "))
    if given is not None:
        return given[1] == letter and judge(text, given[2])[0]
    return bool(_choice(letter, answer)) or judge(text, answer)[0]


def _text(reference: str, answer: str) -> bool | None:
    """Equal as words; where the reference is words alone, nothing else is right."""
    wanted = plain_text(reference)
    if wanted and any(same_words(wanted, plain_text(text)) for text in _said(answer)):
        return True
    plain = plain_of(reference)
    words = re.findall(r"[^\W\d_]+", plain)
    wordy = bool(_WORDLIKE.fullmatch(plain)) and any(len(word) > 1 for word in words)
    if not wordy or "=" in plain or numerals(plain) != plain:
        return None
    if wanted in _MEANT:
        return None
    return False if parsed(plain) is None or len(max(words, key=len)) > 3 else None


def _said(answer: str) -> tuple[str, ...]:
    short = bare(answer)
    if not doubtful(short) and (stated := re.match(r"^[A-Za-z ]+ (?:is|are|was|be) (.+)$", short)):
        return answer, short, stated[1]
    return answer, short, _PREPOSITION.sub("", short)


_RULES: tuple[tuple[str, Rule], ...] = (
    ("choice", _choice),
    ("text", _text),
    ("base", same_in_base),
    ("time", same_time),
)
