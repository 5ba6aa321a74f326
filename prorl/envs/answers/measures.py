r"""Reads what stands behind a number, units and counted things, and decides which of it may stand
there.

Strict, since a wrong answer that pays teaches more than a notation that does not. Behind a number
may stand the reference's own unit, the thing or unit that the question asks for in these words
(`How many red marbles`, `in hours`), or a unit of what it asks for (`area`, `how old`) that is made
of the units that the question itself writes. Before it may stand what the question asks for in
these words, or `answer`, `total` and the like. No other words stand there, no sentences. Where no
question is known, units of measurement pass.

>>> speech = QuestionContext("How many eggs does Janet find each day?", "18")
>>> [speech.allows(unit) for unit in ("eggs", "eggs a day", "lakh", "apples", "km", "dollars")]
[True, True, False, False, False, False]
>>> fits("km", "kg"), fits("hours", "min"), fits("apples", ""), fits("apples", "pears")
(False, True, True, False)
"""

from __future__ import annotations

import math
import re
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING

from prorl.envs.units import factor, parse_unit, same_kind, simple_units, words_of

if TYPE_CHECKING:
    from pint import Unit

PERCENT = "%"
_MIN_WORDS = 4
"""The least number of words of a question that says enough to tell what it asks for."""
_ARTICLES = words_of("the a an his her its their my our")
_TITLES = words_of("answer result value final total amount number of the")
"""Words of any label."""
_IRREGULAR = {
    "children": "child", "people": "person", "men": "man", "women": "woman", "feet": "foot",
    "mice": "mouse", "geese": "goose", "teeth": "tooth", "knives": "knife", "loaves": "loaf",
    "leaves": "leaf", "shelves": "shelf", "halves": "half", "pence": "penny", "bucks": "dollar",
}  # fmt: skip
_SPELLED = {
    "daily": "day", "weekly": "week", "monthly": "month", "yearly": "year", "annual": "year",
    "annually": "year", "hourly": "hour", "old": "year", "age": "year", "ages": "year",
    "older": "year", "younger": "year", "$": "dollar", "¢": "cent", "€": "euro", "£": "GBP",
    "¥": "yen", "₹": "rupee", "°": "degree", "°c": "celsius", "°f": "fahrenheit",
    "in": "", "us": "", "as": "", "am": "", "pm": "", "has": "", "second": "",
}  # fmt: skip
"""Words and signs of a question that tell of a unit."""
_ASKS = re.compile(
    r"^(?:find|determine|calculate|compute|evaluate|express|give|solve|what|how)\b|\?",
    re.IGNORECASE,
)
_OF = (
    r"(?:(?:of|all|the|real|its|his|her|their|total|final"
    r"|(?:values?|measure|solutions?|length|number) (?:of|to)) )*"
)
"""Words before what is asked for that tell nothing of it."""
_LEADING = re.compile(f"^{_OF}", re.IGNORECASE)
_VERB = re.compile(
    r"\b(?:what (?:is|are|was|were|will be)|what|which|find|determine|calculate|compute|evaluate"
    rf"|express|give|solve(?: for)?|how(?: many)?)\b *{_OF}",
    re.IGNORECASE,
)
_COUNTED = re.compile(
    r"\b(?:how many|(?:is|was|be|find|determine|calculate|compute|give)"
    r" (?:the )?(?:\w+ )?number of)"
    r"((?: [\w'/-]+){1,6})",
    re.IGNORECASE,
)
_PLURAL = re.compile(
    r".*?(?:[a-z]{2}(?<![isu])s|\b(?:people|children|men|women|feet))\b(?: of \w+)?"
)
"""The part of `trees remain` that is counted."""
_CLOSING = re.compile(r" ?\b(?:(left|remaining)|in total|total|altogether)$")
"""Words behind a counted thing that say no more than that it is counted."""
_SIGNS = re.compile(r"(?<![\^\w-])-?\d|[=<>+!?|@#&%×]|\^(?!-?\d)")
"""The signs that no unit has."""
_IN_UNIT = re.compile(r"\b(?:in|into|to) ((?:square |cubic )?[^\W\d]\w*(?:(?: per | an? |/)\w+)?)")
_MAX_UNIT_WORDS = 3
_MAX_WRITTEN = 200
"""Characters of an expression that is looked for in the question."""
_KIND = re.compile(
    r"(?P<speed>\bhow fast\b|\bspeed\b|\bvelocity\b)|(?P<area>\barea\b)|(?P<volume>\bvolume\b)"
    r"|(?P<length>\bhow (?:far|tall|high|wide|deep)\b|\b(?:distance|height|length|width|depth"
    r"|perimeter|circumference|radius|diameter|hypotenuse|diagonal|side)\b)"
    r"|(?P<span>\bhow long\b)|(?P<time>\bhow old\b|\bage\b|\btime\b)"
    r"|(?P<mass>\bheavy\b|\bweigh|\bmass\b)|(?P<angle>\bangle|\bdegree|°|\\circ|\brotat|\barc)"
    r"|(?P<heat>\btemperature\b)"
    r"|(?P<money>\b(?:cost|price|profit|revenue|income|wages?|salary|bill|money|change|earn(?:ings)?|pay|paid"
    r"|spen[dt]|make|save|charge|owe|raise|worth|expensive)\b)",
    re.IGNORECASE,
)
"""The kind of quantity that is asked for, by the first word behind the verb that asks."""
_MADE_OF = {
    "speed": ("m/s",), "area": ("m^2",), "volume": ("m^3", "l"), "length": ("m",), "time": ("s",),
    "span": ("m", "s"), "mass": ("g",), "angle": ("degree",),
    "heat": ("celsius", "fahrenheit", "degree"),
    "money": ("dollar", "euro", "GBP", "yen", "rupee"),
}  # fmt: skip
_PLAIN_UNITS = {"units": "length", "square units": "area", "cubic units": "volume"}
_ANGLE = re.compile(r"(?<![a-z])angle|degree|°|\\circ|radian|rotat|\bturns?\b|\barc", re.IGNORECASE)
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?|°[CF]\b|[$¢€£¥₹°]")
_LETTER = re.compile(
    r"(?<![A-Za-z'’\\])(?:[B-HJ-Zb-z]|[aA](?=[,)=+*^_<>}$]))(?![^\W_])(?!['’]|-shirt)"
)
"""A letter alone that is neither the article nor the pronoun."""
_AGGREGATE = re.compile(
    r"^(?:\w+ )?(?:sum|product|difference|mean|average|slope|area|degree|coefficient"
    r"|discriminant|remainder|distance)\b|\\(?:int|sum|lim)(?![a-z])"
)
"""The aggregate that is asked of an expression, whose letters are then no names of the answer."""
_RELATION = re.compile(r"[=<>≤≥≠]|\\(?:leq?|geq?|lt|gt|neq?)(?![a-zA-Z])")
_ORDER = re.compile(
    r"\b(?:in|by) (?:\w+ ){0,2}order\b|\b(?:arrange|rank|sort|ascending|descending)\b|^order "
    r"|\b(?:in|de)creasing order|\border(?:ed)? (?:from|by|of)\b"
    r"|\bfrom (?:the )?(?:\w+est|least|most) to (?:the )?(?:\w+est|most|least)\b"
    r"|\bfirst,? (?:and )?second\b|\brespectively\b|\b(?:next|first) \w+ (?:terms|numbers)\b"
    r"|\b(?:are|find|determine|calculate|compute|give|state) the \w+ and (?:the )?\w"
    r"|\b(?:find|for|of|are) \$?[a-z]\$?(?:, \$?[a-z]\$?)* and \$?[a-z]\$?(?![\w(])",
    re.IGNORECASE,
)
_INTERVAL = re.compile(
    r"inequalit|\binterval|\bdomain|\brange\b|[<>≤≥]|\\(?:leq?|geq?|lt|gt)\b|\bvalues of\b"
    r"|\bfor (?:which|what)\b|\b(?:in|de)creasing\b|converge|\bsolution set\b|\bset of\b",
    re.IGNORECASE,
)
_POINT = re.compile(
    r"coordinate|\bpoint|\bvert(?:ex|ices)|\bpairs?\b|\bcent(?:er|re)\b|midpoint|vector|intersect"
    r"|\bfoc(?:us|i)\b|\btriples?\b|\btuple",
    re.IGNORECASE,
)
_ASKS_PERCENT = re.compile(
    r"\b(?:what|which|how many|how much|in|as|as a|find the|express)\b[^.?!\d]{0,40}"
    r"(?:\bper ?cent|\\?%)",
    re.IGNORECASE,
)
_RATE = re.compile(r"(.+?) ?(?:\b(?:per|each|every|an?) |/ ?)(day|week|month|year|hour|minute)")
_A_VALUE = r"(?:\d+(?:\.\d+)?(?!\.?\w|[\\(^*/]| ?[-+*/^(]| [xyz]\b)|\\)"
_SLOPE = re.compile(r"\\[dt]?frac ?\{d[a-z]?\} ?\{d[a-z]\} ?(?:[a-z] ?\([a-z]\))?")


