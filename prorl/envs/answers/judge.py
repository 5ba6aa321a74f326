r"""Whether a final answer is the reference.

As a choice, as text, in another base, as a time of the day or as mathematics, in this order. An
answer is one candidate with one reading: what offers two that differ (`17 \approx 42`, `A, B`) is
wrong, and so is a number with words behind it that neither the question nor the reference knows.

Three-valued: right, wrong, or None where these rules cannot read the *reference*; an answer that
they cannot read is wrong.

>>> judge("3\\frac{1}{2}", "7/2"), judge("5", "not 5"), judge("\\int_0^1 f", "2")[0]
((True, 'mathematics'), (False, 'mathematics'), None)
>>> judge("18", "18 eggs", "How many eggs are left?"), judge("18", "18 lakh")[0]
((True, 'mathematics'), False)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Literal, get_args

from prorl.envs.answers.closed import is_closed_form, poses
from prorl.envs.answers.compare import assigned, is_name, same
from prorl.envs.answers.congruence import same_congruence
from prorl.envs.answers.evaluate import UndefinedError, number, symbols
from prorl.envs.answers.find import MAX_ANSWER_CHARS
from prorl.envs.answers.measures import PERCENT, Speech, fits, ratio, unit_text
from prorl.envs.answers.notation import (
    UnreadableError,
    decimal_commas,
    join_thousands,
)
from prorl.envs.answers.numerals import numerals
from prorl.envs.answers.parse import Node, parse
from prorl.envs.answers.words import (
    agreed,
    bare,
    doubtful,
    exact_text,
    plain_of,
    plain_text,
    same_case,
    same_words,
    undress,
)
from prorl.envs.units import parse_unit, words_of

MAX_REFERENCE_CHARS = 4 * MAX_ANSWER_CHARS
"""A longer reference is read by no rule: no answer can spell it."""
_MAX_SIDES = 4
_CALCULATES = re.compile(
    r"^(?!.*(?:[,;]|\bor\b|\band\b|\\quad)).*(?:[-+*/^×·÷]|\\frac|\\cdot|\\times)"
)
_MEASURED = re.compile(r"(?<=\d) ?([A-Za-z]+)(?![\w^])")
_CONSTANT = re.compile(r"\+ ?([ckK])$")
"""Of integration, whose letter is free."""
Rule = Callable[[str, str, Speech], bool | None]


Grading = Literal["strict", "closed_form", "value"]
GRADINGS: tuple[Grading, ...] = get_args(Grading)
"""How far an answer must be worked out where the reference is a number: `strict` as far as that,
`closed_form` to one number or a closed form of it (`closed.py`), `value` not at all.
"""


def judge(
    reference: str,
    answer: str,
    question: str = "",
    grading: str = "closed_form",
    *,
    is_step: bool = False,
) -> tuple[bool | None, str]:
    """(right, wrong or None for an unreadable reference; the rule that decided).

    `is_step`: arithmetic that is still to be done may be right, as before `= 84`.
    """
    if len(reference) > MAX_REFERENCE_CHARS:
        return None, "too long a reference"
    reference, answer = (_ROW_GAP.sub(r"\\\\ ", text) for text in (reference, answer))
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS or "~~" in answer:  # struck out
        return False, "no usable answer"
    reference, answer = undress(reference), undress(answer)
    if letter := _CONSTANT.search(answer) if reference.endswith("C") else None:
        is_free = letter[1] not in re.sub(r"\\[a-zA-Z]+", "", reference)
        answer = f"{answer[:-1]}C" if is_free else answer
    speech = Speech(question, reference, grading)
    reference, answer = (_for_all(text, speech) for text in (reference, answer))
    for name, rule in _RULES:
        verdict = rule(reference, answer, speech)
        if verdict is not None:
            return verdict, name
    sides = _shortened(re.split(r"(?<![<>!\\\\])=", answer))
    answer = "=".join(sides)
    if 1 < len(sides) <= _MAX_SIDES:
        if speech.asks_percent and not speech.is_share and "%" in sides[-1]:
            return judge(f"{reference}\\%", answer, question, grading)
        if all(judge(reference, one, question, grading, is_step=True)[0] for one in sides) and any(
            judge(reference, one, question, grading)[0] for one in (sides[0], sides[-1])
        ):
            return True, "each side"
    right = _same_mathematics(_meaning(reference), _meaning(answer), speech, is_step)
    # what reads more than these rules do takes less notice of capitals and primes
    folded = [re.sub(r"['’\"]", "", exact_text(text)).casefold() for text in (reference, answer)]
    if right is None and folded[0] == folded[1]:
        right = False
    return right, "mathematics"


_ROW_GAP = re.compile(r"\\\\ ?\[ ?-?[\d.]+ ?(?:pt|ex|em|mm|cm|in|px|\\[a-z]+) ?\]")
"""The space behind a row of a matrix: `\\\\[2pt]`."""
_FOR_ALL = re.compile(
    r"(?<![ ,])[ ,]*+(?:\\quad|\\ )*+[ ,]*+"
    r"(?:\\text(?:rm)? ?\{ *+,? *+for (?:all|any|every|each)(?P<words>[a-z ]*+)\}"
    r"|\\forall|∀|for (?:all|any|every|each) (?P<plain>[a-z ]*?))"
    r" *+\$? *+[a-zA-Z](?: ?, ?[a-zA-Z])* *"
    r"(?:(?:\\in(?![a-z])|∈) *(?:\\mathbb ?\{? ?(?P<set>[RQZNC]) ?\}?|(?P<sign>[ℝℚℤℕℂ])) *)?\$?\.?$"
)
_DOMAINS = {
    "R": r"real|\\mathbb ?\{? ?R|ℝ", "Q": r"rational|\\mathbb ?\{? ?Q|ℚ",
    "Z": r"integer|\\mathbb ?\{? ?Z|ℤ", "N": r"natural|positive integer|\\mathbb ?\{? ?N|ℕ",
    "C": r"complex|\\mathbb ?\{? ?C|ℂ",
}  # fmt: skip
_SETS = dict(zip("ℝℚℤℕℂ", "RQZNC", strict=True))
_DOMAIN_WORDS = {"real": "R", "rational": "Q", "integer": "Z", "natural": "N", "complex": "C"}


def _for_all(text: str, speech: Speech) -> str:
    """A formula without the `for all real x` behind it, where the question names that domain."""
    found = _FOR_ALL.search(text)
    if found is None:
        return text
    words = (found["words"] or found["plain"] or "").split()
    if set(words) - {
        "real",
        "rational",
        "integer",
        "natural",
        "complex",
        "numbers",
        "values",
        "of",
    }:
        return text
    sign = found["set"] or _SETS.get(found["sign"] or "")
    domains = {_DOMAIN_WORDS[word] for word in words if word in _DOMAIN_WORDS}
    domains |= {sign} if sign else set()
    said = f"{speech.question} {speech.reference}"
    if speech.is_known and not all(re.search(_DOMAINS[name], said) for name in domains):
        return text
    return text[: found.start()].strip()


def _shortened(sides: list[str]) -> list[str]:
    """`V = pi r^2 h = 90 pi` without its formula; `12 m * 7 m = 84 m^2` without its first units."""
    sides = [*(_unmeasured(side) for side in sides[:-1]), sides[-1]]
    if len(sides) < 3 or not all(map(_CALCULATES.search, sides[1:-1])):
        return sides
    *formulas, last = (_tree(side) for side in sides[1:])
    if last is None or symbols(last) or not all(tree and symbols(tree) for tree in formulas):
        return sides
    return [sides[0], sides[-1]]


def _unmeasured(side: str) -> str:
    """Arithmetic of two measured numbers or more, without what they are measured in."""
    found = _MEASURED.findall(side)
    if (
        not _CALCULATES.search(side)
        or len(found) < 2
        or not all(len(unit) > 1 or unit in "mgsLh" for unit in found)
    ):
        return side
    return _MEASURED.sub("", side) if all(map(parse_unit, found)) else side


# ---- choices


_CHOICE = re.compile(r"\(? ?([A-J]) ?[).:]?")
_SEVERAL = re.compile(r"(?:both )?\(?[A-J]\)?(?:(?: ?[,;&] ?| and |, and )\(?[A-J]\)?)+")
_LETTERED = re.compile(r"\(([A-J])\) ?[:.]? ?(.+)")
_CHOSEN = re.compile(
    r"(?:(?:the )?(?:correct |best )?(?:answer|option|choice)(?: is)?[ :]*)*"
    r"[(\[{]? ?([A-Ja-j]) ?(?:[)\]}.:,]+|$) ?(.*)",
    re.IGNORECASE,
)


def _choice(reference: str, answer: str, speech: Speech) -> bool | None:
    """A reference of one capital letter or several, with or without the text of the choice."""
    plain = plain_of(reference)
    letter = _CHOICE.fullmatch(plain)
    if letter is None:
        # elsewhere `AB` is a segment or a product
        several = _letters(plain) if speech.choice("A") or not speech.is_known else None
        if several and several == _letters(bare(plain_of(answer))):
            return True
        return _choice_with_text(reference, answer, speech)
    found = _CHOSEN.fullmatch(bare(plain_of(answer)).replace("~", " "))
    listed = speech.choice(letter[1])
    if found is None:  # the choice's text alone
        return bool(listed and judge(listed, answer, speech.question, speech.grading)[0])
    said = found[1] if speech.is_known and not listed else found[1].upper()
    if said != letter[1]:
        return False
    return not found[2] or _is_text_of(letter[1], found[2], speech)


def _is_text_of(letter: str, text: str, speech: Speech) -> bool:
    """Whether a text is that of a choice in the question's list; any number where it has none."""
    listed = speech.choice(letter)
    if not listed:
        number_in = numerals(text)
        return any(map(str.isdigit, number_in)) and _tree(number_in) is not None
    return bool(judge(listed, text, speech.question, speech.grading)[0])


