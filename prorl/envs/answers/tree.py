"""Trees of expressions, and the place in a row of tokens that they are read from."""

from __future__ import annotations

from fractions import Fraction
from typing import NamedTuple

from prorl.envs.answers.notation import Token, UnreadableError

MAX_DEPTH = 40


class Node(NamedTuple):
    """An operator with its arguments; `num` and `sym` are the leaves.

    Others: + - * / ^ neg ± ∓ and functions by name; `sequence` (name: its brackets; a list's are
    empty), `matrix` (rows), `relation` (name: its signs), `ratio`, `unit` (name: the unit's text),
    `builder`, `list` (name: `or`, `and` or a comma), ∪ ∩ ∖.
    """

    op: str
    args: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""


class TokenReader:
    """A place in a row of tokens; counts how deep the reading is."""

    def __init__(self, signs: list[Token], units: bool, attached: bool) -> None:
        self._signs, self._units, self._attached = signs, units, attached
        self._place, self._depth = 0, 0
        self._in_abs = False
        self._in_set = False

    def _peek(self, ahead: int = 0) -> Token:
        place = self._place + ahead
        return self._signs[place] if place < len(self._signs) else Token("end", "", True)

    def _next(self) -> Token:
        found = self._peek()
        self._place += 1
        return found

    def _take(self, *texts: str) -> bool:
        found = self._peek()
        if found.kind != "end" and found.text in texts:
            self._place += 1
            return True
        return False

    def _want(self, *texts: str) -> str:
        found = self._next()
        if found.text not in texts or found.kind == "end":
            raise UnreadableError(f"{found.text!r} where {texts[0]!r} belongs")
        return found.text

    def _deeper(self) -> None:
        """Raises UnreadableError where brackets and signs are nested too deep."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError("too deep")