_SPACED = re.compile(r" ?([-+*/^]) ?")


_ASKS_CODE = re.compile(
    r"\b(?:codes?|passwords?|passcodes?|pins?|zip|postal|(?:tele)?phone|serial|combination of the"
    r"|lock|leading zeros?|identifiers?|ids?|plates?|barcodes?|isbn|binary|octal|hexadecimal"
    r"|(?:string|sequence) of digits|digit string|(?:first|last) (?:\w+ )?digits)\b",
    re.IGNORECASE,
)
_ASKS_NUMBER = re.compile(
    r"\bhow many\b|\bnumber of\b|\bremainder\b|\bprobability\b|\b(?:sum|product) of\b",
    re.IGNORECASE,
)


MAX_QUESTION_CHARS = 16_000
"""The limit of a question: of a longer one the end is read, which asks: patterns here may take its
square in steps.
"""


class QuestionContext:
    """The things that a question and its reference speak of."""

    def __init__(self, question: str, reference: str, grading: str = "closed_form") -> None:
        question = question[-MAX_QUESTION_CHARS:]
        self.question, self.reference, self.grading = question, reference, grading
        self._question = " ".join(question.split())
        self._reference = reference
        self.has_question = len(_WORD.findall(self._question)) >= _MIN_WORDS

    @cached_property
    def asks_percent(self) -> bool:
        """Returns whether a share is asked for in percent: `25%` is then 25."""
        return bool(_ASKS_PERCENT.search(self._asking))

    @cached_property
    def asks_code(self) -> bool:
        """Returns whether digits are asked for that are no number: `007` is then another than
        `7`.
        """
        return bool(_ASKS_CODE.search(self._asking)) and not _ASKS_NUMBER.search(self._asking)

    @cached_property
    def is_share(self) -> bool:
        """Returns whether the reference itself is in percent."""
        return re.search(r"%|\bper ?cent", self._reference) is not None

    @cached_property
    def _asking(self) -> str:
        """The sentences that ask; the whole question where none does."""
        sentences = re.split(r"(?<=[.?!])(?<![ap]\.m\.) ", self._question)
        return " ".join(filter(_ASKS.search, sentences)) or self._question

    @cached_property
    def _targets(self) -> tuple[str, ...]:
        """Returns what the question asks for: `area of a square` of `What is the area`."""
        verbs = list(_VERB.finditer(self._asking))
        ends = [*(verb.start() for verb in verbs[1:]), len(self._asking)]
        return tuple(
            self._asking[verb.end() : end].strip(" $")
            for verb, end in zip(verbs, ends, strict=False)
        )

    @cached_property
    def _kind(self) -> str:
        """Returns what the question asks for, of the table; empty where it is none of that."""
        first = _VERB.search(self._asking)
        match = _KIND.search(self._asking, first.start()) if first else None
        return str(match.lastgroup) if match else ""

    @cached_property
    def _units(self) -> tuple[Unit, ...]:
        """Returns the units that the question and the reference write."""
        units = []
        for word in dict.fromkeys(_WORD.findall(f"{self._question} {self._reference}")):
            spelled = _SPELLED.get(word.lower(), word)
            # other letters alone are names in a question rather than units
            is_unit = len(spelled) > 1 or spelled in tuple("mgsLh")
            if is_unit and (unit := parse_unit(spelled)) is not None:
                units.append(unit)
        return tuple(units)

    @cached_property
    def _target_units(self) -> tuple[Unit, ...]:
        """Returns the units that are asked for: `in hours`, `how many square meters`."""
        spelled = _IN_UNIT.findall(self._asking)
        for words in map(str.split, _COUNTED.findall(self._asking)):
            spelled += [" ".join(words[:size]) for size in range(1, _MAX_UNIT_WORDS + 1)]
        units = (parse_unit(text) for text in spelled if _SPELLED.get(text.lower(), text))
        return tuple(unit for unit in units if unit is not None)

    def counts(self, thing: str) -> bool:
        """Returns whether the question asks in these words how many of it."""
        thing_stems = stems(thing)
        for phrase in _COUNTED.findall(self._asking):
            plural = _PLURAL.match(phrase)
            words = stems(plural[0] if plural else phrase.split()[0])
            head = words[: words.index("of")] if "of" in words else words
            if words[:1] == ("dozen",) != thing_stems[:1]:
                continue  # `4 eggs` are no four dozen
            if thing_stems and thing_stems in (words, words[:1], head[-len(thing_stems) :]):
                return True
        return False

    def allows(self, unit: str) -> bool:
        """Returns whether a number may stand before this: a unit or the thing that is asked for."""
        closing = _CLOSING.search(unit)
        if closing and (not closing[1] or re.search(r"\b(?:left|remain)", self._asking)):
            unit = unit[: closing.start()]
        if not unit:
            return True
        if _SIGNS.search(unit):
            return False
        if re.fullmatch(r"[^\d^*]+", unit) and self.counts(unit):
            return True
        rate = _RATE.fullmatch(unit)
        if (
            rate
            and not _RATE.fullmatch(rate[1])
            and self._targets
            and re.search(rf"\b(?:per|each|every|an?) {rate[2]}\b", self._targets[-1])
            and self.allows(rate[1])
        ):
            return True
        own = _unit_of(self._reference)
        answer_unit, reference_unit = parse_unit(unit.removesuffix(" old")), parse_unit(own)
        if answer_unit is None:
            return stems(unit) == stems(own) != () or self._is_plain(unit)
        if not self.has_question or (
            reference_unit is not None and same_kind(reference_unit, answer_unit)
        ):
            return True
        if self._target_units:
            return any(_is_same(answer_unit, target) for target in self._target_units)
        return self._measures(answer_unit)

    def _is_plain(self, unit: str) -> bool:
        """Returns whether it is `square units` of an area, where the question writes no unit."""
        kind = _PLAIN_UNITS.get(unit if unit.endswith("s") else f"{unit}s")
        return kind is not None and (
            not self.has_question or (kind == self._kind and not self._units)
        )

    def _measures(self, unit: Unit) -> bool:
        """Returns whether the question's kind has this unit, made of units that it writes."""
        kinds = map(parse_unit, _MADE_OF.get(self._kind, ()))
        if self.asks_percent or not any(kind and same_kind(kind, unit) for kind in kinds):
            return False
        for simple_unit in simple_units(unit):
            written = [other for other in self._units if same_kind(simple_unit, other)]
            # of metres and centimetres in one question nobody says which is meant
            if not written or not all(_is_same(simple_unit, other) for other in written):
                return False
        return True

    def choice(self, letter: str) -> str:
        """Returns the text of a choice in the question's list; empty where it lists none."""
        match = re.search(
            rf"(?s)(?:^|[\s(]){letter}[).:] ?(.*?)"
            rf"(?=[\s(]{{1,4}}[A-J][).:] |[\s(]{{1,4}}[A-J]\)|$)",
            self._question,
        )
        return match[1].strip(" ,;.") if match else ""

    def labels(self, text: str) -> bool:
        """Returns whether words before a number are what the question asks for, in its words."""
        if self.asks_slope and (_SLOPE.fullmatch(text) or re.fullmatch(self._slope, text)):
            return True
        label, text = text, _LEADING.sub("", _plain(text))
        if {word.lower() for word in text.split()} <= _TITLES:
            return True
        if not self.has_question:
            return not re.search(r"[+*/^-]|^\d|(?<!\\)\b[a-z]{2}", label)
        is_name = re.search("[A-Za-z]", text) is not None
        text, *phrases = (_SPACED.sub(r"\1", raw) for raw in (text, *map(_plain, self._targets)))
        for phrase in phrases:
            rest = phrase.casefold().removeprefix(text.casefold())
            if is_name and len(rest) < len(phrase) and not re.match(r"\w| ?[-+*/^(=]", rest):
                return True
        return False

    def may_name_answer(self, name: str, *, is_alone: bool = True) -> bool:
        """Returns whether a name (`x`, `f(5)`, `AB`) may be that of an answer."""
        letters = set(_LETTER.findall(self._question))
        term = re.fullmatch(r"([a-z])_\{?(\d+)\}?", name)
        if term and re.search(rf"\b{term[2]}(?:st|nd|rd|th) term\b", self._asking):
            return True
        if term and term[1] in letters:  # x_1 and x_2 are values of x
            name = term[1]
        if len(name) > 1:
            pattern = rf"(?<![A-Za-z]){re.escape(name)}(?![A-Za-z])"
            return not self.has_question or re.search(pattern, " ".join(self._targets)) is not None
        if any(re.match(rf"\$?{name}\b\$?(?=[:.?]|$)", text) for text in self._targets):
            return True
        has_value = rf"(?<![\w+*/-])(?<![+*/-] ){name} ?(?:= ?-?{_A_VALUE}|\\to|→)"
        if re.search(has_value, self._question):
            return False
        if not is_alone and letters:
            return name in letters
        if not self.has_question or name in _LETTER.findall(self._reference):
            return True
        if not letters:  # coordinates are named x and y
            return name == "x" and not re.search(r"\(-?\d+ ?, ?-?\d+\)", self._question)
        if any(map(_AGGREGATE.search, self._targets)) or _COUNTED.search(self._asking):
            return False
        names = []
        for text in self._targets:
            clause = re.split(r",| if\b| when\b| given\b", text)[0]
            if match := _LETTER.search(clause):
                beside = clause[: match.start()].rstrip()[-1:] + clause[match.end() :].lstrip()[:1]
                # of an expression of x: x is another number
                is_part = not _RELATION.search(clause) and re.search(r"[-+*/^\d]", beside)
                names.append("" if is_part else match[0])
        return name in names if names else letters == {name}

    @property
    def asks_factors(self) -> bool:
        """Returns whether a product is asked for."""
        return re.search(r"\bfactor(?!s? of|ial)", self._asking, re.IGNORECASE) is not None

    @property
    def asks_expansion(self) -> bool:
        """Returns whether a sum is asked for."""
        return re.search(r"\bexpand|\bmultiply out", self._asking, re.IGNORECASE) is not None

    @property
    def multiplies_matrices(self) -> bool:
        """Returns whether the reference is a product of matrices by name, whose order counts."""
        names = re.findall("[A-Z]", re.sub(r"\\[a-zA-Z]+", "", self._reference))
        return "matri" in self._question and len(set(names)) > 1

    def writes(self, expression: str) -> bool:
        """Returns whether the question itself writes this."""
        signs = " ?".join(map(re.escape, _flat(expression).replace(" ", "")[:_MAX_WRITTEN]))
        return re.search(rf"(?<![\w^}}{{]){signs}(?![\w^}}{{])", _flat(self._question)) is not None

    @property
    def asks_slope(self) -> bool:
        """Returns whether the question asks for a derivative."""
        return re.search(r"deriv|differentiat", self._question, re.IGNORECASE) is not None

    @property
    def _slope(self) -> str:
        """The pattern of a derivative's name: `f'(x)`."""
        primes = "''" if "second derivative" in self._question else "'"
        return rf"[a-z]{primes}(?: ?\([a-z]\))?"

    @property
    def asks_angle(self) -> bool:
        """Returns whether degrees may be meant."""
        return not self.has_question or bool(_ANGLE.search(f"{self._question} {self._reference}"))

    @property
    def asks_ratio(self) -> bool:
        """Returns whether `3:4` may be a number."""
        return not self.has_question or bool(
            re.search(r"\b(?:ratio|odds|scale|proportion)", self._question)
        )

    @property
    def asks_order(self) -> bool:
        """Returns whether the question asks for the order of several values."""
        return bool(_ORDER.search(self._question))

    @property
    def asks_point(self) -> bool | None:
        """Returns whether `(2, 5)` is a point or a vector, not an interval; None if it is open."""
        if not self.has_question:
            return None
        return not _INTERVAL.search(self._question) or bool(_POINT.search(self._question))