def _letters(text: str) -> frozenset[str]:
    """The letters of `AC`, `A, C` or `both A and C`; none of any other text."""
    letters = text
    if _SEVERAL.fullmatch(text):
        letters = "".join(re.findall(r"\b[A-J]\b", text))
    elif not re.fullmatch(r"[A-J]{2,5}", text) or list(text) != sorted(set(text)):
        return frozenset()
    return frozenset(letters)


def _choice_with_text(reference: str, answer: str, speech: Speech) -> bool | None:
    """A reference such as `(B) 24`: its letter, its text or both."""
    found = _LETTERED.fullmatch(plain_of(reference).replace("~", " "))
    if found is None:
        return None
    letter, text = found[1], found[2]
    given = _CHOSEN.fullmatch(bare(plain_of(answer)).replace("~", " "))
    if given is not None:
        right = given[1].upper() == letter
        return right and (
            not given[2] or bool(judge(text, given[2], speech.question, speech.grading)[0])
        )
    return judge(text, answer, speech.question, speech.grading)[0]


# ---- texts

_WORDLIKE = re.compile(r"[^\W\d_][\w '’.,&/()-]*")
_AS_WRITTEN = re.compile(
    r"\d+(?: ?[-–/.] ?\d+){2,9}|\d+ ?[-–] ?\d+|\d+ ?(?:×|x|\\times) ?\d+"
    r"|.*(?:\\(?:land|lor|wedge|vee|neg|lnot)(?![a-zA-Z])|[∧∨¬]).*"
)
"""A date, a score, a matrix' size, a formula of logic: no arithmetic."""
_PADDED = re.compile(r"0\d+")


