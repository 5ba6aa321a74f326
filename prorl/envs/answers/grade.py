r"""Decides whether a final answer is the reference.

As a choice, as text, in another base, as a time of the day or as mathematics, in this order. An
answer is one candidate with one reading: what offers two that differ (`17 \approx 42`, `A, B`) is
wrong, and so is a number with words behind it that neither the question nor the reference knows.

Three-valued: right, wrong, or None where these rules cannot read the *reference*; an answer that
they cannot read is wrong.

>>> grade("3\\frac{1}{2}", "7/2"), grade("5", "not 5"), grade("\\int_0^1 f", "2")[0]
((True, 'mathematics'), (False, 'mathematics'), None)
>>> grade("18", "18 eggs", "How many eggs are left?"), grade("18", "18 lakh")[0]
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
from prorl.envs.answers.measures import PERCENT, QuestionContext, fits, ratio, unit_text
from prorl.envs.answers.notation import (
    UnreadableError,
    decimal_commas,
    join_thousands,
)
from prorl.envs.answers.numerals import numerals
from prorl.envs.answers.parse import Node, parse
from prorl.envs.answers.words import (
    bare,
    exact_text,
    is_hedged,
    plain_of,
    plain_text,
    same_case,
    same_words,
    strip_agreement_words,
    strip_markup,
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
"""The constant of integration, whose letter is free."""
Rule = Callable[[str, str, QuestionContext], bool | None]


Grading = Literal["strict", "closed_form", "value"]
GRADINGS: tuple[Grading, ...] = get_args(Grading)
"""The degrees to which an answer must be worked out where the reference is a number: `strict` as
far as that, `closed_form` to one number or a closed form of it (`closed.py`), `value` not at all.
"""


def grade(
    reference: str,
    answer: str,
    question: str = "",
    grading: str = "closed_form",
    *,
    is_step: bool = False,
) -> tuple[bool | None, str]:
    """Returns (right, wrong or None for an unreadable reference; the rule that decided).

    `is_step`: arithmetic that is still to be done may be right, as before `= 84`.
    """
    if len(reference) > MAX_REFERENCE_CHARS:
        return None, "too long a reference"
    reference, answer = (_ROW_GAP.sub(r"\\\\ ", text) for text in (reference, answer))
    if not answer.strip() or len(answer) > MAX_ANSWER_CHARS or "~~" in answer:  # struck out
        return False, "no usable answer"
    reference, answer = strip_markup(reference), strip_markup(answer)
    if letter := _CONSTANT.search(answer) if reference.endswith("C") else None:
        is_free = letter[1] not in re.sub(r"\\[a-zA-Z]+", "", reference)
        answer = f"{answer[:-1]}C" if is_free else answer
    speech = QuestionContext(question, reference, grading)
    reference, answer = (_for_all(text, speech) for text in (reference, answer))
    for name, rule in _RULES:
        verdict = rule(reference, answer, speech)
        if verdict is not None:
            return verdict, name
    sides = _shortened(re.split(r"(?<![<>!\\\\])=", answer))
    answer = "=".join(sides)
    if 1 < len(sides) <= _MAX_SIDES:
        if speech.asks_percent and not speech.is_share and "%" in sides[-1]:
            return grade(f"{reference}\\%", answer, question, grading)
        if all(
            grade(reference, side, question, grading, is_step=True)[0] for side in sides
        ) and any(grade(reference, side, question, grading)[0] for side in (sides[0], sides[-1])):
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


def _for_all(text: str, speech: QuestionContext) -> str:
    """Returns a formula without `for all real x` behind it, if the question names that domain."""
    match = _FOR_ALL.search(text)
    if match is None:
        return text
    words = (match["words"] or match["plain"] or "").split()
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
    sign = match["set"] or _SETS.get(match["sign"] or "")
    domains = {_DOMAIN_WORDS[word] for word in words if word in _DOMAIN_WORDS}
    domains |= {sign} if sign else set()
    context = f"{speech.question} {speech.reference}"
    if speech.has_question and not all(re.search(_DOMAINS[name], context) for name in domains):
        return text
    return text[: match.start()].strip()


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
    """Returns arithmetic of two measured numbers or more, without what they are measured in."""
    units = _MEASURED.findall(side)
    if (
        not _CALCULATES.search(side)
        or len(units) < 2
        or not all(len(unit) > 1 or unit in "mgsLh" for unit in units)
    ):
        return side
    return _MEASURED.sub("", side) if all(map(parse_unit, units)) else side


# ---- choices


_CHOICE = re.compile(r"\(? ?([A-J]) ?[).:]?")
_SEVERAL = re.compile(r"(?:both )?\(?[A-J]\)?(?:(?: ?[,;&] ?| and |, and )\(?[A-J]\)?)+")
_LETTERED = re.compile(r"\(([A-J])\) ?[:.]? ?(.+)")
_CHOSEN = re.compile(
    r"(?:(?:the )?(?:correct |best )?(?:answer|option|choice)(?: is)?[ :]*)*"
    r"[(\[{]? ?([A-Ja-j]) ?(?:[)\]}.:,]+|$) ?(.*)",
    re.IGNORECASE,
)


def _choice(reference: str, answer: str, speech: QuestionContext) -> bool | None:
    """Grades a reference of one capital letter or several, with or without the choice's text."""
    plain = plain_of(reference)
    letter = _CHOICE.fullmatch(plain)
    if letter is None:
        # elsewhere `AB` is a segment or a product
        several = _letters(plain) if speech.choice("A") or not speech.has_question else None
        if several and several == _letters(bare(plain_of(answer))):
            return True
        return _choice_with_text(reference, answer, speech)
    match = _CHOSEN.fullmatch(bare(plain_of(answer)).replace("~", " "))
    listed = speech.choice(letter[1])
    if match is None:  # the choice's text alone
        return bool(listed and grade(listed, answer, speech.question, speech.grading)[0])
    option = match[1] if speech.has_question and not listed else match[1].upper()
    if option != letter[1]:
        return False
    return not match[2] or _is_text_of(letter[1], match[2], speech)


