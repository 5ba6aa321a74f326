r"""Sets of real numbers: intervals, unions, inequalities, conditions -> sorted intervals.

>>> from prorl.envs.answers.parse import parse
>>> str_of = lambda text: [tuple(map(str, part)) for part in real_set(parse(text)).parts]
>>> str_of("[2,5)") == str_of("2 ≤ x < 5"), str_of("x ≠ 0") == str_of(r"\mathbb{R} \setminus \{0\}")
(True, True)
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import NamedTuple

from prorl.envs.answers.evaluate import UndefinedError, close, real, symbols
from prorl.envs.answers.notation import UnreadableError
from prorl.envs.answers.parse import Node

_FLIPPED = {"<": ">", ">": "<", "≤": "≥", "≥": "≤", "≠": "≠", "=": "="}


class Interval(NamedTuple):
    """The numbers from lo to hi; one point where both are equal and closed."""

    lo: Fraction | float
    has_lo: bool
    hi: Fraction | float
    has_hi: bool


class RealSet(NamedTuple):
    """Disjoint intervals in their order, and what the text called their element, if anything."""

    parts: tuple[Interval, ...]
    name: str = ""


ALL = RealSet((Interval(-math.inf, False, math.inf, False),))


def same_set(left: RealSet, right: RealSet) -> bool:
    """Returns whether two sets hold the same numbers."""
    return len(left.parts) == len(right.parts) and all(
        close(a.lo, b.lo) and close(a.hi, b.hi) and (a.has_lo, a.has_hi) == (b.has_lo, b.has_hi)
        for a, b in zip(left.parts, right.parts, strict=True)
    )


def real_set(node: Node) -> RealSet:
    """The set that a tree describes. Raises UnreadableError where it describes none."""
    try:
        return _of(node)
    except UndefinedError as cause:
        raise UnreadableError(str(cause)) from cause


def _of(node: Node) -> RealSet:
    if node.op == "sym" and node.name == "\\R":
        return ALL
    if node.op == "sequence":
        return _sequence(node)
    if node.op == "∪":
        return union(_of(node.args[0]), _of(node.args[1]))
    if node.op == "∩":
        return _both(_of(node.args[0]), _of(node.args[1]))
    if node.op == "∖":
        return _both(_of(node.args[0]), _complement(_of(node.args[1])))
    if node.op == "relation":
        return _relation(node)
    if node.op == "list" and all(item.op == "relation" for item in node.args):
        return _conditions(node)
    if node.op == "builder":
        condition = _of(node.args[1])
        return _both(condition, _of(node.args[0])) if node.args[0].op == "relation" else condition
    raise UnreadableError(f"{node.op} where a set belongs")


def _conditions(node: Node) -> RealSet:
    """Returns the numbers that fulfil a list of relations on one symbol: one of them, or all."""
    sets = [_of(item) for item in node.args]
    if len({condition.name for condition in sets}) > 1:
        raise UnreadableError("conditions on several symbols")
    solutions = sets[0]
    for condition in sets[1:]:
        solutions = (
            union(solutions, condition) if node.name == "or" else _both(solutions, condition)
        )
    return solutions


def _sequence(node: Node) -> RealSet:
    if node.name == "⦃⦄":
        points = [real(item) for item in node.args]
        return _merged([Interval(value, True, value, True) for value in points])
    if len(node.args) != 2:
        raise UnreadableError("an interval has two ends")
    lo, hi = real(node.args[0]), real(node.args[1])
    interval = Interval(lo, node.name[0] == "[", hi, node.name[1] == "]")
    if not lo < hi and not (lo == hi and interval.has_lo and interval.has_hi):
        raise UnreadableError("an interval from high to low")
    if (interval.has_lo and math.isinf(lo)) or (interval.has_hi and math.isinf(hi)):
        raise UnreadableError("an interval that holds infinity")
    return RealSet((interval,))


def _relation(node: Node) -> RealSet:
    """Returns the set of `x < 3`, `2 ≤ x < 5`, `x ∈ [1, 2]` or `x ≠ 0`."""
    if node.name in ("∈", "∉"):
        solutions = _of(node.args[1])
        solutions = solutions if node.name == "∈" else _complement(solutions)
        return RealSet(solutions.parts, node.args[0].name)
    solutions, name = ALL, ""
    for left, sign, right in zip(node.args, node.name, node.args[1:], strict=False):
        if right.op == "sym" and symbols(right):
            left, right, sign = right, left, _FLIPPED.get(sign, "?")
        if left.op != "sym" or not symbols(left) or symbols(right) or sign not in _FLIPPED:
            raise UnreadableError("no condition on one symbol")
        if name not in ("", left.name):
            raise UnreadableError("conditions on several symbols")
        name = left.name
        solutions = _both(solutions, _half(sign, real(right)))
    return RealSet(solutions.parts, name)


def _half(sign: str, value: Fraction | float) -> RealSet:
    below = Interval(-math.inf, False, value, sign == "≤")
    above = Interval(value, sign == "≥", math.inf, False)
    if sign == "≠":
        return RealSet((below, above))
    if sign == "=":
        return RealSet((Interval(value, True, value, True),))
    return RealSet((below if sign in "<≤" else above,))


def union(left: RealSet, right: RealSet) -> RealSet:
    """The set of what is in either set."""
    return RealSet(_merged([*left.parts, *right.parts]).parts, left.name)


def _merged(parts: list[Interval]) -> RealSet:
    merged: list[Interval] = []
    for part in sorted(parts, key=lambda part: (part.lo, not part.has_lo)):
        last = merged[-1] if merged else None
        if last and (part.lo < last.hi or (part.lo == last.hi and (part.has_lo or last.has_hi))):
            hi, has_hi = max((last.hi, last.has_hi), (part.hi, part.has_hi))
            merged[-1] = Interval(last.lo, last.has_lo, hi, has_hi)
        else:
            merged.append(part)
    return RealSet(tuple(merged))


def _both(left: RealSet, right: RealSet) -> RealSet:
    overlaps = []
    for a in left.parts:
        for b in right.parts:
            lo, no_lo = max((a.lo, not a.has_lo), (b.lo, not b.has_lo))
            hi, has_hi = min((a.hi, a.has_hi), (b.hi, b.has_hi))
            if lo < hi or (lo == hi and not no_lo and has_hi):
                overlaps.append(Interval(lo, not no_lo, hi, has_hi))
    return RealSet(_merged(overlaps).parts, left.name or right.name)


def _complement(real_set: RealSet) -> RealSet:
    holes = ALL
    for part in real_set.parts:
        below = Interval(-math.inf, False, part.lo, not part.has_lo)
        above = Interval(part.hi, not part.has_hi, math.inf, False)
        sides = [side for side in (below, above) if side.lo < side.hi]
        holes = _both(holes, RealSet(tuple(sides)))
    return holes
