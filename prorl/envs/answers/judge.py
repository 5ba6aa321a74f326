r"""Whether a final answer is the reference: as a choice, as text, in another base, as a time, as
mathematics.

Three-valued: right, wrong, or None where these rules cannot read the *reference*; an answer that
they cannot read is wrong. Pure, bounded work (at most tens of milliseconds).

>>> judge("3\\frac{1}{2}", "7/2"), judge("5", "not 5"), judge("\\int_0^1 f", "2")[0]
((True, 'mathematics'), (False, 'mathematics'), None)
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator
from fractions import Fraction

from prorl.envs.answers.compare import same
from prorl.envs.answers.evaluate import UndefinedError
from prorl.envs.answers.find import MAX_ANSWER_CHARS
from prorl.envs.answers.measures import fits, ratio
from prorl.envs.answers.notation import (
    FUNCTIONS,
    UnreadableError,
    decimal_commas,
    join_thousands,
)
from prorl.envs.answers.parse import parse
from prorl.envs.answers.tree import Node
from prorl.envs.answers.words import (
    bare,
    doubtful,
    numerals,
    only_number,
    plain_text,
    same_words,
)

_DELIMITERS = re.compile(r"\\[()\[\]]|__|`|(?<!\\)\$\$")
_BOLD = re.compile(r"(?<![\w)])\*\*([^*]+)\*\*(?![\w(])")
_ROUGHLY = re.compile(
    r"^(.+?)\s*[,;(]?\s*(?:\bor |which is |i\.e\. )?"
    r"(?:≈|\\approx(?![a-z])|approximately|approx\.?|about|roughly)\s*([^()]+?)\)?$"
)
_LABEL = re.compile(
    r"^(?:m?\s*\\angle\s*[A-Z]{1,3}|\|?(?:\\(?:overline|vec|overrightarrow)\s*\{)?[A-Z]{2,3}\}?\|?"
    r"|\\?(?:Pr?|E|Var|mathbb\{?[PE]\}?)\s*[(\[][^=]*[)\]]"
    r"|(?:\\text\{[^{}]*\}\s*|[A-Za-z][A-Za-z']*\s+){0,6}(?:\\text\{[^{}]*\}|[A-Za-z][A-Za-z']{2,}))"
    r"\s*(?:=|≈|\\approx)\s*"
)
_MEANT = {
    "all real numbers": "\\mathbb{R}", "all reals": "\\mathbb{R}", "any real number": "\\mathbb{R}",
    "no solution": "\\emptyset", "no solutions": "\\emptyset", "empty set": "\\emptyset",
    "no real solution": "\\emptyset", "no real solutions": "\\emptyset",
    "there are no solutions": "\\emptyset", "there is no solution": "\\emptyset",
    "infinity": "\\infty", "positive infinity": "\\infty", "negative infinity": "-\\infty",
    "minus infinity": "-\\infty",
}  # fmt: skip
_CURRENCY = re.compile(r"(?:\\\$|[$€£¥₹]|\b(?:USD|EUR|GBP|Rs\.?)(?![a-zA-Z]))\s*(?=[-\d.])")
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
_BASED = re.compile(r"[({]*([0-9A-Za-z]+)[)}]*\s*_\s*\{*\s*\(?(\d{1,2}|[a-z]{3,7})\)?\s*\}*")
_IN_BASE = re.compile(r"([0-9A-Za-z]+)\s*\(?(?:in )?base[ -](\w+)\)?", re.IGNORECASE)
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16, "twenty": 20,
}  # fmt: skip
_DEGREES = re.compile(r"\^?\s*\{?\s*\\circ(?![a-zA-Z])\s*\}?|°|\\?\bdegrees?\b")
_PI = re.compile(r"\\pi(?![a-zA-Z])|π|\bpi\b")
_PREFIXED = re.compile(r"0([bBoOxX])([0-9A-Fa-f]+)")
_TIME = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?\s*([ap])\.?\s?m\b\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):(\d{2})(?::(\d{2}))?")
_WORDLIKE = re.compile(r"[^\W\d_][\w\s'’.,&/()-]*")
_TRAILING = re.compile(r"(?:(?<!\.\.)(?<!\.)[.,;:]|\\\\|\s)+$")
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
    return _mathematics(*meant), "mathematics"


def _meaning(text: str) -> str:
    """Phrases that stand for a set or for infinity, in notation; two units of one kind as a sum."""
    plain = plain_text(text)
    if excepted := _EXCEPT.fullmatch(plain):
        return f"\\mathbb{{R}} \\setminus \\{{{excepted[1]}\\}}"
    compound = _COMPOUND.fullmatch(bare(_plain(text)))
    if compound and fits(compound[2], compound[4]):
        factor = ratio(compound[2], compound[4])
        total = Fraction(compound[1]) + Fraction(compound[3]) * factor
        return f"({total}) {compound[2]}" if factor != 1 else text
    return _MEANT.get(plain, text)


def undress(text: str) -> str:
    """A text without delimiters, markdown, currency signs, and the full stop behind it."""
    text = "".join(char for char in text if char in "°␤" or unicodedata.category(char) != "So")
    text = _BOLD.sub(r"\1", _DELIMITERS.sub(" ", text).strip()).strip()
    text = _TRAILING.sub("", text.replace("{:}", ":"))
    dollars = len(re.findall(r"(?<!\\)\$", text))
    if dollars and dollars % 2 == 0:
        text = re.sub(r"(?<!\\)\$", " ", text).strip()
    if _CURRENCY.search(text):
        has_words = bool(re.search(r"[A-Za-z]{2}", _CURRENCY.sub("", text)))
        sign = "cents" if "¢" in text else "dollars" if "$" in text else ""
        text = _CURRENCY.sub("", text) + (f" {sign}" if sign and not has_words else "")
    text = text.replace("\\text{dollars}", "dollars").strip().strip('"“”')
    if text.startswith("*") or text.endswith("*"):
        text = text.strip("*_")
    return _TRAILING.sub("", text).strip()


# ---- rules by which a text is right or wrong before it is read as mathematics


def _choice(reference: str, answer: str) -> bool | None:
    """A reference that is one capital letter, with or without the text of the choice."""
    letter = _CHOICE.fullmatch(_plain(reference))
    if letter is None:
        return _choice_with_text(reference, answer)
    found = _CHOSEN.fullmatch(bare(_plain(answer)))
    if found is None or (found[2] and re.search(r"\b(?:or|and|not)\b", found[2])):
        return False
    if found[2] and re.fullmatch(r"[\s,]*\(?[A-J]\)?", found[2]):
        return False
    return found[1].upper() == letter[1]


def _choice_with_text(reference: str, answer: str) -> bool | None:
    """A reference such as `(B) 24`: its letter, its text or both."""
    found = _LETTERED.fullmatch(_plain(reference).replace("~", " "))
    if found is None:
        return None
    letter, text = found[1], found[2]
    given = _LETTERED.fullmatch(_plain(bare(answer)).replace("~", " "))
    if given is not None:
        return given[1] == letter and judge(text, given[2])[0]
    return bool(_choice(letter, answer)) or judge(text, answer)[0]


def _plain(text: str) -> str:
    return re.sub(
        r"\\(?:text|mathrm|textbf|mathbf|textit|rm|bf)\s*\{([^{}]*)\}",
        r"\1",
        re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text),
    ).strip("{} ")


def _text(reference: str, answer: str) -> bool | None:
    """Equal as words; where the reference is words alone, nothing else is right."""
    wanted = plain_text(reference)
    if wanted and any(same_words(wanted, plain_text(text)) for text in _said(answer)):
        return True
    plain = _plain(reference)
    words = re.findall(r"[^\W\d_]+", plain)
    wordy = bool(_WORDLIKE.fullmatch(plain)) and any(len(word) > 1 for word in words)
    if not wordy or "=" in plain or numerals(plain) != plain:
        return None
    if wanted in _MEANT:
        return None
    return False if _parsed(plain) is None or len(max(words, key=len)) > 3 else None


def _said(answer: str) -> tuple[str, ...]:
    short = bare(answer)
    if not doubtful(short) and (stated := re.match(r"^[A-Za-z ]+ (?:is|are|was|be) (.+)$", short)):
        return answer, short, stated[1]
    return answer, short, _PREPOSITION.sub("", short)


def _parsed(text: str) -> Node | None:
    try:
        return parse(text)
    except UnreadableError:
        return None


def _based(reference: str, answer: str) -> bool | None:
    """Numbers with their base: digits in the reference's base, or the same number in another."""
    wanted, given = _in_base(reference), _in_base(bare(answer))
    if wanted is None:
        if given is None:
            return None
        plain = join_thousands(reference)
        return plain.isdigit() and _value(*given) == int(plain)
    if given is None:
        digits = re.sub(r"[\s,]", "", bare(answer))
        return digits.upper().lstrip("0") == wanted[0].upper().lstrip("0")
    return _value(*wanted) is not None and _value(*wanted) == _value(*given)


