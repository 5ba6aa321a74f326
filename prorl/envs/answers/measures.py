r"""What stands behind a number, units and counted things, and which of it may stand there.

Words behind a number are its unit. A unit must be spoken of: a word of it is in the question or the
reference, or it is a unit that these measure in. Where no question is known, units of measurement
and a list of common things pass. What changes a number (`18 dozen`, `18 halved`, `18 below zero`)
is no unit, unless it is what the question counts (`How many dozen ...`).

>>> speech = Speech("How many eggs does Janet find each day?", "18")
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

from prorl.envs.units import (
    dimensions,
    factor,
    parse_unit,
    raised,
    same_kind,
    simple_units,
)

if TYPE_CHECKING:
    from pint import Unit

PERCENT = "%"
_MIN_WORDS = 4
"""Of a question that says enough to tell what it asks for."""
CHANGING = frozenset(
    re.findall(
        r"[\w-]+",
        """k bn mn hundred hundreds thousand thousands million millions billion billions trillion
    trillions lakh lakhs crore crores dozen dozens gross score scores squared cubed
    square-root root times choose mod modulo power pi radical factorial factorials half halves
    third thirds quarter quarters fourth fourths fifth fifths sixth sixths seventh sevenths
    eighth eighths ninth ninths tenth tenths hundredth hundredths thousandth thousandths tens
    ones halved doubled tripled twice thrice double triple raised reduced increased decreased
    below above under over minus plus negative less fewer zero one two three four five six
    seven eight nine ten eleven twelve twenty thirty forty fifty sixty seventy eighty ninety
    inverse reciprocal opposite ppm ppb basis percent percentage hex binary octal base th
        ish something odd decimal decimals log exponent remainder modulus""",
    )
)
"""Words that make another number of the one before them."""
_FILLERS = frozenset(
    re.findall(
        r"[\w-]+",
        """of per a an the each in for every total more left and all
    remaining altogether overall additional extra units unit square cubic only exactly
    now still his her their
    its to at as whole new different respectively by out""",
    )
)
_THINGS = frozenset(
    re.findall(
        r"[\w-]+",
        """animals apples bags balloons balls bananas bars birds blocks boats books bottles boxes
    boys bricks buses cakes calories candies cans cards cars cats chairs chickens children
    choices coins combinations cookies cows cupcakes customers digits dogs edges eggs elements
    employees faces fish floors flowers friends games girls goats guests houses integers items
    kids legs letters marbles members men minutes miles movies necklaces numbers oranges
    outcomes packages packs pages  paintings pencils pens people permutations persons
    photos pieces pies pizzas plants players points pounds questions rabbits regions ropes
    roses rows sandwiches seashells seats sets sheep shells shirts shoes sides slices socks
    solutions songs stamps steps stickers stones students subsets teachers tickets tiles toys
    trees triangles trips units values vertices votes ways wheels windows women words workers""",
    )
)
"""What is counted where no question says it."""
_TELLING = (_FILLERS - {"in", "on", "by", "each", "every", "per"}) | frozenset(
    re.findall(
        r"[\w-]+",
        """he she it they we i you there is are was were be been being has have had will would can
    makes make made earns earn earned gets get takes take took needs need costs cost spends
    spend spent pays pay paid sells buys uses so thus therefore hence then means total
    answer result value
    number amount that this these those used eats drinks reads walks runs drives gives
    owes saves finally which must should final x y z n m""",
    )
)
"""Words of a sentence or label that states a number."""
_IRREGULAR = {
    "children": "child", "people": "person", "men": "man", "women": "woman", "feet": "foot",
    "mice": "mouse", "geese": "goose", "teeth": "tooth", "knives": "knife", "loaves": "loaf",
    "leaves": "leaf", "shelves": "shelf", "halves": "half", "pence": "penny", "bucks": "dollar",
}  # fmt: skip
_PERIODS = {
    "daily": "day", "weekly": "week", "monthly": "month", "yearly": "year", "annual": "year",
    "annually": "year", "hourly": "hour", "old": "year", "age": "year", "ages": "year",
    "older": "year", "younger": "year", "$": "dollar", "¢": "cent", "€": "euro", "£": "GBP",
    "¥": "yen", "₹": "rupee", "°": "degree", "in": "", "us": "", "as": "", "am": "", "pm": "",
    "has": "", "second": "",
}  # fmt: skip
"""Words and signs of a question that tell of a unit."""
_PAID = re.compile(r"\b(?:money|cost|price|pay|paid|earn|spen[dt]|profit|sell|sold|charge)")
_ASKS_CENTS = re.compile(r"\b(?:how many|in) cents\b|[€£¥₹]|\b(?:euro|pound|yen|rupee)s?\b", re.I)
_HOW_MANY = re.compile(
    r"\b(?:how many|how much|number of) (?:(?:more|fewer|less|total|additional|whole|full) )?"
    r"(?=((?:square |cubic )?\w+))((?:square |cubic )?\w+ (?:per|an?) \w+)?",
    re.IGNORECASE,
)
_IN_UNIT = re.compile(
    r"\bin (?=((?:square |cubic )?[^\W\d]\w*))((?:square |cubic )?\w+ per \w+)?", re.IGNORECASE
)
_COUNTS = re.compile(
    r"\b(?:how many|number of)((?: (?!(?:do|does|did|is|are|was|were|will|would|can|could|has|have"
    r"|had|should|must|may|in|on|at|for|if|to|from|with|left|who|that|which|and|or|per)\b)"
    r"[\w'-]+){1,8})",
    re.IGNORECASE,
)
_SPEED = re.compile(
    r"\bhow fast\b|\b(?:what|find|determine|calculate|compute) (?:\w+ ){0,5}?"
    r"(?:speed|velocity)\b",
    re.IGNORECASE,
)
_ASKS = re.compile(
    r"^(?:find|determine|calculate|compute|evaluate|express|give|solve|what|how)\b|\?",
    re.IGNORECASE,
)
_SHAPE = re.compile(
    r"\b(?:what|find|determine|calculate|compute|how)\b[^.?!]*?\b(volume|area|perimeter|length|width"
    r"|height|distance|circumference|radius|diameter|far|tall|deep|wide|high)\b",
    re.IGNORECASE,
)
_ANGLE = re.compile(
    r"angle|degree|°|\\circ|radian|rotat|\bturn|\barc|latitude|slope", re.IGNORECASE
)
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?|[$¢€£¥₹°]")
_ASKS_PERCENT = re.compile(
    r"\b(?:what|which|how many|how much|in|as|as a|find the|express)\b[^.?!]{0,40}"
    r"(?:\bper ?cent|\\?%)",
    re.IGNORECASE,
)


class Speech:
    """What a question and its reference speak of."""

    def __init__(self, question: str, reference: str) -> None:
        self._question = " ".join(question.split())
        self._reference = reference
        self.is_known = len(_WORD.findall(self._question)) >= _MIN_WORDS

    @cached_property
    def asks_percent(self) -> bool:
        """Whether a share is asked for in percent: `25%` is then 25."""
        return bool(_ASKS_PERCENT.search(self._asking))

    @cached_property
    def is_share(self) -> bool:
        """Whether the reference itself is in percent."""
        return re.search(r"%|\bper ?cent", self._reference) is not None

    @cached_property
    def _asking(self) -> str:
        """The sentences that ask; the whole question where none does."""
        sentences = re.split(r"(?<=[.?!]) ", self._question)
        return " ".join(filter(_ASKS.search, sentences)) or self._question

    @cached_property
    def _stems(self) -> frozenset[str]:
        return frozenset(map(stem, _WORD.findall(f"{self._asking} {self._reference}")))

    @cached_property
    def _things(self) -> frozenset[str]:
        """What is counted, with its kind: of `How many red marbles does`."""
        found = " ".join(re.split(r"(?<!^) of ", text)[0] for text in _COUNTS.findall(self._asking))
        return frozenset(map(stem, _WORD.findall(found))).union(_counted(_unit_of(self._reference)))

    @cached_property
    def _heroes(self) -> frozenset[str]:
        """Names that may be told of: of the sentences that ask, of all where these have none."""
        asked = re.findall(r"(?<!^)\b[A-Z]\w+", self._asking)
        return frozenset(map(stem, asked or re.findall(r"\b[A-Z]\w+", self._question)))

    @cached_property
    def _units(self) -> tuple[Unit, ...]:
        found = []
        for word in dict.fromkeys(_WORD.findall(f"{self._question} {self._reference}")):
            spelled = _PERIODS.get(word.lower(), word)
            # other letters alone are names in a question rather than units
            is_unit = len(spelled) > 1 or spelled in tuple("mgsLh")
            if is_unit and (unit := parse_unit(spelled)) is not None:
                found.append(unit)
        return tuple(found)

    @cached_property
    def _asked(self) -> tuple[Unit, ...]:
        """The units that are asked for: `How many miles a day`, `in hours`."""
        spelled = [text for pair in _HOW_MANY.findall(self._asking) for text in pair if text]
        spelled += [rate or unit for unit, rate in _IN_UNIT.findall(self._asking)]
        found = (parse_unit(text) for text in spelled if _PERIODS.get(text.lower(), text))
        return tuple(unit for unit in found if unit is not None)

    @cached_property
    def _dimensions(self) -> frozenset[str]:
        money = {"[dollar]"} if _PAID.search(self._question) else frozenset[str]()
        return frozenset[str](money).union(*map(dimensions, self._units))

    def counts(self, word: str) -> bool:
        """Whether the question asks how many of it."""
        asked = rf"\bhow (?:many|much) (?:\w+ ){{0,2}}?{re.escape(word)}\b"
        return re.search(asked, self._question, re.IGNORECASE) is not None

    def allows(self, unit: str) -> bool:
        """Whether a number may stand before this: what is asked for, and words of the question."""
        words = [word.lower() for word in _WORD.findall(unit)]
        if not words or any(_changes(word) and not self.counts(word) for word in words):
            return False
        known = parse_unit(unit)
        if not self.is_known:  # where it happened changes no number
            if known is None and (re.search(r"[\d=<>+!?*^|@#&%]", unit)):
                return False
            near = re.split(r"(?<=\w) (?:in|on|at|from|for|during) ", unit)[0]
            words = [word.lower() for word in _WORD.findall(near)]
            if known is not None or all(map(self._names, words)):
                return True
            own = _counted(_unit_of(self._reference))
            return len(words) > 1 and "of" not in words and stem(words[1]) in own
        if _PER.search(unit) and not _RATE.search(self._asking):
            return False
        if known is not None:
            return self._measures(known)
        if re.search(r"[\d=<>+!?*^|@#&%/-]", unit):
            return False
        told = [word for word in words if word not in _FILLERS]
        if told and (thing := parse_unit(told[0])) is not None:
            return self._measures(thing) and all(map(self._names, told[1:]))
        return not told or (stem(told[0]) in self._things and all(map(self._names, told)))

    def tells(self, text: str) -> bool:
        """Whether words before a number say no more than that it is the answer."""
        words = _WORD.findall(text.replace("\\text", " "))
        if text.strip()[-1:].isalpha() and (
            self._is_thing(words[-1])
            or (self.is_known and len(words) == 1 and words[0].lower() not in _TELLING)
            or (words[-1][0].isupper() and words[-1].lower() not in _TELLING)
        ):
            return False  # `page 240`, `stop 18`, `June 120`
        if any(_changes(word.lower()) and not self.counts(word) for word in words):
            return False
        return not self.is_known or all(
            self.is_asked(word)
            if word.isupper() and word != "I"
            else word.lower() in _TELLING or stem(word) in self._stems | self._heroes
            for word in words
        )

    def labels(self, text: str) -> bool:
        """Whether a label before a number is that of what is asked for."""
        told = [word for word in _WORD.findall(text) if word.lower() not in _TELLING]
        own = not self.is_known or not told or not self._things or any(map(self._is_thing, told))
        units = (parse_unit(word) for word in told if len(word) > 1)
        return own and all(map(self._measures, filter(None, units))) and self.tells(text)

    def _is_thing(self, word: str) -> bool:
        return stem(word) in self._things

    def speaks_of(self, name: str) -> bool:
        """Whether a letter is one of the question's, where it has some."""
        letters = re.findall(r"(?<![^\W_])[b-hj-z](?![^\W_])", self._question)
        return not letters or name in letters

    def is_asked(self, name: str) -> bool:
        """Whether a letter or several may name the answer: none that names something else."""
        if re.search(rf"(?<!\w){re.escape(name)} ?= ?-?[\d.\\]", self._question):
            return False  # it has a value already
        if wanted := re.search(r"\b(?:value of|find|is) \$?([b-z])\$?[.?]$", self._asking):
            return name == wanted[1]
        if not self.is_known or re.search(rf"(?<!\w){re.escape(name)}(?!\w)", self._asking):
            return True
        # a capital at the beginning of a sentence is an article
        return len(name) == 1 and not re.search(
            rf"(?<!\w)(?<!^)(?<![.?!] ){re.escape(name)}(?!\w)", self._question
        )

    def _names(self, word: str) -> bool:
        if word in _FILLERS or stem(word) in self._stems:
            return True
        return not self.is_known and (
            (len(word) > 1 and parse_unit(word) is not None)
            or word in _THINGS
            or f"{word}s" in _THINGS
        )

    def _measures(self, unit: Unit) -> bool:
        """Whether they measure in it, or in the units that it is made of."""
        if (own := parse_unit(_unit_of(self._reference))) is not None and same_kind(own, unit):
            return True
        if self._asked:
            return any(_is_same(unit, asked) for asked in self._asked)
        if self._things or (self.asks_percent and str(unit) != "percent"):
            return False
        if _SPEED.search(self._asking) and dimensions(unit) != {"[length]", "[time]"}:
            return False
        if dimensions(unit) == {"[length]"} and (shape := _SHAPE.search(self._asking)):
            power = {"volume": 3, "area": 2}.get(shape[1].lower(), 1)
            shaped = parse_unit(f"m^{power}")
            if shaped is not None and not same_kind(unit, shaped):
                return False
        if not dimensions(unit) and not _ANGLE.search(f"{self._question} {self._reference}"):
            return False
        for one in simple_units(unit):
            powers = [raised(other, power) for other in self._units for power in (1, 2, 3)]
            kin = [other for other in powers if same_kind(one, other)]
            in_cents = str(one) == "dollar" and not _ASKS_CENTS.search(self._question)
            if kin and not any(_is_same(one, other) for other in kin) and not in_cents:
                return False
        return dimensions(unit) <= self._dimensions


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