def _text(reference: str, answer: str, speech: Speech) -> bool | None:
    """Equal sign by sign, or as words; where the reference is words, nothing else is right."""
    if exact_text(reference) == exact_text(answer):
        return True
    plain = plain_of(reference)
    is_clock = _CLOCK.fullmatch(plain) and speech.is_known and not speech.asks_ratio
    is_code = speech.asks_code and _PADDED.fullmatch(plain)
    if is_clock or is_code or _AS_WRITTEN.fullmatch(plain) or speech.multiplies_matrices:
        return _squeezed(reference) == _squeezed(bare(answer))
    words = re.findall(r"[^\W\d_]+", plain)
    wordy = bool(_WORDLIKE.fullmatch(plain)) and any(len(word) > 1 for word in words)
    if not wordy or numerals(plain) != plain:
        return None
    wanted = plain_text(reference)
    same = same_case if speech.asks_order else same_words
    if any(same(wanted, plain_text(text)) for text in _said(answer, speech)):
        return True
    if wanted.casefold() in _MEANT:
        return None
    is_word = len(max(words, key=len)) > 3 or plain.lower() in ("no", "yes")
    is_word |= plain.isalpha() and plain.isupper()  # `XIX`, `SAS`
    return False if is_word or _tree(plain) is None else None


