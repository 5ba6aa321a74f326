r"""What stands behind a number, units and counted things, and which of it may stand there.

Words behind a number are its unit: one of measurement that the question or the reference measures
in, or the thing that is asked for, in the question's own words (`red marbles` of `How many red
marbles does`). Words before it are its label: what is asked for, or `answer`, `total` and the like.
No other words stand there. Where no question is known, units of measurement and a list of common
things pass.

>>> speech = Speech("How many eggs does Janet find each day?", "18")
>>> [speech.allows(unit) for unit in ("eggs", "eggs a day", "lakh", "apples", "km", "dollars")]
[True, True, False, False, False, False]
>>> fits("km", "kg"), fits("hours", "min"), fits("apples", ""), fits("apples", "pears")
(False, True, True, False)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import cached_property
from itertools import combinations
from typing import TYPE_CHECKING

from prorl.envs.answers.words import doubtful
from prorl.envs.units import (
    dimensions,
    factor,
    parse_unit,
    raised,
    same_kind,
    simple_units,
    words_of,
)

if TYPE_CHECKING:
    from pint import Unit

PERCENT = "%"
_MIN_WORDS = 4
"""Of a question that says enough to tell what it asks for."""
_ARTICLES = words_of("the a an his her its their my our")
_CLOSING = words_of(
    "left remaining now more old long tall wide high deep away far total altogether overall in all"
)
"""Words behind a counted thing that say no more than that it is counted."""
_OWN_WORDS = _CLOSING - {"total", "altogether", "overall", "in", "all"}
"""Those of them that must be the question's."""
_SPOKEN = words_of(
    """he she it they there we you i this that his her their its has have had is are was were will
    would be do does did can could now in on at of to for from by with"""
)
"""Words of any sentence."""
_ASKING = words_of("""how what which when where who find solve if and or suppose given let each""")
_BE = ("is", "are", "was", "were")
_TITLES = words_of("answer result value final total amount number of")
"""Words of any label."""
_THINGS = words_of(
    """animals apples bags balloons balls bananas bars birds blocks boats books bottles boxes boys
    bricks buses cakes calories candies cans cards cars cats chairs chickens children choices
    coins combinations cookies cows cupcakes customers digits dogs edges eggs elements employees
    faces fish floors flowers friends games girls goats guests houses integers items kids legs
    letters marbles members men minutes miles movies necklaces numbers oranges outcomes packages
    packs pages paintings pencils pens people permutations persons photos pieces pies pizzas
    plants players points pounds questions rabbits regions ropes roses rows sandwiches seashells
    seats sets sheep shells shirts shoes sides slices socks solutions songs stamps steps
    stickers stones students subsets teachers tickets tiles toys trees triangles trips units
    values vertices votes ways wheels windows women words workers"""
)
"""What is counted where no question says it."""
_IRREGULAR = {
    "children": "child", "people": "person", "men": "man", "women": "woman", "feet": "foot",
    "mice": "mouse", "geese": "goose", "teeth": "tooth", "knives": "knife", "loaves": "loaf",
    "leaves": "leaf", "shelves": "shelf", "halves": "half", "pence": "penny", "bucks": "dollar",
    "remaining": "left", "remain": "left", "remains": "left", "still": "left",
}  # fmt: skip
_PERIODS = {
    "daily": "day", "weekly": "week", "monthly": "month", "yearly": "year", "annual": "year",
    "annually": "year", "hourly": "hour", "old": "year", "age": "year", "ages": "year",
    "older": "year", "younger": "year", "$": "dollar", "¢": "cent", "€": "euro", "£": "GBP",
    "¥": "yen", "₹": "rupee", "°": "degree", "°c": "celsius", "°f": "fahrenheit",
    "in": "", "us": "", "as": "", "am": "", "pm": "", "has": "", "second": "",
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
    r"\b(?:in|into|to) (?=((?:square |cubic )?[^\W\d]\w*))((?:square |cubic )?\w+(?: per |/)\w+)?",
    re.IGNORECASE,
)
_REST = (
    r"((?: (?!(?:do|does|did|is|are|was|were|will|would|can|could|has|have|had|should|must|may|in"
    r"|on|at|for|if|to|from|with|left|who|that|which|and|or|when|after|each|per|than|between"
    r"|such|whose)\b)"
    r"[\w'-]+){1,8})"
)
_COUNTED = re.compile(r"\b(?:how many|number of)" + _REST, re.IGNORECASE)
_ASKED = re.compile(
    r"\b(?:how much|(?:what|how \w+) (?:is|was|are|were)|what(?= (?!is|was|are|were))|which"
    r"|find|determine|calculate|compute|evaluate)" + _REST,
    re.IGNORECASE,
)
"""What is asked for, by its words."""
_PLURAL = re.compile(r".*?(?:[a-z]{2}(?<![isu])s|\b(?:people|children|men|women))\b")
"""Of `trees remain` what is counted."""
_HOW_IS = re.compile(
    r"\bhow (?:old|tall|heavy|long|wide|deep|high|fast) (?:is|was|will) ([A-Z][a-z]+)",
    re.IGNORECASE,
)
_WAYS = re.compile(r"\bways?\b[^.?!]*? to \w+ an? (\w+)", re.IGNORECASE)
_OF_WAYS = [("combination",), ("arrangement",), ("possibility",)]
_A_VALUE = r"(?:\d+(?:\.\d+)?(?!\.?\w|[\\(^*/]| ?[-+*/^(]| [xyz]\b)|\\)"
_CUSTOM = {"slop": "m", "speed": "v"}
"""Letters of what has another one than its first."""
_MODALS = (["will"], ["must"], ["can"], ["should"])
_PART = re.compile(r"\bfraction of (?:an?|the|his|her|their) (\w+)", re.IGNORECASE)
_FUNCTION_OF = re.compile(r"\b(?:sin|cos|tan|cot|sec|csc)\b[ {(]*\d+ ?\^? ?\{? ?(?:\\circ|°)")
_SIGNED = (("\\lim", "limit"), ("\\int", "integral"), ("\\sum", "sum"))
"""Signs of a question, and what they ask for."""
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
    r"(?<![a-z])angle|degree|°|\\circ|radian|rotat|\bturns?\b|\barc|latitude|slope", re.IGNORECASE
)
_WORD = re.compile(r"[^\W\d_]+(?:'[a-z]+)?|°[CF]\b|[$¢€£¥₹°]")
_LETTER = re.compile(
    r"(?<![^\W_])(?<!['’])(?!(?<=\d )[mgsLh](?:[,.?]| [a-z]{2}))"
    r"(?:[B-HJ-Zb-z]|[aA](?=[,)=+*^_<>}$])|(?<=[(,+*=$])a|(?<=[a-z,] )A)"
    r"(?![^\W_])(?!['’])"
)
"""A letter alone that is neither the article, the pronoun nor a number's unit."""
_NAMES = re.compile(
    r"\w(?:(?:\^\{-1\})?\(\w\)|(?:\)?(?: ?, ?(?:and )?| and )\(?[A-Za-z](?![A-Za-z]))*)"
)
"""A function of a letter, or letters in a row."""
_AGGREGATE = re.compile(
    r"\b(?:sum|product|number|difference|mean|average|slope|area|degree|coefficient|discriminant"
    r"|remainder|distance)\b[^.?]* (?:of|between|when|from|through|in)\b|\\(?:int|sum|lim)(?![a-z])"
)
"""What is asked of an expression, whose letters are then no names of the answer."""
_VERB = re.compile(
    r"\b(?:find|solve|determine|compute|calculate|evaluate|express|what|which)\b", re.IGNORECASE
)
_ORDER = re.compile(
    r"\b(?:in|by) (?:\w+ ){0,2}order\b|\b(?:arrange|rank|sort|ascending|descending)\b|^order "
    r"|\b(?:in|de)creasing order|\border(?:ed)? (?:from|by|of)\b"
    r"|\bfrom (?:the )?(?:\w+est|least|most) to (?:the )?(?:\w+est|most|least)\b",
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


_TOLD = re.compile(
    r"((?:[A-Za-z][A-Za-z'’-]* ){1,10})(?<! of )(?<! by )(?<! than )"
    r"([-+]?\d[\d.,:/]*(?: ?\\?%)?|[-+]?\\[dt]?frac ?\{\d+\} ?\{\d+\})((?: ?[A-Za-z'’.-]+)*)"
)
"""A sentence of words and one number."""
_WHERE_OF = re.compile(
    r" (?:in|on|at) (?:the|his|her|their|an?) [A-Za-z ]+$| to [A-Za-z ]+$"
    r"|(?:^| )(?:is|are|was|were|can|will) .*$"
)
"""Where it is so, what for, or what is said of it."""
_CHANCE = re.compile(r"probab|chance|likel|fraction|odds", re.IGNORECASE)


_MONEY = tuple({f"[{name}]"} for name in ("dollar", "euro", "sterling", "yen", "rupee"))
_KINDS = {
    r"\bhow far\b|\bdistance\b": ({"[length]"},),
    r"\bhow much (?:money )?(?:\w+ ){1,4}?(?:earn|pay|spend|cost|save|charge)": _MONEY,
    r"\bhow (?:old|long (?:does|did|will) (?:\w+ ){0,3}?take)\b": ({"[time]"},),
    r"\bhow (?:heavy|much (?:\w+ ){1,4}?weigh)": ({"[mass]"},),
}
"""What a question asks for -> the dimensions of its answer."""


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
        sentences = re.split(r"(?<=[.?!])(?<![ap]\.m\.) ", self._question)
        return " ".join(filter(_ASKS.search, sentences)) or self._question

    @cached_property
    def _stems(self) -> frozenset[str]:
        return frozenset(map(stem, _WORD.findall(f"{self._asking} {self._reference}")))

    @cached_property
    def _things(self) -> tuple[tuple[str, ...], ...]:
        """What is counted: `red marble` of `How many red marbles does`; the reference's thing."""
        asked = _COUNTED.findall(self._asking)
        found = [_stems(words) for one in asked for words in (one, *_PLURAL.findall(one))]
        if any("way" in words for words in found):
            found += [(stem(word),) for word in _WAYS.findall(self._asking)] + _OF_WAYS
        return tuple(filter(None, (*found, _counted(_unit_of(self._reference)))))

    @cached_property
    def _asked_for(self) -> tuple[tuple[str, ...], ...]:
        """The same, and what is asked for otherwise: `total cost` of `What is the total cost`."""
        signed = [(word,) for sign, word in _SIGNED if sign in self._question]
        asked = (*_ASKED.findall(self._asking), *_HOW_IS.findall(self._asking))
        return (*self._things, *signed, *filter(None, map(_stems, asked)))

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
        asked = rf"\b(?:how (?:many|much)|number of) (?:\w+ ){{0,2}}?{re.escape(word)}\b"
        return re.search(asked, self._question, re.IGNORECASE) is not None

    def speaks(self, text: str) -> bool:
        """Whether all its words are the asking sentence's, or those of any sentence.

        The one name of a question stands for the pronoun of the sentence that asks.
        """
        names = {
            word
            for word in re.findall(r"\b[A-Z][a-z]+\b", self._question)
            if word.lower() not in _SPOKEN | _ARTICLES | _ASKING
        }
        has_pronoun = re.search(r"\b(?:s?he|they|it|his|her|their)\b", self._asking)
        # the one that a question is about
        subject = re.match(r"An? ([a-z]+) ", self._question)
        known = names if names or not subject else {subject[1]}
        known = known if len(known) == 1 and has_pronoun else set[str]()
        return self.is_known and all(
            word.lower() in _SPOKEN | _ARTICLES or stem(word) in self._stems or word in known
            for word in _WORD.findall(text)
        )

    def told(self, text: str) -> str:
        """What a short sentence in the question's words says: `18 eggs` of `Janet has 18 eggs`."""
        if (has := re.match(r"(\d+) has (?=\d)", text)) and self._speaks_of(has[1]):
            text = text[has.end() :]
        said = re.search(r"(?: who)?( (?:than|do not|does not|did not) [A-Za-z ]+)$", text)
        if said and said[1] in self._asking:
            text = text[: said.start()]
        said = re.match(r"(?:[A-Z][A-Za-z ]* )?(\w+) by (?=\d)", text)
        if (
            said
            and stem(said[1]) in self._stems
            and re.search(r"\bby (?:what|how)", self._asking, re.I)
        ):
            text = text[said.end() :]
        chance = re.fullmatch(r"(\d+) (?:in|out of) (\d+)", text)
        if chance and _CHANCE.search(self._asking):
            return f"{chance[1]}/{chance[2]}"
        whole, _, rest = text.partition(" is " if " is " in text else "=")
        whole = re.escape(whole.strip().removeprefix("of "))
        behind = (
            r"(?: in| of| when| if| from| [a-z])\b| ?[.?]?$"
            if re.search("[a-z]{4}", whole)
            else " ?[.?]?$"
        )
        asks = "what is|there in|value of|compute|evaluate|calculate|find"
        if rest and re.search(rf"\b(?:{asks}) (?:the )?{whole}(?:{behind})", self._asking, re.I):
            return rest.strip()
        found = _TOLD.fullmatch(text)
        if found is None or doubtful(text) or re.search(r"\bthan\b", self._asking):
            return text
        if ":" in found[2] and not re.match(r" ?[ap]\.?m\b", found[3], re.IGNORECASE):
            return text
        *subject, last = found[1].split()
        is_verb = any(map(self._is_verb, (*subject, last))) or (
            subject[-1:] in _MODALS and subject[-1] in self._asking
        )
        is_told = self.speaks(found[1]) and is_verb
        if last in _BE and re.search(r"\bwhat\b", self._asking, re.IGNORECASE):
            is_told = is_told and (
                subject in (["It"], ["it"], ["There"], ["there"]) or self.labels(" ".join(subject))
            )
        return f"{found[2]}{found[3]}" if is_told else text

    def _speaks_of(self, number: str) -> bool:
        return re.search(rf"(?<![\d.]){number}(?![\d.])", self._asking) is not None

    def _is_verb(self, word: str) -> bool:
        asked = re.search(r"\b(?:do|does|did|will|can|must|would|should)\b.*", self._asking)
        said = set(re.findall(r"\w+", asked[0])) if asked else set[str]()
        return word in (*_BE, "has", "have", "had") or (
            word.endswith("s") and not said.isdisjoint((word[:-1], word[:-2]))
        )

    @property
    def asks_slope(self) -> bool:
        """Whether it asks for a derivative."""
        return re.search(r"deriv|differentiat", self._question) is not None

    def sorted(self, names: Iterable[str]) -> list[str]:
        """Coordinates in the order of the question's own tuple, else of the alphabet."""
        said = re.search(r"\(([a-z](?: ?, ?[a-z])+)\)", self._question)
        order = said[1] if said else ""
        return sorted(names, key=lambda name: (order.find(name), name))

    def allows(self, unit: str) -> bool:
        """Whether a number may stand before this: a unit or the thing that is asked for."""
        unit = re.sub(r"^(?:different|distinct|possible|such) ", "", self._closed(unit))
        where = _WHERE_OF.search(unit)
        if where and self.speaks(where[0]) and (" a" not in where[0] or where[0] in self._asking):
            unit = unit[: where.start()]
        if not unit:
            return True
        if part := _PART.search(self._asking):
            return _stems(unit) == (stem(part[1]),)
        thing, _, what = unit.partition(" of ")
        if what and self.counts(thing) and re.search(rf"\b{re.escape(unit)}\b", self._question):
            unit = thing
        if (plain := re.fullmatch(r"(?:(square|cubic) )?units?", unit)) and self.is_known:
            power = {None: 1, "square": 2, "cubic": 3}[plain[1]]
            return not self._units and self._power == power
        known, rate = parse_unit(unit), _PER.search(unit)
        if "%" in unit or (rate and self.is_known and not _RATE.search(self._asking)):
            return False
        if known is not None:
            return not self.is_known or self._measures(known)
        if re.search(r"[\d=<>+!?*^|@#&%/-]", unit):
            return False
        counted = unit[: rate.start()] if rate else unit
        if not self.is_known:  # where it happened changes no number
            return self._is_common(re.split(r" (?:in|on|at|during) ", counted)[0])
        is_named = rate is None or self._names(unit[rate.end() :])
        return is_named and _is_piece((_stems(counted), _stems(unit)), self._things)

    def _closed(self, text: str) -> str:
        """A text without the words behind it that say no more than that it is counted."""
        words = text.split()
        while words and (last := words[-1].lower().strip(".")) in _CLOSING:
            if last in _OWN_WORDS and self.is_known and stem(last) not in self._stems:
                break
            words.pop()
        return " ".join(words)

    def has_share(self, text: str) -> bool:
        """Whether behind a percent sign stands no more than what it is a share of."""
        behind = re.sub(r"^.*?(?:%|percent|per cent|pct)", "", text.replace("\\", ""))
        words = {*_stems(behind)} - {"of"}
        return not re.search(r"[\d%]", behind) and words <= {*self._stems, *_stems(self._reference)}

    def choice(self, letter: str) -> str:
        """The text of a choice in the question's list; empty where it lists none."""
        found = re.search(
            rf"(?:^|[\s(]){letter}[).:] ?(.*?)(?=[\s(]+[A-J][).:] |[\s(]+[A-J]\)|$)", self._question
        )
        return found[1].strip(" ,;.") if found else ""

    def labels(self, text: str) -> bool:
        """Whether words before a number are the name of what is asked for."""
        words = _stems(text.replace("\\text", " "))
        rest = tuple(word for word in words if word not in _STEMMED_TITLES)
        return not rest or not self.is_known or _is_piece((words, rest), self._asked_for)

    def _is_common(self, unit: str) -> bool:
        """Whether it is one of the things that are counted where no question says it."""
        words = [word.lower() for word in _WORD.findall(re.sub("^(?:more|square) ", "", unit))]
        own = _counted(_unit_of(self._reference))
        return bool(words) and all(
            word in _THINGS or f"{word}s" in _THINGS or stem(word) in own for word in words
        )

    def _names(self, text: str) -> bool:
        return all(stem(word) in self._stems for word in _WORD.findall(text))

    @property
    def asks_angle(self) -> bool:
        """Whether degrees may be meant."""
        return not self.is_known or bool(_ANGLE.search(f"{self._question} {self._reference}"))

    @property
    def asks_ratio(self) -> bool:
        """Whether `3:4` may be a number."""
        return not self.is_known or bool(
            re.search(r"\b(?:ratio|odds|scale|proportion)", self._question)
        )

    @property
    def asks_order(self) -> bool:
        """Whether the order of several values is what is asked for."""
        return bool(_ORDER.search(self._question))

    @property
    def asks_point(self) -> bool | None:
        """Whether `(2, 5)` is a point or a vector, or else an interval; None where none is said."""
        if not self.is_known:
            return None
        return not _INTERVAL.search(self._question) or bool(_POINT.search(self._question))

    @cached_property
    def _letters(self) -> frozenset[str]:
        """The letters that the question has as names."""
        return frozenset(_LETTER.findall(self._question))

    @cached_property
    def _asked_letters(self) -> frozenset[str]:
        """The first letters behind the verb that asks: of `find x and y if x + z = 3` x and y."""
        for asked in _VERB.finditer(self._asking):
            rest = re.split(r"\bterms of\b", self._asking[asked.end() :])[0]
            first = _LETTER.search(rest)
            if _AGGREGATE.search(rest[: first.start()] if first else rest):
                return frozenset("?")
            if first:
                named = _NAMES.match(rest, first.start())
                return frozenset(_LETTER.findall(named[0] if named else "")) | {first[0]}
        return frozenset()

    def is_asked(self, name: str, *, is_alone: bool = True) -> bool:
        """Whether a name (`x`, `f(5)`, `AB`) may be that of the answer, or of one of several."""
        terms = re.findall(r"(\d+)(?:st|nd|rd|th) term\b", self._asking)
        term = re.fullmatch(r"[a-z]_\{?(\d+)\}?", name)
        if term and (terms or "sequence" in self._question):
            return not terms or term[1] in terms
        # x_1 and x_2 are values of x
        name = re.sub(r"_(?:\d|\\infty|\{\\infty\})$", "", name)
        if re.search(
            rf"(?<![\w+*/-])(?<![+*/-] ){re.escape(name)} ?(?:= ?-?{_A_VALUE}|\\to|→)",
            self._question,
        ):
            return False  # it has a value already
        if len(name) == 1 and self._letters and not is_alone:
            return name in self._letters
        if not self.is_known:
            return True
        initials = "".join(word[0] for word in _WORD.findall(self._asking)).upper()
        primes = "'" * (1 + len(re.findall(r"\bsecond derivative", self._question)))
        if (name.strip("xyft()") == primes and self.asks_slope) or (
            len(name) > 2 and name.upper() in initials
        ):
            return True
        if len(name) > 1:
            spelled = " ?".join(map(re.escape, name))
            said = re.search(rf"(?<![A-Za-z]){spelled}(?![A-Za-z]| ?=)", self._question)
            if name.startswith("P("):
                return "robab" in self._question and self._names(
                    " ".join(re.findall("[a-z]+", name))
                )
            is_inverse = "^{-1}" in name and "inverse" in self._question
            is_function = (
                not self.asks_slope
                and re.fullmatch(r"[A-Za-z]\([a-z]\)", name)
                and name[0] not in self._letters
            )
            return bool(said or is_inverse or is_function)
        if name == "y" and re.search(r"\binverse of\b", self._question):
            return True
        # the P of `the perimeter of a square`
        words = [word for one in self._asked_for for word in one[: (*one, "of").index("of")]]
        heads = {_CUSTOM.get(word, word[0]) for word in words}
        if name.isupper() and heads and not any(map(str.isupper, self._letters)):
            return name.lower() in heads
        if "?" in self._asked_letters:  # the sum of the roots of x^2 - 3x: no x, y or z is asked
            return name not in self._letters and name in heads
        # capitals that are not asked for are things: `jar A`
        lower = {one for one in self._letters if one.islower()}
        return name in (self._asked_letters or lower or (() if self._letters else name))

    @cached_property
    def _power(self) -> int:
        """Of the length in what is asked for: 2 of an area; 0 where it is no size of a shape."""
        shape = _SHAPE.search(self._asking)
        return {"volume": 3, "area": 2}.get(shape[1].lower(), 1) if shape else 0

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
        if dimensions(unit) == {"[length]"} and self._power:
            shaped = parse_unit(f"m^{self._power}")
            if shaped is not None and not same_kind(unit, shaped):
                return False
        for pattern, kinds in _KINDS.items():
            if re.search(pattern, self._asking, re.IGNORECASE):
                periods = tuple(map(parse_unit, _WORD.findall(self._asking)))
                asked = [one for one in simple_units(unit) if one in periods]
                if dimensions(unit).difference(*map(dimensions, asked)) not in kinds:
                    return False
        if not dimensions(unit) and not _ANGLE.search(
            f"{_FUNCTION_OF.sub(' ', self._question)} {self._reference}"
        ):
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


def _is_piece(spelled: Sequence[tuple[str, ...]], phrases: Sequence[tuple[str, ...]]) -> bool:
    """Whether words are a piece of a phrase, with the noun that it is about."""
    for phrase in phrases:
        head = phrase.index("of") if "of" in phrase[1:] else len(phrase)
        for first, last in combinations(range(len(phrase) + 1), 2):
            if first < head <= last and phrase[first:last] in spelled:
                return True
    return False


def _stems(text: str) -> tuple[str, ...]:
    words = (word for word in _WORD.findall(text) if word.lower() not in _ARTICLES)
    found = tuple(map(stem, words))
    return found[1:] if found[:1] == ("of",) else found


def _unit_of(reference: str) -> str:
    """What stands behind the reference's number, roughly."""
    found = re.match(r"[-+\d.,/ ]*\d", reference)
    behind = reference[found.end() :].strip() if found else ""
    return "" if re.match(r"\\(?!text|mathrm|[,;:! ])", behind) else behind


def unit_text(text: str) -> str:
    """A unit without brackets, LaTeX and full stops; `%` for every way to write percent."""
    text = re.sub(r"°\W*C\b", " celsius ", re.sub(r"°\W*F\b", " fahrenheit ", text))
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
    shorter = min(len(things), len(given_things)) or max(len(things), len(given_things))
    if things[-shorter:] != given_things[-shorter:]:
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


_STEMMED_TITLES = frozenset(map(stem, _TITLES))
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
    return tuple(stem(word) for word in _WORD.findall(counted) if word not in _ARTICLES)


def _per(text: str) -> tuple[str, ...]:
    """What things are counted per."""
    rest = _PER.split(text.casefold(), maxsplit=1)[1:]
    return tuple(stem(word) for word in _WORD.findall(" ".join(rest)) if word not in _ARTICLES)