def _is_text_of(letter: str, text: str, speech: QuestionContext) -> bool:
    """Returns whether a text is that of a choice in the question's list; any number where it has
    none.
    """
    listed = speech.choice(letter)
    if not listed:
        number_in = numerals(text)
        return any(map(str.isdigit, number_in)) and _tree(number_in) is not None
    return bool(grade(listed, text, speech.question, speech.grading)[0])


def _letters(text: str) -> frozenset[str]:
    """The letters of `AC`, `A, C` or `both A and C`; none of any other text."""
    letters = text
    if _SEVERAL.fullmatch(text):
        letters = "".join(re.findall(r"\b[A-J]\b", text))
    elif not re.fullmatch(r"[A-J]{2,5}", text) or list(text) != sorted(set(text)):
        return frozenset()
    return frozenset(letters)


def _choice_with_text(reference: str, answer: str, speech: QuestionContext) -> bool | None:
    """Grades a reference such as `(B) 24` by its letter, its text or both."""
    reference_match = _LETTERED.fullmatch(plain_of(reference).replace("~", " "))
    if reference_match is None:
        return None
    letter, text = reference_match[1], reference_match[2]
    answer_match = _CHOSEN.fullmatch(bare(plain_of(answer)).replace("~", " "))
    if answer_match is not None:
        right = answer_match[1].upper() == letter
        return right and (
            not answer_match[2]
            or bool(grade(text, answer_match[2], speech.question, speech.grading)[0])
        )
    return grade(text, answer, speech.question, speech.grading)[0]


# ---- texts

_WORDLIKE = re.compile(r"[^\W\d_][\w '’.,&/()-]*")
_AS_WRITTEN = re.compile(
    r"\d+(?: ?[-–/.] ?\d+){2,9}|\d+ ?[-–] ?\d+|\d+ ?(?:×|x|\\times) ?\d+"
    r"|.*(?:\\(?:land|lor|wedge|vee|neg|lnot)(?![a-zA-Z])|[∧∨¬]).*"
)
"""A date, a score, a matrix' size, a formula of logic: no arithmetic."""
_PADDED = re.compile(r"0\d+")