def _said(answer: str, speech: Speech) -> tuple[str, ...]:
    stated = re.match(r"^([A-Za-z ]+) (?:is|are|was) (.+)$", answer)
    short = stated[2] if stated and speech.labels(stated[1]) else answer
    return answer, short, re.sub(r"^(?:on|in|at) (?=[A-Z])", "", short), agreed(answer)


def _squeezed(text: str) -> str:
    """A text without spaces and dress, in one spelling of its signs."""
    text = re.sub(r"\\times(?![a-zA-Z])|(?<=\d) ?x ?(?=\d)", "×", exact_text(text))
    text = re.sub(r"\\(?:[dt]frac)(?![a-zA-Z])", r"\\frac", text.replace("–", "-"))
    return re.sub(r"\s", "", text)


# ---- numbers in another base: `1011_2`, `0x1F`, `42 in base five`

_BASED = re.compile(r"[({]*([0-9A-Za-z]+)[)}]* ?_ ?\{* ?\(?(\d{1,2}|[a-z]{3,7})\)? ?\}*")
_IN_BASE = re.compile(r"([0-9A-Za-z]+) ?\(?(?:in )?base[ -](\w+)\)?", re.IGNORECASE)
_BASES = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9,
    "ten": 10, "eleven": 11, "twelve": 12, "sixteen": 16, "twenty": 20,
}  # fmt: skip
_PREFIXED = re.compile(r"0([bBoOxX])([0-9A-Fa-f]+)")


def _base(reference: str, answer: str, speech: Speech) -> bool | None:
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


# ---- times of the day: `2:30 p.m.`

_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))? ?([ap])\.? ?m\b\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?")


def _time(reference: str, answer: str, speech: Speech) -> bool | None:
    """A time of the day, where the reference has a.m. or p.m."""
    wanted = _seconds(reference)
    if wanted is None:
        return None
    answer = re.sub(r"^(?:at|by) ", "", bare(answer))
    for said, half in ((" in the morning", " am"), (" in the (?:afternoon|evening)", " pm")):
        answer = re.sub(f"(?<=\\d){said}$", half, answer)
    given = _seconds(bare(answer))
    if given is None and (found := _CLOCK.fullmatch(bare(plain_of(answer)))):
        hour = int(found[1])
        given = (hour * 60 + int(found[2])) * 60 + int(found[3] or 0)
        is_half = 1 <= hour < 12 and not found[1].startswith("0")
        return given in (wanted, wanted - 12 * 3600 if is_half else wanted)
    return given == wanted


def _seconds(text: str) -> int | None:
    """Seconds since midnight of `2:30 p.m.`."""
    plain = plain_of(text.replace("\\text", " ").replace("\\ ", " "))
    found = _TIME.fullmatch(" ".join(re.sub(r"[{}~]", " ", plain).split()))
    if found is None or not 1 <= int(found[1]) <= 12:
        return None
    hour = int(found[1]) % 12 + 12 * (found[4].lower() == "p")
    return (hour * 60 + int(found[2])) * 60 + int(found[3] or 0)


def _congruence(reference: str, answer: str, speech: Speech) -> bool | None:
    return same_congruence(reference, bare(answer))


_RULES: tuple[tuple[str, Rule], ...] = (
    ("choice", _choice),
    ("congruence", _congruence),
    ("text", _text),
    ("base", _base),
    ("time", _time),
)

# ---- mathematics