def _flat(text: str) -> str:
    """Mathematics without dress, in one spelling."""
    text = re.sub(r"\\[dt]?frac ?\{([^{}]*)\} ?\{([^{}]*)\}", r"\1/\2", text)
    text = re.sub(r"\\(?:cdot|times)(?![a-zA-Z])", "*", text)
    text = re.sub(r"\\(?:left|right)(?![a-zA-Z])|\\[,;:! ]|\$", " ", text)
    return " ".join(text.split())


def _plain(text: str) -> str:
    return " ".join(re.sub(r"\\text|[$\\{}]", " ", text).split())


def _is_same(left: Unit, right: Unit) -> bool:
    return same_kind(left, right) and math.isclose(factor(left, right), 1.0)


def stem(word: str) -> str:
    """A word without its endings.

    >>> [stem(word) for word in ("eggs", "Boxes", "berries", "earned", "earns", "children")]
    ['egg', 'box', 'berry', 'earn', 'earn', 'child']
    """
    word = word.lower().removesuffix("'s")
    if word in _IRREGULAR:
        return _IRREGULAR[word]
    if word.endswith("ies") and len(word) > 4:
        return word[:-3] + "y"
    for ending in ("ing", "ed", "es", "s", "e"):
        if word.endswith(ending) and len(word) - len(ending) >= 3 and not word.endswith("ss"):
            return word.removesuffix(ending)
    return word