def _text(reference: str, answer: str, speech: QuestionContext) -> bool | None:
    """Grades sign by sign, or as words; where the reference is words, nothing else is right."""
    if exact_text(reference) == exact_text(answer):
        return True
    plain = plain_of(reference)
    is_clock = _CLOCK.fullmatch(plain) and speech.has_question and not speech.asks_ratio
    is_code = speech.asks_code and _PADDED.fullmatch(plain)
    if is_clock or is_code or _AS_WRITTEN.fullmatch(plain) or speech.multiplies_matrices:
        return _squeezed(reference) == _squeezed(bare(answer))
    words = re.findall(r"[^\W\d_]+", plain)
    wordy = bool(_WORDLIKE.fullmatch(plain)) and any(len(word) > 1 for word in words)
    if not wordy or numerals(plain) != plain:
        return None
    expected = plain_text(reference)
    same = same_case if speech.asks_order else same_words
    if any(same(expected, plain_text(text)) for text in _answer_forms(answer, speech)):
        return True
    if expected.casefold() in _MEANT:
        return None
    is_word = len(max(words, key=len)) > 3 or plain.lower() in ("no", "yes")
    is_word |= plain.isalpha() and plain.isupper()  # `XIX`, `SAS`
    return False if is_word or _tree(plain) is None else None


def _answer_forms(answer: str, speech: QuestionContext) -> tuple[str, ...]:
    stated = re.match(r"^([A-Za-z ]+) (?:is|are|was) (.+)$", answer)
    short = stated[2] if stated and speech.labels(stated[1]) else answer
    return (
        answer,
        short,
        re.sub(r"^(?:on|in|at) (?=[A-Z])", "", short),
        strip_agreement_words(answer),
    )


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


def _base(reference: str, answer: str, speech: QuestionContext) -> bool | None:
    """Grades digits in the reference's base, or the same number in another base."""
    expected, actual = _in_base(reference), _in_base(bare(answer))
    if expected is None:
        if actual is None:
            return None
        joined = join_thousands(reference)
        return joined.isdigit() and _value(*actual) == int(joined)
    if actual is None:
        digits = re.sub(r"[\s,]", "", bare(answer))
        return digits.upper().lstrip("0") == expected[0].upper().lstrip("0")
    return _value(*expected) is not None and _value(*expected) == _value(*actual)


def _in_base(text: str) -> tuple[str, int] | None:
    text = plain_of(text.replace("\\_", "_").replace("\\text", ""))
    if match := _PREFIXED.fullmatch(text):
        return match[2], {"b": 2, "o": 8, "x": 16}[match[1].lower()]
    match = _BASED.fullmatch(text) or _IN_BASE.fullmatch(text)
    if match is None or not re.search(r"\d", match[1]):
        return None
    base = int(match[2]) if match[2].isdigit() else _BASES.get(match[2].lower(), 0)
    return (match[1], base) if 2 <= base <= 36 and _value(match[1], base) is not None else None


def _value(digits: str, base: int) -> int | None:
    try:
        return int(digits, base)
    except ValueError:
        return None


# ---- times of the day: `2:30 p.m.`

_TIME = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))? ?([ap])\.? ?m\b\.?", re.IGNORECASE)
_CLOCK = re.compile(r"(\d{1,2}):([0-5]\d)(?::([0-5]\d))?")


def _time(reference: str, answer: str, speech: QuestionContext) -> bool | None:
    """Grades a time of the day, where the reference has a.m. or p.m."""
    expected = _seconds(reference)
    if expected is None:
        return None
    answer = re.sub(r"^(?:at|by) ", "", bare(answer))
    for phrase, half in ((" in the morning", " am"), (" in the (?:afternoon|evening)", " pm")):
        answer = re.sub(f"(?<=\\d){phrase}$", half, answer)
    actual = _seconds(bare(answer))
    if actual is None and (clock := _CLOCK.fullmatch(bare(plain_of(answer)))):
        hour = int(clock[1])
        actual = (hour * 60 + int(clock[2])) * 60 + int(clock[3] or 0)
        is_half = 1 <= hour < 12 and not clock[1].startswith("0")
        return actual in (expected, expected - 12 * 3600 if is_half else expected)
    return actual == expected