_MEANT = {
    "all real numbers": "\\mathbb{R}", "every real number": "\\mathbb{R}", "inf": "\\infty",
    "infinite": "\\infty", "all reals": "\\mathbb{R}", "any real number": "\\mathbb{R}",
    "no solution": "\\emptyset", "no solutions": "\\emptyset", "empty set": "\\emptyset",
    "no real solution": "\\emptyset", "no real solutions": "\\emptyset", "none": "\\emptyset",
    "there are no solutions": "\\emptyset", "there is no solution": "\\emptyset",
    "no solutions exist": "\\emptyset", "no real solutions exist": "\\emptyset",
    "infinity": "\\infty", "positive infinity": "\\infty", "negative infinity": "-\\infty",
    "minus infinity": "-\\infty",
}  # fmt: skip
_EXCEPT = re.compile(
    r"all real (?:numbers|values)(?: of [a-z])? (?:except|but|other than)(?: for)? (.+)"
)
_COMPOUND = re.compile(
    r"(\d+(?:\.\d+)?) ?([a-z]+)[ ,]{0,2}(?:and )?(\d+(?:\.\d+)?) ?([a-z]+)", re.IGNORECASE
)
_ARC = re.compile(
    r"(\d+) ?(?:°|\^ ?\{? ?\\circ ?\}?) ?(\d+(?:\.\d+)?) ?(?:'|’|′|\^ ?\{?\\prime\}?)"
)
_INVERSE = re.compile(r"^[a-z] ?\^ ?\{ ?-1 ?\} ?\([a-z]\) ?= ?")
_LABEL = re.compile(
    r"^([^=:,;<>]{1,60}?) ?(=|:|(?:\\in|∈)(?= ?\\?\{)| (?:is|was|equals)(?= )) ?(?=[^ ])"
)
_DEGREES = re.compile(r"\^? ?\{? ?\\circ(?![a-zA-Z]) ?\}?|°|\\?\bdegrees?\b")
_PI = re.compile(r"\\pi(?![a-zA-Z])|π|\bpi\b")
_NEAR = re.compile(
    r"≈|\\approx(?![a-z])|\\simeq(?![a-z])|\b(?:approximately|about|roughly|around)\b"
    r"|\bapprox\b\.?"
)
_COUNTED = re.compile(
    r"(-?\d[\d.,]*) ?(?:\\text ?\{ ?)?((?:times|dozen|hundreds|thousands|millions)\b[a-z ]*)\}?$"
)
_NOTHING = Node("sequence", name="nothing")
_OR = re.compile(r"(?: ?[,;(]| ?\bor| ?\bwhich is| ?i\.e\.)$")
_IN_WORDS = re.compile(r"([-\d.,]+) ?\(([A-Za-z][A-Za-z -]*)\)")
_DECIMAL = re.compile(r"-?\d*+\.?(\d*+)(?=$| ?\\?%| [A-Za-z])")


def _meaning(text: str) -> str:
    """Phrases that stand for a set or for infinity, in notation; two units of one kind as a sum."""
    plain = plain_text(text).casefold()
    if excepted := _EXCEPT.fullmatch(plain):
        return f"\\mathbb{{R}} \\setminus \\{{{excepted[1]}\\}}"
    if arc := _ARC.fullmatch(bare(text)):
        return f"{Fraction(arc[1]) + Fraction(arc[2]) / 60}^\\circ"
    compound = _COMPOUND.fullmatch(bare(plain_of(text)))
    if compound and fits(compound[2], compound[4]):
        scale = ratio(compound[2], compound[4])
        if scale is not None and scale != 1:
            return f"{Fraction(compound[1]) + Fraction(compound[3]) * scale} {compound[2]}"
    return _MEANT.get(plain, text)


def _same_mathematics(reference: str, answer: str, speech: Speech, is_step: bool) -> bool | None:
    """Whether both are equal mathematics; None where the reference has no value."""
    if _INVERSE.match(reference) or "inverse" in speech.question:
        reference, answer = _INVERSE.sub("", reference), _INVERSE.sub("", answer)
    wanted = list(_trees(reference, is_reference=True))
    if not wanted:
        return None
    lists = any(node.op in ("list", "sequence") for node in wanted)
    for text in (answer, *_turned(reference, answer, speech)):
        for node in _candidates(text, lists, speech):
            pairs = (_as_asked(one, _unshared(one, node, speech), speech) for one in wanted)
            if any(
                (is_step or text is not answer or _is_done(text, *pair, speech)) and _is_same(*pair)
                for pair in pairs
            ):
                return True
    return False if any(_is_same(node, node) for node in wanted) else None