def _changes(word: str) -> bool:
    return word in CHANGING or word.rstrip("s").endswith("illion")


def _unit_of(reference: str) -> str:
    """What stands behind the reference's number, roughly."""
    found = re.match(r"[-+\d.,/ ]*\d", reference)
    return reference[found.end() :].strip() if found else ""


def unit_text(text: str) -> str:
    """A unit without brackets, LaTeX and full stops; `%` for every way to write percent."""
    plain = re.sub(r"[{}()]", "", text.replace("°", " deg ")).strip(" .!,")
    plain = " ".join(re.sub(r"\\(?!mu|Omega)", "", plain).split())
    if re.fullmatch(r"(?:%|(?:percent|per cent|pct)\b)(?: of [a-z ]+)?", plain, re.IGNORECASE):
        return PERCENT
    return plain


def fits(wanted: str, given: str) -> bool:
    """Whether an answer in one unit can be right for a reference in the other.

    An answer without a unit is in the wanted one; a reference without one takes what its question
    allows (`Speech.allows`).
    """
    if not given or not wanted or wanted == given:
        return True
    left, right = parse_unit(wanted), parse_unit(given)
    if left is not None and right is not None:
        return same_kind(left, right)
    if left is not None or right is not None:
        return _counted(wanted) == _counted(given) and min(map(len, (wanted, given))) > 2
    things, given_things = _counted(wanted), _counted(given)
    if {*things[-1:], *given_things[-1:]} and things[-1:] != given_things[-1:]:
        return False
    return not _per(wanted) or not _per(given) or _per(wanted) == _per(given)