def _seconds(text: str) -> int | None:
    """Returns seconds since midnight of `2:30 p.m.`."""
    plain = plain_of(text.replace("\\text", " ").replace("\\ ", " "))
    match = _TIME.fullmatch(" ".join(re.sub(r"[{}~]", " ", plain).split()))
    if match is None or not 1 <= int(match[1]) <= 12:
        return None
    hour = int(match[1]) % 12 + 12 * (match[4].lower() == "p")
    return (hour * 60 + int(match[2])) * 60 + int(match[3] or 0)


def _congruence(reference: str, answer: str, speech: QuestionContext) -> bool | None:
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


def _same_mathematics(
    reference: str, answer: str, speech: QuestionContext, is_step: bool
) -> bool | None:
    """Returns whether both are equal mathematics; None where the reference has no value."""
    if _INVERSE.match(reference) or "inverse" in speech.question:
        reference, answer = _INVERSE.sub("", reference), _INVERSE.sub("", answer)
    reference_trees = list(_trees(reference, is_reference=True))
    if not reference_trees:
        return None
    lists = any(node.op in ("list", "sequence") for node in reference_trees)
    for text in (answer, *_turned(reference, answer, speech)):
        for node in _candidates(text, lists, speech):
            pairs = (
                _in_question_form(tree, _unshared(tree, node, speech), speech)
                for tree in reference_trees
            )
            if any(
                (is_step or text is not answer or _is_done(text, *pair, speech)) and _is_same(*pair)
                for pair in pairs
            ):
                return True
    return False if any(_is_same(node, node) for node in reference_trees) else None


_CONTAINERS = words_of(
    "sequence list relation matrix row unit ratio ∪ ∩ ∖ builder neg ± ∓ degrees num sym"
)
"""Operators of a tree that are no arithmetic."""


def _is_done(text: str, reference: Node, answer: Node, speech: QuestionContext) -> bool:
    """Returns whether an answer is worked out as far as its reference, in the form that is asked
    for.
    """
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
    """Returns whether numbers stand as numbers (-3/4, 2.5·10^6) rather than as arithmetic to be
    done.
    """
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
    """Returns the factors of a product other than 1, each as often as its power says."""
    if node.op in ("*", "neg"):
        return tuple(factor for arg in node.args for factor in _factors(arg))
    if node.op == "^" and node.args[1].value.denominator == 1 and 0 < node.args[1].value < 100:
        return _factors(node.args[0]) * int(node.args[1].value)
    return () if node.op == "num" and abs(node.value) == 1 else (node,)


def _is_expanded(node: Node) -> bool:
    """Returns whether no sum is multiplied."""
    sums = node.op in ("*", "^") and any(arg.op in ("+", "-") for arg in node.args)
    return not sums and all(map(_is_expanded, node.args))


def _is_same(reference: Node, answer: Node) -> bool:
    try:
        return same(reference, answer)
    except (UnreadableError, UndefinedError, ArithmeticError):
        return False


def _unshared(reference: Node, answer: Node, speech: QuestionContext) -> Node:
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