_CONTAINERS = words_of(
    "sequence list relation matrix row unit ratio ∪ ∩ ∖ builder neg ± ∓ degrees num sym"
)
"""Operators of a tree that are no arithmetic."""


def _is_done(text: str, reference: Node, answer: Node, speech: Speech) -> bool:
    """Whether an answer is worked out as far as its reference, in the form that is asked for."""
    sides = answer.args if answer.op == "relation" and set(answer.name) <= {"="} else (answer,)
    last = sides[-1]
    if speech.grading == "value":
        return True
    if _is_worked_out(reference) and not any(
        _is_worked_out(side) and (side is last or not symbols(side)) for side in sides
    ):
        return (
            speech.grading == "closed_form"
            and is_closed_form(reference)
            and is_closed_form(last)
            and not poses(speech.question, reference, last)
        )
    if speech.asks_factors and len(_factors(last)) < len(_factors(reference)):
        return False
    if speech.asks_expansion and not _is_expanded(last) and _is_expanded(reference):
        return False
    written = bare(text).rpartition("=")[2]
    return last.op in _CONTAINERS or last == reference or not speech.writes(written)


def _is_worked_out(node: Node) -> bool:
    """Whether numbers stand as numbers (-3/4, 2.5·10^6) rather than as arithmetic to be done."""
    if node.op == "/":
        parts = [arg.args[0] if arg.op == "neg" else arg for arg in node.args]
        if any(part.op != "num" or not part.value for part in parts):
            return False
        return (parts[0].value / parts[1].value).denominator != 1
    if node.op == "^":
        return node.args[0].value == 10
    if node.op == "*":
        return node.args[0].op == "num" and node.args[1].op == "^" and _is_worked_out(node.args[1])
    return node.op in _CONTAINERS and all(map(_is_worked_out, node.args))


def _factors(node: Node) -> tuple[Node, ...]:
    """The factors of a product other than 1, each as often as its power says."""
    if node.op in ("*", "neg"):
        return tuple(one for arg in node.args for one in _factors(arg))
    if node.op == "^" and node.args[1].value.denominator == 1 and 0 < node.args[1].value < 100:
        return _factors(node.args[0]) * int(node.args[1].value)
    return () if node.op == "num" and abs(node.value) == 1 else (node,)


def _is_expanded(node: Node) -> bool:
    """Whether no sum is multiplied."""
    sums = node.op in ("*", "^") and any(arg.op in ("+", "-") for arg in node.args)
    return not sums and all(map(_is_expanded, node.args))


def _is_same(reference: Node, answer: Node) -> bool:
    try:
        return same(reference, answer)
    except (UnreadableError, UndefinedError, ArithmeticError):
        return False


def _unshared(reference: Node, answer: Node, speech: Speech) -> Node:
    """`150%` as 1.5, where the reference is a number that is no whole one."""
    if (
        speech.grading != "strict"
        and answer.op == "unit"
        and unit_text(answer.name) == PERCENT
        and answer.args[0].op == "num"
        and reference.op == "num"
        and reference.value.denominator != 1
        and not speech.asks_percent
    ):
        return Node("num", value=answer.args[0].value / 100)
    return answer


def _as_asked(reference: Node, answer: Node, speech: Speech) -> tuple[Node, Node]:
    """Both as what the question asks for: a list that has an order, a point or an interval."""
    if (
        reference.op == "list"
        and all(one.op == "relation" for one in reference.args)
        and answer.name == "⦃⦄"
        and [one.op for one in answer.args] == ["sequence"]
    ):
        answer = answer.args[0]
    is_tuple = answer.op == "sequence" and answer.name == "()"
    if reference.op == "list" and is_tuple and speech.asks_point is False:
        return reference, _NOTHING
    if speech.asks_order and reference.op in ("list", "sequence"):
        return _in_order(reference), _in_order(_point(answer, speech))
    if reference.op == "sequence" and reference.name == "()" and speech.asks_point is not False:
        answer = _point(answer, speech)
    if reference.op == "sequence" and reference.name == "()" and len(reference.args) == 2:
        is_bounded = answer.op == "list" and all(set(one.name) & set("<>≤≥") for one in answer.args)
        if speech.asks_point is False and answer.op in ("list", "matrix") and not is_bounded:
            return reference, _NOTHING
        is_set = (
            is_bounded
            or answer.name == "]["
            or answer.op == "builder"
            or set(answer.name) & set("<>≤≥∈")
        )
        if speech.asks_point and is_set:
            return reference, _NOTHING
    return reference, answer