def stems(text: str) -> tuple[str, ...]:
    """The stems of a text's words, without articles."""
    words = (word for word in re.findall(r"[^\W\d_]+(?:'[a-z]+)?|/", text))
    return tuple(stem(word) for word in words if word.lower() not in _ARTICLES)


def _unit_of(reference: str) -> str:
    """Returns what stands behind the reference's number, roughly."""
    match = re.match(r"[-+\d.,/ ]*\d", reference)
    behind = reference[match.end() :].strip() if match else ""
    return "" if re.match(r"\\(?!text|mathrm|[,;:! ])", behind) else behind


def unit_text(text: str) -> str:
    """A unit without brackets, LaTeX and full stops; `%` for every way to write percent."""
    text = re.sub(r"°[^\w°]*C\b", " celsius ", re.sub(r"°[^\w°]*F\b", " fahrenheit ", text))
    plain = re.sub(r"[{}()]", "", text.replace("°", " deg ")).strip(" .!,")
    plain = " ".join(re.sub(r"\\(?!mu|Omega)", "", plain).split())
    if re.fullmatch(r"(?:%|(?:percent|per cent|pct))", plain, re.IGNORECASE):
        return PERCENT
    return plain


def fits(reference_unit: str, answer_unit: str) -> bool:
    """Returns whether an answer in one unit can be right for a reference in the other.

    An answer without a unit is in the wanted one; a reference without one takes what its question
    allows (`QuestionContext.allows`).
    """
    if not answer_unit or not reference_unit or reference_unit == answer_unit:
        return True
    left, right = parse_unit(reference_unit), parse_unit(answer_unit)
    if left is not None and right is not None:
        return same_kind(left, right)
    return left is right and stems(reference_unit) == stems(answer_unit)


def ratio(reference_unit: str, answer_unit: str) -> Fraction | None:
    """Returns what a number in the answer's unit is multiplied by, to be in the reference's.

    None where there is no such number: between scales of temperature.
    """
    left, right = parse_unit(reference_unit), parse_unit(answer_unit)
    if left is None or right is None or left == right:
        return Fraction(1)
    scale = factor(left, right)
    if math.isnan(scale):
        return None
    exact = Fraction(scale).limit_denominator(10**9)
    return exact if math.isclose(exact, scale, rel_tol=1e-12) else Fraction(scale)
