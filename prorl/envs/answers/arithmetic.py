"""Arithmetic of values: exact where they are rational, else in doubles.

Every function is bounded in its work; what has no value, or one beyond the bounds, raises
UndefinedError.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Callable, Mapping
from fractions import Fraction

Number = Fraction | float | complex

MAX_BITS = 20_000
MAX_FACTORIAL = 2_500
MAX_INDEX = 100
"""Of a root that is looked for exactly."""
ELEMENTARY: Mapping[str, Callable[[complex], complex]] = {
    "sin": cmath.sin,
    "cos": cmath.cos,
    "tan": cmath.tan,
    "sec": lambda x: 1 / cmath.cos(x),
    "csc": lambda x: 1 / cmath.sin(x),
    "cot": lambda x: cmath.cos(x) / cmath.sin(x),
    "arcsin": cmath.asin,
    "arccos": cmath.acos,
    "arctan": cmath.atan,
    "arccot": lambda x: math.pi / 2 - cmath.atan(x),
    "sinh": cmath.sinh,
    "cosh": cmath.cosh,
    "tanh": cmath.tanh,
    "coth": lambda x: 1 / cmath.tanh(x),
    "arcsinh": cmath.asinh,
    "arccosh": cmath.acosh,
    "arctanh": cmath.atanh,
    "exp": cmath.exp,
}
"""Functions of one number that have no exact values."""


class UndefinedError(ValueError):
    """The expression has no value here, or one beyond the bounds."""


def as_complex(value: Number) -> complex:
    """A value as a complex double. Raises UndefinedError as `as_float` does."""
    return complex(as_float(value))


def elementary(name: str, value: Number) -> Number:
    """The value of a function of ELEMENTARY. Raises UndefinedError at a pole."""
    if name == "exp" and isinstance(value, Fraction) and not value:
        return Fraction(1)
    found = ELEMENTARY[name](as_complex(value))
    if name in ("tan", "sec", "csc", "cot") and abs(found) > 1e14:
        raise UndefinedError("a pole")
    return found


def as_float(value: Number) -> float | complex:
    """A value as a double, or complex as it is. Raises UndefinedError where no double is near."""
    try:
        return float(value) if isinstance(value, Fraction) else value
    except OverflowError as cause:
        raise UndefinedError("a number beyond doubles") from cause


def power_of(base: Number, power: Number) -> Number:
    """A power, exact where both are rational and its root is. Raises UndefinedError."""
    if isinstance(base, Fraction) and isinstance(power, Fraction):
        if power.denominator == 1:
            bits = base.numerator.bit_length() + base.denominator.bit_length() - 2
            if bits * abs(power.numerator) > MAX_BITS:
                raise UndefinedError("a number out of all proportion")
            return base**power.numerator
        if power.denominator <= MAX_INDEX:
            return _root(power_of(base, Fraction(power.numerator)), Fraction(power.denominator))
    left, right = as_float(base), as_float(power)
    if not left:
        raise UndefinedError("a power of nothing")
    if cmath.isinf(left) or cmath.isinf(right):
        raise UndefinedError("a power with infinity")
    return _float_power(left, right)


def _float_power(base: float | complex, power: float | complex) -> complex:
    found: complex = complex(base) ** complex(power)
    return found


def _root(value: Number, index: Number) -> Number:
    """The real root of a negative number where the index is odd, the principal one elsewhere."""
    if not isinstance(index, Fraction) or index.denominator != 1 or not 1 <= index <= MAX_INDEX:
        if isinstance(index, Fraction) and not index:
            raise UndefinedError("a root of index 0")
        return power_of(value, Fraction(1) / index if isinstance(index, Fraction) else 1 / index)
    n = index.numerator
    if isinstance(value, Fraction):
        sign = -1 if value < 0 else 1
        tops = _whole_root(abs(value.numerator), n), _whole_root(value.denominator, n)
        if tops[0] is not None and tops[1] is not None and (sign > 0 or n % 2):
            return Fraction(sign * tops[0], tops[1])
        if sign < 0 and n % 2:
            return -(_float_power(float(-value), 1 / n).real)
    if isinstance(value, float) and value < 0 and n % 2:
        return -_float_power(-value, 1 / n).real
    if n == 2:
        return cmath.sqrt(as_complex(value))
    return _float_power(as_complex(value), 1 / n)


def _whole_root(value: int, n: int) -> int | None:
    """The n-th root of a natural number that has a whole one."""
    if n == 2:
        root = math.isqrt(value)
        return root if root * root == value else None
    if value.bit_length() > 1000:
        return None
    root = round(value ** (1 / n))
    return root if root**n == value else None


def _logarithm(value: Number, base: Number) -> Number:
    if not value:
        raise UndefinedError("the logarithm of 0")
    if isinstance(value, Fraction) and isinstance(base, Fraction) and base > 0 and value > 0:
        # of whole powers exactly, so that log_2 8 is 3
        found = math.log(value) / math.log(base)
        whole = round(found)
        if abs(whole) < 1000 and power_of(base, Fraction(whole)) == value:
            return Fraction(whole)
        return found
    return cmath.log(as_complex(value)) / cmath.log(as_complex(base))


def _natural(value: Number) -> Number:
    if not value:
        raise UndefinedError("the logarithm of 0")
    if isinstance(value, Fraction):
        return Fraction(0) if value == 1 else cmath.log(as_complex(value))
    return cmath.log(value)


def _whole(value: Number) -> int:
    if not isinstance(value, Fraction) or value.denominator != 1 or not 0 <= value <= MAX_FACTORIAL:
        raise UndefinedError("no small natural number")
    return value.numerator


def _choose(n: Number, k: Number) -> Number:
    """The binomial coefficient of any rational n and a small k."""
    size = _whole(k)
    if isinstance(n, Fraction) and n.denominator == 1 and n >= 0:
        return Fraction(math.comb(_whole(n), size))
    if not isinstance(n, Fraction) or size > 30:
        raise UndefinedError("a binomial of no number")
    product = Fraction(1)
    for index in range(size):
        product *= n - index
    return product / math.factorial(size)


def _floor(value: Number) -> Number:
    if isinstance(value, complex):
        raise UndefinedError("the floor of a complex number")
    return Fraction(math.floor(value))


def _absolute(value: Number) -> Number:
    return abs(value) if isinstance(value, complex) else max(value, -value)


def _negative(value: Number) -> Number:
    return -value


def _integers(values: tuple[Number, ...]) -> list[int]:
    if not all(isinstance(value, Fraction) and value.denominator == 1 for value in values):
        raise UndefinedError("no integers")
    return [int(value.real) for value in values]


def _reals(values: tuple[Number, ...]) -> list[Fraction | float]:
    if not values or any(isinstance(value, complex) for value in values):
        raise UndefinedError("no real numbers")
    return [value for value in values if not isinstance(value, complex)]


RULES: Mapping[str, Callable[..., Number]] = {
    "neg": _negative,
    "abs": _absolute,
    "root": _root,
    "cbrt": lambda value: _root(value, Fraction(3)),
    "log": _logarithm,
    "log10": lambda value: _logarithm(value, Fraction(10)),
    "ln": _natural,
    "floor": _floor,
    "ceil": lambda value: -_floor(-value),
    "factorial": lambda value: Fraction(math.factorial(_whole(value))),
    "binom": lambda n, k: _choose(n, k),
    "degrees": lambda value: as_float(value) * math.pi / 180,
    "gcd": lambda *values: Fraction(math.gcd(*_integers(values))),
    "lcm": lambda *values: Fraction(math.lcm(*_integers(values))),
    "max": lambda *values: max(_reals(values), key=float),
    "min": lambda *values: min(_reals(values), key=float),
}
"""Functions of values by their name in a tree."""