def _point(node: Node, speech: Speech) -> Node:
    """A point that is said by its coordinates (`x = 4, y = 3`) or with its name (`V(3, 5)`)."""
    if node.op == "*" and node.args[0].name.isupper() and node.args[-1].op == "sequence":
        return node.args[-1] if len(node.args) == 2 else node
    if (
        node.op == "sequence"
        and node.name == "⦃⦄"
        and [one.op for one in node.args] == ["sequence"]
    ):
        return node.args[0]
    if node.op != "list" or node.name == "or" or {one.name for one in node.args} != {"="}:
        return node
    named = {_name(one.args[0]): one.args[1] for one in node.args if len(one.args) == 2}
    if len(named) < len(node.args) or not all(len(name) == 1 for name in named):
        return node
    return Node("sequence", tuple(named[name] for name in sorted(named)), name="()")


def _in_order(node: Node) -> Node:
    """Values whose order counts as a tuple; what offers one or the other as nothing."""
    if node.op == "relation" and set(node.name) in ({"<"}, {">"}):
        return Node("sequence", node.args, name="()") if _may_hold(node) else _NOTHING
    if node.op != "list":
        return node
    return _NOTHING if node.name == "or" else Node("sequence", node.args, name="()")


def _may_hold(node: Node) -> bool:
    """Whether nothing is known against a chain of `<` or `>`."""
    try:
        values = [complex(number(one)).real for one in node.args]
    except (UnreadableError, UndefinedError, ArithmeticError):
        return True
    return values == sorted(values, reverse=node.name[0] == ">")


def _turned(reference: str, answer: str, speech: Speech) -> tuple[str, ...]:
    """An angle in degrees as one in radians that tell of pi, and the other way round."""
    if not speech.asks_angle:
        return ()
    wanted, given = bool(_DEGREES.search(reference)), bool(_DEGREES.search(answer))
    if given and not wanted and _PI.search(reference):
        return (f"({_DEGREES.sub('', bare(answer))})*\\pi/180",)
    if wanted and not given and _PI.search(answer):
        return (f"({bare(answer)})*180/\\pi",)
    return ()


def _candidates(text: str, is_list: bool, speech: Speech) -> Iterator[Node]:
    """The trees of an answer whose words the question knows; none of an answer that is none."""
    counted = _COUNTED.match(bare(text))
    if counted and speech.counts(counted[2]):  # `3 dozen eggs`, where it is asked how many dozen
        text = counted[1]
    text = _unlabelled(_unrepeated(bare(text)), speech)
    if doubtful(text):
        return
    for part in _sides(text):
        for node in _trees(part, is_list=is_list):
            if (allowed := _allowed(node, speech)) is not None:
                yield allowed


def _unrepeated(text: str) -> str:
    """An answer without its own number in words behind it: `144 (one hundred forty-four)`."""
    found = _IN_WORDS.fullmatch(text)
    if found is None or numerals(found[2]) != join_thousands(found[1]):
        return text
    return found[1]


def _unlabelled(text: str, speech: Speech) -> str:
    """An answer without its label (`Area = `, `f(5) = `); none where that is another function's."""
    label = _LABEL.match(text)
    if label is None or (len(label[1]) == 1 and label[2] in "=:"):
        return text  # a letter is read as an equation
    rest = text[label.end() :]
    if re.search(rf"(?<![A-Za-z\\]){re.escape(label[1][0])}(?![A-Za-z])|[<>≤≥]", rest):
        return text  # no definition but an equation, or several
    if speech.is_asked(label[1]) if len(label[1]) == 1 else speech.labels(label[1]):
        return rest
    return "" if re.fullmatch(r"[A-Za-z]\S{0,6} ?\([^()]+\)", label[1]) else text


