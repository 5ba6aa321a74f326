"""Quantities: a number with a unit, for grading short answers of the sciences.

Pure functions. Units are products of powers of the SI's and of what textbooks use beside them, with
prefixes: `m/s^2`, `kJ mol^-1`, `N*m`, `g/cm3`. What is after the first `/` divides, up to a closing
bracket. Temperatures in degrees are values of their own scale, not converted.

>>> quantity("3.0 x 10^8 m/s")
Quantity(value=300000000.0, unit=Unit(factor=1.0, powers=(('m', 1), ('s', -1))))
>>> quantity("5 km").unit.factor, quantity("12 apples"), quantity("1/4").value
(1000.0, None, 0.25)
"""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import NamedTuple

from prorl.envs.unit_tables import BASE, FIXED, PREFIXES, SPOKEN, SPOKEN_PREFIXES

MAX_CHARS = 200

_SPELLINGS = (
    (re.compile(r"\^\{([^{}]*)\}"), r"^\1"),
    (re.compile(r"[µμ]"), "u"),
    (re.compile(r"[Ωω]|\\Omega|\\ohm"), "ohm"),
    (re.compile(r"°\s*C\b|\\degree\s*C|\^\s*\\circ\s*C|\^\{\\circ\}\s*C"), "degC"),
    (re.compile(r"°\s*F\b"), "degF"),
    (re.compile(r"°|\\degree|\^\{?\\circ\}?"), "deg"),
    (re.compile(r"Å"), "angstrom"),
    (re.compile(r"\\%"), "%"),
    (re.compile(r"\\(?:text|mathrm|mathbf|rm|operatorname)\s*\{([^{}]*)\}"), r" \1 "),
    (re.compile(r"\\(?:times|cdot)|×|·|⋅"), "*"),
    (re.compile(r"\\[,;:! ]|~|\$|\\left|\\right"), " "),
    (re.compile(r"−|–"), "-"),
    (re.compile(r"\\d?frac\s*\{([^{}]*)\}\s*\{([^{}]*)\}"), r"\1/\2"),
)
_TEN_TO = re.compile(r"10([⁰¹²³⁴⁵⁶⁷⁸⁹⁻]+)")
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_NUMBER = re.compile(
    r"\s*(?:[a-zA-Z]\w{0,3}\s*[=≈]\s*)?(?:approximately|about|≈|~)?\s*"
    r"([-+]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)"
    r"(?:[eE]([-+]?\d+)|\s*(?:\*|x)\s*10\s*\^?\s*\(?([-+]?\d+)\)?)?(?:\s*/\s*(\d+(?:\.\d+)?))?"
)
_FACTOR = re.compile(r"\s*([*/()]|[a-zA-Z%]+(?:\s*(?:\^|\*\*)?\s*\(?(-?\d+)\)?)?)")
_POWER = re.compile(r"([a-zA-Z]+)(-?\d*)")


class Unit(NamedTuple):
    """A factor to the SI, and powers of its base units, sorted."""

    factor: float
    powers: tuple[tuple[str, int], ...]


class Quantity(NamedTuple):
    """A number in a unit; no unit at all is one without powers and with factor 1."""

    value: float
    unit: Unit

    @property
    def has_unit(self) -> bool:
        """Whether it is more than a number."""
        return self.unit != NO_UNIT


NO_UNIT = Unit(1.0, ())


def quantity(text: str) -> Quantity | None:
    """The quantity that a text is; None when it is anything else, too."""
    if len(text) > MAX_CHARS:
        return None
    plain = _TEN_TO.sub(r"10^\1", text).translate(_SUPERSCRIPTS)
    for spelling, ours in _SPELLINGS:
        plain = spelling.sub(ours, plain)
    found = _NUMBER.match(plain)
    if found is None or not any(char.isdigit() for char in found[1]):
        return None
    unit = parse_unit(plain[found.end() :].strip().rstrip(".").strip())
    divisor = float(found[4] or 1)
    if unit is None or not divisor:
        return None
    value = float(f"{found[1].replace(',', '')}e{found[2] or found[3] or 0}") / divisor
    return Quantity(value, unit) if math.isfinite(value) else None


def parse_unit(text: str) -> Unit | None:
    """A unit; None for words that are none."""
    factor, sign, place = 1.0, 1, 0
    powers: Counter[str] = Counter()
    while place < len(text):
        found = _FACTOR.match(text, place)
        if found is None:
            return None
        place, word = found.end(), found[1]
        if word == "/":
            sign = -1
        elif word == ")":
            sign = 1
        elif word not in ("*", "("):
            one = _raised(word, sign * int(found[2] or 1))
            if one is None:
                return None
            factor *= one.factor
            powers.update(dict(one.powers))
    return Unit(factor, tuple(sorted((base, power) for base, power in powers.items() if power)))


def _raised(word: str, power: int) -> Unit | None:
    """The unit that a word such as `cm2` begins with, to a power that is no more than 12."""
    name = re.match(r"[a-zA-Z%]+", word)
    one = _simple(name[0]) if name else None
    if one is None or abs(power) > 12:
        return None
    return Unit(one.factor**power, tuple((base, each * power) for base, each in one.powers))


def _simple(name: str) -> Unit | None:
    """One unit with or without a prefix."""
    if name in FIXED:
        return _made(*FIXED[name])
    if len(name) > 3 and (found := _spoken(name.removesuffix("s"))):
        return found
    for prefix, scale in PREFIXES.items():
        base = BASE.get(name.removeprefix(prefix)) if name.startswith(prefix) else None
        if base is not None:
            return _made(scale * base[0], base[1])
    return None


def _spoken(name: str) -> Unit | None:
    """A unit in words, with or without a prefix: `mile`, `kilogram`."""
    if name in FIXED:
        return _made(*FIXED[name])
    for prefix, scale in SPOKEN_PREFIXES.items():
        base = name.removeprefix(prefix)
        if base != name and base in SPOKEN:
            return _made(scale * FIXED[base][0], FIXED[base][1])
    return None


def _made(factor: float, powers: str) -> Unit:
    pairs = ((name, int(power or 1)) for name, power in _POWER.findall(powers))
    return Unit(factor, tuple(sorted(pairs)))


def equal(given: Quantity, wanted: Quantity, tolerance: float) -> bool:
    """Whether they are one quantity within a relative tolerance.

    A number without a unit is taken to be in the wanted one.

    >>> metres = quantity("500 m")
    >>> equal(quantity("0.5 km"), metres, 1e-3), equal(quantity("500"), metres, 1e-3)
    (True, True)
    >>> equal(quantity("500 s"), quantity("500 m"), 1e-3)
    False
    """
    if given.has_unit and given.unit.powers != wanted.unit.powers:
        return False
    factor = given.unit.factor / wanted.unit.factor if given.has_unit else 1.0
    return math.isclose(given.value * factor, wanted.value, rel_tol=tolerance, abs_tol=1e-300)