def ratio(wanted: str, given: str) -> Fraction | None:
    """What a number in the given unit is multiplied by, to be one in the wanted unit.

    None where there is no such number: between scales of temperature.
    """
    left, right = parse_unit(wanted), parse_unit(given)
    if left is None or right is None or left == right:
        return Fraction(1)
    found = factor(left, right)
    if math.isnan(found):
        return None
    exact = Fraction(found).limit_denominator(10**9)
    return exact if math.isclose(exact, found, rel_tol=1e-12) else Fraction(found)


_RATE = re.compile(
    r"\b(?:per|each|every|rate|speed|average|\w+ly|an? (?:day|week|month|year|hour|minute"
    r"|second))\b",
    re.IGNORECASE,
)
_PER = re.compile(r"\b(?:per|each|every|an?)\b|/")
_WHERE = re.compile(r"\b(?:of|in|on|at|for|from|with|to|by)\b")


def _counted(text: str) -> tuple[str, ...]:
    """The thing counted and what kind of it, without what it is counted per."""
    counted = _WHERE.split(_PER.split(text.casefold())[0])[0]
    return tuple(stem(word) for word in _WORD.findall(counted) if word not in _FILLERS)


def _per(text: str) -> tuple[str, ...]:
    """What things are counted per."""
    rest = _PER.split(text.casefold(), maxsplit=1)[1:]
    return tuple(stem(word) for word in _WORD.findall(" ".join(rest)) if word not in _FILLERS)
