"""Units and quantities as answers write them: `m/s^2`, `kJ mol^-1`, `60 miles per hour`, `$18`.

pint knows the units, their prefixes and factors; here is which of them an answer may name (pint's
`x`, `c`, `score` and `mil` are none), how people spell them, and that each currency, angles, bits,
doses and decays are dimensions of their own: 10 Hz are no 10 rad/s. What is behind the first `/`
divides, up to a closing bracket. A temperature in degrees is a value of its own scale, never
converted.

>>> quantity("3.0 x 10^8 m/s") == Quantity(3e8, parse_unit("m/s"))
True
>>> factor(parse_unit("h"), parse_unit("minutes")), parse_unit("lakh"), quantity("12 apples")
(0.016666666666666666, None, None)
"""

from __future__ import annotations

import math
import re
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from pint import Unit, UnitRegistry

MAX_CHARS = 200
MAX_POWER = 12


def words_of(text: str) -> frozenset[str]:
    """The words of a list."""
    return frozenset(text.split())


_UNITS = words_of(
    """meter gram second ampere kelvin mole candela hertz newton pascal joule watt coulomb volt
    farad ohm siemens weber tesla henry becquerel liter molar electron_volt calorie bar
    metric_ton minute hour day week month year century standard_atmosphere torr millimeter_Hg
    meter_Hg radian degree degree_Celsius degree_Fahrenheit unified_atomic_mass_unit dalton
    angstrom foot inch mile yard pound ounce light_year parsec astronomical_unit mile_per_hour
    kilometer_per_hour gallon quart pint cup tablespoon teaspoon fluid_ounce acre hectare
    watt_hour lumen lux gray sievert pound_force_per_square_inch horsepower
    revolutions_per_minute knot byte bit cubic_centimeter number_meter erg dyne decibel dollar
    cent euro sterling yen rupee percent"""
)
"""The names of pint that an answer may use."""
_SCALES = frozenset(("degree_Celsius", "degree_Fahrenheit", "decibel"))
"""Values of a scale: nothing is converted to them or from them."""
_STEPS = {"degree_Celsius": "kelvin"}
_PREFIXES = words_of(
    """yotta zetta exa peta tera giga mega kilo hecto deci centi milli micro nano pico femto"""
)
_DEFINITIONS = (
    "dollar = [dollar] = USD", "cent = dollar / 100", "euro = [euro] = EUR",
    "sterling = [sterling] = GBP", "yen = [yen] = JPY",
    "rupee = [rupee] = INR = Rs",
    "radian = [angle] = rad", "bit = [information] = b", "becquerel = [decays] = Bq",
    "sievert = [dose] = Sv",
)  # fmt: skip
_OURS = {
    "Nm": "newton * meter", "AU": "astronomical_unit", "kph": "kilometer_per_hour",
    "bucks": "dollar", "euros": "euro", "cents": "cent", "yens": "yen", "pct": "percent",
    "kilos": "kilogram", "kgs": "kilogram", "amp": "ampere", "amps": "ampere",
    "in": "inch", "pt": "", "ton": "", "tons": "",
    "has": "", "us": "", "TV": "", "kilohm": "kiloohm", "kilohms": "kiloohm", "megohm": "megaohm",
    "megohms": "megaohm", "Ms": "", "PC": "", "Ed": "", "fly": "", "mum": "", "mug": "",
    "candle": "", "candles": "",
}  # fmt: skip
"""The units where pint means something else than an answer does, or knows nothing; "" is no
unit.
"""
_SYMBOLS = ("mol", "cal", "bar", "ohm", "torr", "mHg", "gal")
"""Symbols so long that a prefix before them makes what looks like a word."""
_LETTERS = frozenset("mgsAKNJWCVFSTHLlMthuΩÅ")
"""Units of one letter; any other is a name."""

