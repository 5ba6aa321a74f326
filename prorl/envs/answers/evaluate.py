"""Evaluates expressions, and decides whether two are equal.

The value is exact where it is rational, else a double.

Two expressions with symbols are equal if they agree at each of nine points, wherever both have a
value there. Exact values are compared exactly, others to one part in 10^9. The work is bounded: by
bits of a value and of all values together, whatever the expression says.
"""

from __future__ import annotations

import cmath
import math
import random
from collections.abc import Callable, Iterator, Mapping
from fractions import Fraction

from prorl.envs.answers.notation import UnreadableError
from prorl.envs.answers.parse import Node

Number = Fraction | float | complex

MAX_BITS = 20_000
MAX_FACTORIAL = 2_500
MAX_INDEX = 100
"""The greatest index of a root that is looked for exactly."""
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
MAX_TOTAL_BITS = 600_000
_CLOSE = 1e-9
_RANGES = ((2, 30, 1),) * 3 + ((1, 60, 23),) * 2 + ((-60, -1, 19),) * 2 + ((-60, 60, 17),) * 2
"""The ranges of the points: the least and the greatest numerator, the greatest denominator."""
_MIN_POINTS = 3


class UndefinedError(ValueError):
    """The expression has no value here, or one beyond the bounds."""


def equal(left: Node, right: Node) -> bool:
    """Returns whether two expressions have the same value, wherever both have a value. Raises
    UnreadableError.
    """
    names = sorted(symbols(left) | symbols(right))
    agreed = 0
    for point in _points(names, left, right):
        try:
            pair = _Evaluation(point).value(left), _Evaluation(point).value(right)
        except (UndefinedError, OverflowError, ZeroDivisionError):
            continue
        if not close(*pair):
            return False
        agreed += 1
    if agreed < (_MIN_POINTS if names else 1):
        raise UnreadableError("an expression without a value")
    return True


def proportional(left: Node, right: Node) -> bool:
    """Returns whether an expression is the other times a number that is not 0: two equations `= 0`
    are then the same.
    """
    names = sorted(symbols(left) | symbols(right))
    ratios: list[Number] = []
    for point in _points(names, left, right):
        try:
            pair = _Evaluation(point).value(left), _Evaluation(point).value(right)
        except (UndefinedError, OverflowError, ZeroDivisionError):
            continue
        if not pair[0] or not pair[1]:
            if bool(pair[0]) != bool(pair[1]):
                return False
            continue
        ratios.append(pair[1] / pair[0])
    if len(ratios) < (_MIN_POINTS if names else 1):
        return False
    return all(close(ratio, ratios[0]) for ratio in ratios)


def number(node: Node) -> Number:
    """The value of an expression without symbols. Raises UnreadableError, UndefinedError."""
    if symbols(node):
        raise UndefinedError("an expression with symbols")
    try:
        return _Evaluation({}).value(node)
    except (OverflowError, ZeroDivisionError) as cause:
        raise UndefinedError(str(cause)) from cause


def real(node: Node) -> Fraction | float:
    """Returns the same number where it is real; infinities are. Raises UndefinedError."""
    scalar = number(node)
    if isinstance(scalar, complex):
        if abs(scalar.imag) > _CLOSE * abs(scalar):
            raise UndefinedError("no real number")
        return scalar.real
    return scalar