def _in_question_form(reference: Node, answer: Node, speech: QuestionContext) -> tuple[Node, Node]:
    """Returns both as the question asks for them: as an ordered list, a point or an interval."""
    if (
        reference.op == "list"
        and all(node.op == "relation" for node in reference.args)
        and answer.name == "⦃⦄"
        and [node.op for node in answer.args] == ["sequence"]
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
        is_bounded = answer.op == "list" and all(
            set(node.name) & set("<>≤≥") for node in answer.args
        )
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


def _point(node: Node, speech: QuestionContext) -> Node:
    """Returns the point of its coordinates (`x = 4, y = 3`), or of its name (`V(3, 5)`)."""
    if node.op == "*" and node.args[0].name.isupper() and node.args[-1].op == "sequence":
        return node.args[-1] if len(node.args) == 2 else node
    if (
        node.op == "sequence"
        and node.name == "⦃⦄"
        and [arg.op for arg in node.args] == ["sequence"]
    ):
        return node.args[0]
    if node.op != "list" or node.name == "or" or {arg.name for arg in node.args} != {"="}:
        return node
    named = {_name(arg.args[0]): arg.args[1] for arg in node.args if len(arg.args) == 2}
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
    """Returns whether nothing is known against a chain of `<` or `>`."""
    try:
        values = [complex(number(arg)).real for arg in node.args]
    except (UnreadableError, UndefinedError, ArithmeticError):
        return True
    return values == sorted(values, reverse=node.name[0] == ">")


def _turned(reference: str, answer: str, speech: QuestionContext) -> tuple[str, ...]:
    """Returns an angle in degrees as one in radians that tell of pi, and the other way round."""
    if not speech.asks_angle:
        return ()
    reference_in_degrees = bool(_DEGREES.search(reference))
    answer_in_degrees = bool(_DEGREES.search(answer))
    if answer_in_degrees and not reference_in_degrees and _PI.search(reference):
        return (f"({_DEGREES.sub('', bare(answer))})*\\pi/180",)
    if reference_in_degrees and not answer_in_degrees and _PI.search(answer):
        return (f"({bare(answer)})*180/\\pi",)
    return ()


def _candidates(text: str, is_list: bool, speech: QuestionContext) -> Iterator[Node]:
    """The trees of an answer whose words the question knows; none of an answer that is none."""
    counted = _COUNTED.match(bare(text))
    if counted and speech.counts(counted[2]):  # `3 dozen eggs`, where it is asked how many dozen
        text = counted[1]
    text = _unlabelled(_unrepeated(bare(text)), speech)
    if is_hedged(text):
        return
    for part in _sides(text):
        for node in _trees(part, is_list=is_list):
            if (allowed := _allowed(node, speech)) is not None:
                yield allowed


def _unrepeated(text: str) -> str:
    """Returns an answer without its number in words behind it: `144 (one hundred forty-four)`."""
    match = _IN_WORDS.fullmatch(text)
    if match is None or numerals(match[2]) != join_thousands(match[1]):
        return text
    return match[1]


def _unlabelled(text: str, speech: QuestionContext) -> str:
    """Returns an answer without its label (`Area = `, `f(5) = `); none if another's."""
    label = _LABEL.match(text)
    if label is None or (len(label[1]) == 1 and label[2] in "=:"):
        return text  # a letter is read as an equation
    rest = text[label.end() :]
    if re.search(rf"(?<![A-Za-z\\]){re.escape(label[1][0])}(?![A-Za-z])|[<>≤≥]", rest):
        return text  # no definition but an equation, or several
    if speech.may_name_answer(label[1]) if len(label[1]) == 1 else speech.labels(label[1]):
        return rest
    return "" if re.fullmatch(r"[A-Za-z]\S{0,6} ?\([^()]+\)", label[1]) else text


def _sides(text: str) -> tuple[str, ...]:
    r"""Returns an answer, or both sides of `7/12 \approx 0.583`; nothing if those are two answers.

    The rounded one must have the digits of the exact one. Of two decimals the first is meant.
    """
    match = _NEAR.search(text)
    if match is None:
        return (text,)
    left = text[: match.start()].strip()
    while joint := _OR.search(left, max(0, len(left) - 10)):
        left = left[: joint.start()]
    right = text[match.end() :].strip(" )")
    if not left.strip(" (") or not right:
        return (right,) if right else ()
    plain = [_DECIMAL.match(join_thousands(side)) for side in (left, right)]
    first, last = (match[0].strip("-.") if match else "" for match in plain)
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
    """Returns the value of a side of an `≈`; a share in percent is divided by 100."""
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


def _allowed(node: Node, speech: QuestionContext, *, is_alone: bool = True) -> Node | None:
    """Returns a tree whose units the question or the reference knows, else None."""
    if node.op == "unit":
        unit = unit_text(node.name)
        if unit == PERCENT:
            return node.args[0] if speech.asks_percent and not speech.is_share else node
        if not speech.allows(unit):
            return None
    if node.op == "ratio" and not speech.asks_ratio:
        return None
    relations = [relation for relation in (node, *node.args) if relation.op == "relation"]
    names = {name for relation in relations for name in map(_name, relation.args) if name}
    is_alone = is_alone and len(names) < 2
    if not all(speech.may_name_answer(name, is_alone=is_alone) for name in names):
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
    """Yields the trees of a text: letters behind a number as its unit, and as its factor."""
    spelled = _spelled(text, is_list or is_reference)
    trees: list[Node] = []
    for units in (True, False):
        node = _tree(spelled, units=units, attached_units=not is_reference)
        if node is not None and node not in trees:
            trees.append(node)
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