def _in_base(text: str) -> tuple[str, int] | None:
    text = _plain(text.replace("\\_", "_").replace("\\text", ""))
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


def _time(reference: str, answer: str) -> bool | None:
    """A time of the day, where the reference has a.m. or p.m."""
    wanted = _minutes(reference)
    if wanted is None:
        return None
    answer = re.sub(r"^(?:at|by)\s+", "", bare(answer))
    given = _minutes(bare(answer))
    if given is None and (found := _CLOCK.fullmatch(bare(_plain(answer)))):
        hour = int(found[1])
        given = (hour * 60 + int(found[2])) * 60 + int(found[3] or 0)
        return given in (wanted, wanted - 12 * 3600 if hour <= 12 else wanted)
    return given == wanted


def _minutes(text: str) -> int | None:
    """Seconds since midnight of `2:30 p.m.`."""
    found = _TIME.fullmatch(
        " ".join(
            _plain(text.replace("\\text", " ").replace("\\ ", " "))
            .replace("{", " ")
            .replace("}", " ")
            .replace("~", " ")
            .split()
        )
    )
    if found is None or not 1 <= int(found[1]) <= 12:
        return None
    hour = int(found[1]) % 12 + 12 * (found[4].lower() == "p")
    return (hour * 60 + int(found[2])) * 60 + int(found[3] or 0)


