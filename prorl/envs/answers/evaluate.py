"""What an expression is worth, and whether two expressions are equal.

The value is exact where it is rational, else a double (`arithmetic.py`).

Two expressions with symbols are equal if they agree at each of nine points, wherever both have a
value there. Exact values are compared exactly, others to one part in 10^9. The work is bounded: by
bits of a value and of all values together, whatever the expression says.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction

from prorl.envs.answers.arithmetic import (
    ELEMENTARY,
    MAX_BITS,
    RULES,
    Number,
    UndefinedError,
    as_complex,
    as_float,
    elementary,
    power_of,
)
from prorl.envs.answers.notation import UnreadableError
from prorl.envs.answers.tree import Node

MAX_TOTAL_BITS = 600_000
_CLOSE = 1e-9
_POINTS = tuple(
    tuple(Fraction(text) for text in line.split())
    for line in (
        "7 11 5 13 3 17 2 19",
        "13/7 19/11 5/3 23/13 7/5 29/17 11/9 31/19",
        "3/11 5/13 2/7 7/17 4/9 8/19 5/23 9/29",
        "-3 -5 -7/2 -11/3 -2 -13/5 -9/4 -6",
        "17/5 -4/3 9/7 -21/8 15/4 -8/5 2/9 -19/6",
        "-1/7 12/5 -5/9 4/11 -9/5 16/7 -3/8 7/12",
        "101 89 73 61 47 37 29 23",
        "4 6 8 9 10 12 14 15",
        "5/2 3/2 9/4 7/3 11/4 8/3 6/5 13/6",
    )
)
_MIN_POINTS = 3


def equal(left: Node, right: Node) -> bool:
    """Whether two expressions have one value, wherever both have one. Raises UnreadableError."""
    names = sorted(symbols(left) | symbols(right))
    agreed = 0
    for point in _points(names):
        try:
            pair = _Evaluation(point).value(left), _Evaluation(point).value(right)
        except (UndefinedError, OverflowError, ZeroDivisionError):
            continue
        if names and _is_real(pair[0]) != _is_real(pair[1]):
            continue
        if not close(*pair):
            return False
        agreed += 1
    if agreed < (_MIN_POINTS if names else 1):
        raise UnreadableError("an expression without a value")
    return True


def proportional(left: Node, right: Node) -> bool:
    """Whether one is the other times a number that is not 0: two equations `= 0` are then one."""
    names = sorted(symbols(left) | symbols(right))
    ratios: list[Number] = []
    for point in _points(names):
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
    """The same, where it is real; infinities are. Raises UndefinedError."""
    found = number(node)
    if isinstance(found, complex):
        if abs(found.imag) > _CLOSE * abs(found):
            raise UndefinedError("no real number")
        return found.real
    return found


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


def _points(names: list[str]) -> Iterator[Mapping[str, Fraction]]:
    if not names:
        yield {}
        return
    for number, point in enumerate(_POINTS):
        yield {
            name: point[index % len(point)] + index // len(point) * (number + 1)
            for index, name in enumerate(names)
        }


def _is_real(value: Number) -> bool:
    return not isinstance(value, complex) or abs(value.imag) <= _CLOSE * max(abs(value), 1e-300)


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
        """Raises UndefinedError, UnreadableError, OverflowError, ZeroDivisionError."""
        found = self._of(node)
        if isinstance(found, Fraction):
            bits = found.numerator.bit_length() + found.denominator.bit_length()
            self._bits += bits
            if bits > MAX_BITS or self._bits > MAX_TOTAL_BITS:
                raise UndefinedError("a number out of all proportion")
            return found
        if isinstance(found, complex) and not found.imag:
            found = found.real
        if cmath.isnan(found):
            raise UndefinedError("no number")
        return found

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
        if op == "+":
            return left + right
        if op == "-":
            return left - right
        return left * right if op == "*" else left / right