_SPELLINGS = tuple(
    (re.compile(pattern), ours)
    for pattern, ours in (
        (r"\^\{([^{}]*)\}", r"^\1"),
        ("Å", "Å"),
        (r"℃", "degC"),
        (r"℉", "degF"),
        (r"\\rm(?![a-zA-Z])", " "),
        (r"\bcycles? ?(?:per second|/ ?s(?:ec(?:ond)?)?)\b", "hertz"),
        (r"\belectron[ -]volts?\b", "electronvolt"),
        (r"\b(newton)[ -](met(?:er|re))s?\b", r"\1 \2"),
        (r"\brev(?:olution)?s? ?(?:per |/ ?)min(?:ute)?\b", "rpm"),
        (r"[µμ]|\\mu(?![a-zA-Z])\s?", "u"),
        (r"[ΩΩ]|\\Omega(?![a-zA-Z])|\\ohm(?![a-zA-Z])", "ohm"),
        (
            r"(?:\^ ?\{?\\circ\}?|\\degree|°|\bdegrees?\b) ?(?:C\b|[Cc]elsius\b|centigrade\b)",
            " degC",
        ),
        (r"(?:\^ ?\{?\\circ\}?|\\degree|°|\bdegrees?\b) ?(?:F\b|[Ff]ahrenheit\b)", " degF"),
        (r"°|\\degree(?![a-zA-Z])|\^ ?\{?\\circ\}?", "deg"),
        (r"\\%", "%"),
        (r"\\(?:text|mathrm|mathbf|rm|operatorname) ?\{([^{}]*)\}", r" \1 "),
        (r"\\(?:times|cdot)(?![a-zA-Z])|[×·⋅]", "*"),
        (r"\\[,;:! ]|~|\$|\\left(?![a-zA-Z])|\\right(?![a-zA-Z])", " "),
        (r"[−–]", "-"),
        (r"\\[dt]?frac ?\{([^{}]*)\} ?\{([^{}]*)\}", r"\1/\2"),
        (r"\bfl\.? ?oz\b\.?", "fluid_ounce"),
        (r"\b(?:square|sq\.?) (\w+)", r"\1^2"),
        (r"\b(?:cubic|cu\.?) (\w+)", r"\1^3"),
        (r"\b(\w+) squared\b", r"\1^2"),
        (r"\b(\w+) cubed\b", r"\1^3"),
        (r"\bper cent\b", "percent"),
        (r" per | an? (?=\w+$)", "/"),
    )
)
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
_RAISED = re.compile(r"([⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺]+)")
_NUMBER = re.compile(
    r"(?:approximately|about|≈)? ?"
    r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)"
    r"(?:[eE]([-+]?\d+)| ?(?:\*|x) ?10 ?(?:\^|\*\*) ?\(?([-+]?\d+)\)?)?(?: ?/ ?(\d+(?:\.\d+)?))?"
)
_POWER = re.compile(r"^((?:approximately|about|≈)? ?[-+]?)10 ?(?:\^|\*\*) ?\(?([-+]?\d{1,4})\)?")
"""`10^-3`, which has no number before it."""
_FACTOR = re.compile(r" ?(?:([*/()])|([^\W\d_]+|[%°])(?: ?(?:\^|\*\*)? ?\(?(-?\d{1,3})\)?)?)")


class Quantity(NamedTuple):
    """A number in a unit; no unit at all is pint's dimensionless one."""

    value: float
    unit: Unit

    @property
    def has_unit(self) -> bool:
        """Returns whether it is more than a number."""
        return bool(self.unit != _registry().dimensionless)


def quantity(text: str) -> Quantity | None:
    """Returns the quantity that a text is; None when it is anything else, too."""
    if len(text) > MAX_CHARS:
        return None
    plain = _POWER.sub(r"\g<1>1e\2", _plain(text))
    match = _NUMBER.match(plain)
    if match is None or not any(char.isdigit() for char in match[1]):
        return None
    unit = _product(re.sub("^1(?= ?/)", "", plain[match.end() :].strip(" .")))
    divisor = float(match[4] or 1)
    if unit is None or not divisor:
        return None
    value = float(f"{match[1].replace(',', '')}e{match[2] or match[3] or 0}") / divisor
    return Quantity(value, unit) if math.isfinite(value) else None


def parse_unit(text: str) -> Unit | None:
    """A unit; None for words that are none."""
    plain = _plain(text).strip(" .") if len(text) <= MAX_CHARS else ""
    return _product(plain) if plain else None


def same_kind(left: Unit, right: Unit) -> bool:
    """Returns whether both measure the same quantity."""
    return bool(left.dimensionality == right.dimensionality)


def factor(target: Unit, source: Unit) -> float:
    """Returns what a number in `source` is multiplied by, to be in `target`, of the same kind."""
    if target == source:
        return 1.0
    if any(name in _SCALES for unit in (target, source) for name in unit._units):
        return math.nan
    return float(_registry().Quantity(1, source).to(target).magnitude)


def raised(unit: Unit, power: int) -> Unit:
    """A unit to a power."""
    return _registry().Unit(unit**power)


def dimensions(unit: Unit) -> frozenset[str]:
    """The base dimensions of a unit: of `mph` length and time."""
    return frozenset(map(str, unit.dimensionality))