_RULES: tuple[tuple[str, Rule], ...] = (
    ("choice", _choice),
    ("text", _text),
    ("base", _based),
    ("time", _time),
)


# ---- mathematics


def _mathematics(reference: str, answer: str) -> bool | None:
    wanted = list(_readings(reference, is_reference=True))
    if not wanted:
        return None
    lists = any(node.op in ("list", "sequence") for node in wanted)
    for text in (answer, *_turned(reference, answer)):
        for node in _readings(text, is_list=lists):
            for one in wanted:
                try:
                    if same(one, node):
                        return True
                except (UnreadableError, UndefinedError, ArithmeticError):
                    continue
    return False if _has_value(wanted) else None


def _turned(reference: str, answer: str) -> tuple[str, ...]:
    """An angle in degrees as one in radians that tell of pi, and the other way round."""
    wanted, given = bool(_DEGREES.search(reference)), bool(_DEGREES.search(answer))
    if given and not wanted and _PI.search(reference):
        return (f"({_DEGREES.sub('', bare(answer))})*\\pi/180",)
    if wanted and not given and _PI.search(answer):
        return (f"({bare(answer)})*180/\\pi",)
    return ()


def _has_value(readings: list[Node]) -> bool:
    """Whether a reference is equal to itself: has a value that others can be compared with."""
    for node in readings:
        try:
            if same(node, node):
                return True
        except (UnreadableError, UndefinedError, ArithmeticError):
            continue
    return False


def _readings(text: str, *, is_reference: bool = False, is_list: bool = False) -> Iterator[Node]:
    """The trees that a text may be read as, the likeliest first, without repetitions."""
    if not is_reference and doubtful(text):
        return
    found: list[Node] = []
    texts = [text] if is_reference else _variants(text)
    spellings = [one for part in texts for one in _spellings(part, is_list or is_reference)]
    for spelled in dict.fromkeys(spellings):
        for units in (True, False):
            try:
                node = parse(spelled, units=units, attached_units=not is_reference)
            except (UnreadableError, RecursionError):
                continue
            if node not in found:
                found.append(node)
                yield node
    if found or is_reference:
        return
    plain = only_number(text)
    node_or_none = _parsed(join_thousands(plain)) if plain else None
    if node_or_none is not None:
        yield node_or_none


def _variants(text: str) -> list[str]:
    """An answer without lead-ins; without its label (`Area = `); both sides of an `≈`."""
    short = bare(text)
    found = [short]
    if (rough := _ROUGHLY.match(short)) and "=" not in rough[1]:
        found += [rough[1], rough[2]]
    label = _LABEL.match(short)
    if label and not set(re.findall(r"[a-z]+", label[0])) & FUNCTIONS:
        found.append(short[label.end() :])
    return found


def _spellings(text: str, is_list: bool) -> list[str]:
    """A text with its thousands joined, its number words in digits, its decimal commas."""
    joined = join_thousands(text.replace("{,}", ",").replace("\\!", ""))
    joined = re.sub(r"(?<=\d)(?:\\[,;: ]|~|\u202f|\u2009|\u00a0)(?=\d{3}(?!\d))", "", joined)
    found = [numerals(joined)]
    if joined != text and is_list:
        found.append(text)
    if (commas := decimal_commas(text)) != text and not is_list:
        found.append(commas)
    return list(dict.fromkeys(found))