def close(left: Number, right: Number) -> bool:
    """Exactly equal if both are exact, else to one part in 10^9."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return left == right
    a, b = as_complex(left), as_complex(right)
    if cmath.isinf(a) or cmath.isinf(b):
        return a == b
    size = max(abs(a), abs(b))
    exact_zero = (isinstance(left, Fraction) and not left) or (
        isinstance(right, Fraction) and not right
    )
    return abs(a - b) <= max(_CLOSE * size, 1e-12 if exact_zero else 0.0)


def symbols(node: Node) -> frozenset[str]:
    """The free symbols; constants are none."""
    if node.op == "sym":
        return frozenset() if node.name in _VALUES else frozenset((node.name,))
    return frozenset[str]().union(*map(symbols, node.args))


def _points(names: list[str], *nodes: Node) -> Iterator[Mapping[str, Fraction]]:
    """Points drawn from both expressions: no answer can be made to agree at them alone."""
    dice = random.Random("".join(map(_seed, nodes)))
    for low, high, divisor in _RANGES if names else ((0, 0, 1),):
        yield {name: _drawn(dice, low, high, divisor) for name in names}


def _seed(node: Node) -> str:
    numbers = f"{node.value.numerator:x}/{node.value.denominator:x}"
    return f"({node.op} {node.name} {numbers}{''.join(map(_seed, node.args))})"


def _drawn(dice: random.Random, low: int, high: int, divisor: int) -> Fraction:
    return Fraction(dice.randint(low, high) or 1, dice.randint(1, divisor))


_VALUES: Mapping[str, Number] = {
    "pi": math.pi,
    "e": math.e,
    "i": 1j,
    "inf": math.inf,
}


class _Evaluation:
    """One walk over a tree at one point; counts what it costs."""

    def __init__(self, point: Mapping[str, Fraction]) -> None:
        self._point, self._bits = point, 0

    def value(self, node: Node) -> Number:
        """Returns the value of a tree.

        Raises UndefinedError, UnreadableError, OverflowError, ZeroDivisionError.
        """
        scalar = self._of(node)
        if isinstance(scalar, Fraction):
            bits = scalar.numerator.bit_length() + scalar.denominator.bit_length()
            self._bits += bits
            if bits > MAX_BITS or self._bits > MAX_TOTAL_BITS:
                raise UndefinedError("a number out of all proportion")
            return scalar
        if isinstance(scalar, complex) and not scalar.imag:
            scalar = scalar.real
        if cmath.isnan(scalar):
            raise UndefinedError("no number")
        return scalar

    def _of(self, node: Node) -> Number:
        if node.op == "num":
            return node.value
        if node.op == "sym":
            if node.name in _VALUES:
                return _VALUES[node.name]
            if node.name.startswith("\\"):
                raise UnreadableError("a set where a number belongs")
            return self._point[node.name]
        if node.op in ("+", "-", "*", "/", "^"):
            left, right = map(self.value, node.args)
            return self._binary(node.op, left, right)
        if node.op == "call":  # any value, one for each argument
            values = [hash(self.value(arg)) for arg in node.args]
            return _drawn(random.Random(f"{node.name} {values}"), 1, 10**6, 10**3)
        rule = RULES.get(node.op)
        if rule is not None:
            return rule(*map(self.value, node.args))
        if node.op in ELEMENTARY and len(node.args) == 1:
            return elementary(node.op, self.value(node.args[0]))
        raise UnreadableError(f"{node.op} where a number belongs")

    def _binary(self, op: str, left: Number, right: Number) -> Number:
        exact = isinstance(left, Fraction) and isinstance(right, Fraction)
        if op == "^":
            return power_of(left, right)
        if not exact:
            left, right = as_float(left), as_float(right)
            if any(cmath.isinf(value) for value in (left, right)):
                raise UndefinedError("a sum with infinity")
            if op in "+-" and 0 < min(abs(left), abs(right)) < _CLOSE * max(abs(left), abs(right)):
                raise UndefinedError("a term too small to be seen")
        if op == "+":
            return left + right
        if op == "-":
            return left - right
        return left * right if op == "*" else left / right


# ---- arithmetic of values: exact where they are rational, else in doubles


def as_complex(value: Number) -> complex:
    """A value as a complex double. Raises UndefinedError as `as_float` does."""
    return complex(as_float(value))


def elementary(name: str, value: Number) -> Number:
    """Returns the value of a function of ELEMENTARY. Raises UndefinedError at a pole."""
    if name == "exp" and isinstance(value, Fraction) and not value:
        return Fraction(1)
    image = ELEMENTARY[name](as_complex(value))
    if name in ("tan", "sec", "csc", "cot") and abs(image) > 1e14:
        raise UndefinedError("a pole")
    return image


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
    scalar: complex = complex(base) ** complex(power)
    return scalar


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
        exponent = math.log(value) / math.log(base)
        whole = round(exponent)
        if abs(whole) < 1000 and power_of(base, Fraction(whole)) == value:
            return Fraction(whole)
        return exponent
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
}
"""Functions of values by their name in a tree."""