def simple_units(unit: Unit) -> tuple[Unit, ...]:
    """The units that one is made of: of `km/h` the kilometre and the hour."""
    if str(unit) == "mile_per_hour":
        return _registry().Unit("mile"), _registry().Unit("hour")
    if str(unit) == "kilometer_per_hour":
        return _registry().Unit("kilometer"), _registry().Unit("hour")
    return tuple(_registry().Unit(name) for name in unit._units)


def equal(actual: Quantity, expected: Quantity, tolerance: float) -> bool:
    """Returns whether they are one quantity within a relative tolerance.

    A number without a unit is taken to be in the wanted one; a share also for percents.

    >>> metres = quantity("500 m")
    >>> equal(quantity("0.5 km"), metres, 1e-3), equal(quantity("500"), metres, 1e-3)
    (True, True)
    >>> equal(quantity("500 s"), quantity("500 m"), 1e-3)
    False
    """
    from pint import PintError

    values, near = [actual.value], 0.0
    size = abs(expected.value)
    if actual.has_unit and actual.unit != expected.unit:
        if not same_kind(actual.unit, expected.unit):
            return False
        try:
            there = _registry().Quantity(actual.value, actual.unit).to(expected.unit)
        except PintError:  # temperatures in degrees have no products
            return False
        # 32 °F are 0 °C by a sum, which is exact to the numbers that were added only
        is_sum = any(
            name in _SCALES for unit in (actual.unit, expected.unit) for name in unit._units
        )
        values, near = [float(there.magnitude)], 1e-9 * abs(actual.value) if is_sum else 0.0
        if {str(actual.unit), str(expected.unit)} == {"kelvin", "degree_Celsius"}:
            near += 0.15  # 273 for 273.15
        # near on the scale of fewer degrees: 22 °C are not nearly 298 K
        size = min(size, abs(actual.value)) if is_sum else size
    elif not actual.has_unit and str(expected.unit) == "percent":
        values.append(100 * actual.value)
    return any(abs(value - expected.value) <= max(tolerance * size, near) for value in values)


def _plain(text: str) -> str:
    text = " ".join(text.split())
    text = _RAISED.sub(lambda match: "^" + match[1].translate(_SUPERSCRIPTS), text)
    for pattern, ours in _SPELLINGS:
        text = pattern.sub(ours, text)
    return " ".join(text.split())


def _product(text: str) -> Unit | None:
    registry = _registry()
    unit, sign, place = registry.dimensionless, 1, 0
    while place < len(text):
        match = _FACTOR.match(text, place)
        if match is None:
            return None
        place = match.end()
        if match[1]:
            sign = {"/": -1, ")": 1}.get(match[1], sign)
            continue
        power, base = sign * int(match[3] or 1), _simple(match[2])
        if base is None or abs(power) > MAX_POWER:
            return None
        unit = unit * base**power
    if len(unit._units) > 1:  # a degree of a product is a difference
        unit = registry.Unit(
            "*".join(f"{_STEPS.get(name, name)}**{power}" for name, power in unit._units.items())
        )
    return None if text[-1:] in tuple("*/(") else unit


@cache
def _simple(name: str) -> Unit | None:
    """One unit with or without a prefix; words also with a capital."""
    registry = _registry()
    if name in _OURS:
        return registry.Unit(_OURS[name]) if _OURS[name] else None
    if name == "%":
        return registry.Unit("percent")
    if len(name) == 1 and name not in _LETTERS:
        return None
    for spelling in (name, name.lower()) if len(name) > 3 else (name,):
        for prefix, unit, _ in registry.parse_unit_name(spelling):
            # `exam` is no exametre: words take prefixes that are words
            is_spelled = len(name) < 4 or name.lower().startswith(prefix) or name[1:] in _SYMBOLS
            if unit in _UNITS and (not prefix or (prefix in _PREFIXES and is_spelled)):
                return registry.Unit(prefix + unit)
            break  # what it means before all else is none of ours
    return None


@cache
def _registry() -> UnitRegistry[float]:
    """A process's one registry, made where the first unit is met: it takes half a second."""
    try:
        from pint import UnitRegistry
    except ModuleNotFoundError as cause:
        raise ModuleNotFoundError("units need pint: install prorl's extra `math`") from cause
    registry: UnitRegistry[float] = UnitRegistry()
    for line in _DEFINITIONS:
        registry.define(line)
    registry._build_cache()  # of what is made of the units defined anew
    return registry