def _sides(text: str) -> tuple[str, ...]:
    r"""An answer, or what `7/12 \approx 0.583` says twice; nothing where that is two answers.

    The rounded one must have the digits of the exact one. Of two decimals the first is meant.
    """
    found = _NEAR.search(text)
    if found is None:
        return (text,)
    left = text[: found.start()].strip()
    while joint := _OR.search(left, max(0, len(left) - 10)):
        left = left[: joint.start()]
    right = text[found.end() :].strip(" )")
    if not left.strip(" (") or not right:
        return (right,) if right else ()
    plain = [_DECIMAL.match(join_thousands(side)) for side in (left, right)]
    first, last = (found[0].strip("-.") if found else "" for found in plain)
    if _NEAR.search(right) or not (first or last):
        return ()
    exact, rounded, spelled = (left, right, plain[1]) if last else (right, left, plain[0])
    worth, near = _amount(exact), _amount(rounded)
    if worth is None or near is None or spelled is None:
        return ()
    size = 10.0 ** -len(spelled[1]) / (100 if PERCENT in rounded else 1)
    is_rounded = abs(worth - near) <= size * (0.5 + 1e-9)
    if not is_rounded and not 0 <= abs(worth) - abs(near) < size * (1 - 1e-9):
        return ()
    # a whole number tells too little of what it is rounded from
    return (left, right) if not (first and last) and "." in spelled[0] else (exact,)


def _amount(text: str) -> float | None:
    """What a side of an `≈` is worth; a share in percent is divided by 100."""
    for node in _trees(text):
        value = assigned(node) if node.op == "relation" else node
        if value is None:
            continue
        scale = 1.0
        if value.op == "unit":
            scale = 0.01 if unit_text(value.name) == PERCENT else 1.0
            value = value.args[0]
        try:
            worth = complex(number(value))
        except (UnreadableError, UndefinedError, ArithmeticError):
            continue
        return worth.real * scale if not worth.imag else None
    return None


def _allowed(node: Node, speech: Speech, *, is_alone: bool = True) -> Node | None:
    """A tree whose units the question or the reference knows, else None."""
    if node.op == "unit":
        unit = unit_text(node.name)
        if unit == PERCENT:
            return node.args[0] if speech.asks_percent and not speech.is_share else node
        if not speech.allows(unit):
            return None
    if node.op == "ratio" and not speech.asks_ratio:
        return None
    relations = [one for one in (node, *node.args) if one.op == "relation"]
    names = {name for one in relations for name in map(_name, one.args) if name}
    is_alone = is_alone and len(names) < 2
    if not all(speech.is_asked(name, is_alone=is_alone) for name in names):
        return None
    args = tuple(_allowed(arg, speech, is_alone=is_alone) for arg in node.args)
    if any(arg is None for arg in args):
        return None
    return node._replace(args=tuple(arg for arg in args if arg is not None))


def _name(node: Node) -> str:
    """The letters of a name: `AB`, `x`; of `f(x)` the function's; none of what is no name."""
    if node.op == "abs":
        return _name(node.args[0])
    if not is_name(node):
        return ""
    parts = [_name(arg) for arg in node.args] if node.op == "*" else [node.name]
    return "".join(parts) if "".join(parts).isupper() else parts[0]


def _trees(text: str, *, is_reference: bool = False, is_list: bool = False) -> Iterator[Node]:
    """The trees of a text: letters behind a number as its unit, and as what multiplies it."""
    spelled = _spelled(text, is_list or is_reference)
    found: list[Node] = []
    for units in (True, False):
        node = _tree(spelled, units=units, attached_units=not is_reference)
        if node is not None and node not in found:
            found.append(node)
            yield node


def _tree(text: str, *, units: bool = True, attached_units: bool = True) -> Node | None:
    try:
        return parse(text, units=units, attached_units=attached_units)
    except UnreadableError:
        return None


def _spelled(text: str, is_list: bool) -> str:
    """A text with its thousands joined, its number words in digits, its decimal comma a point."""
    joined = join_thousands(text.replace("{,}", ",").replace("\\!", ""))
    joined = re.sub(r"(?<=\d)(?:\\[,;: ]|~|\u202f|\u2009|\u00a0)(?=\d{3}(?!\d))", "", joined)
    return numerals(joined if is_list else decimal_commas(joined))
