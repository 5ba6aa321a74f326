r"""Reading mathematics: the plain notation of `notation.py` -> a tree of `Node`.

A recursive descent whose depth and number of tokens are bounded. What it has no rule for raises
UnreadableError: unevaluated sums and integrals, half an expression, words in the wrong place. An
integer before a fraction of integers is a mixed number (`3\frac{1}{2}`, `3 1/2` are 7/2); a sign or
number before a letter or bracket multiplies; `a/bc` is `(a/b)c`.

>>> parse(r"2x + \frac{1}{3}").op, parse("x=1 or x=2").op, parse("[2, 5)").name
('+', 'list', '[)')
"""

from __future__ import annotations

import re

from prorl.envs.answers.notation import FUNCTIONS, GREEK, Token, UnreadableError, spell, tokens
from prorl.envs.answers.tree import Node
from prorl.envs.answers.values import CONSTANTS, Values
from prorl.envs.units import parse_unit

RELATIONS = frozenset("=<>≤≥≠≈∈∉")


def parse(text: str, *, attached_units: bool = True, units: bool = True) -> Node:
    """The tree of a text. Raises UnreadableError.

    `units`: letters behind a number and a space are its unit where they are one (`5 m`), else they
    multiply it; `attached_units`: also without the space (`5m`).
    """
    return _Parser(tokens(spell(text)), units, attached_units).statement()


class _Parser(Values):
    """Statements, lists, relations, sums, products, powers."""

    # ---- statements

    def statement(self) -> Node:
        """Parse the whole text as one statement."""
        if not self._signs:
            raise UnreadableError("nothing")
        items, joints = self._items()
        if self._peek().kind != "end":
            raise UnreadableError(f"{self._peek().text!r} is left")
        return items[0] if len(items) == 1 else Node("list", tuple(items), name=joints)

    def _items(self) -> tuple[list[Node], str]:
        """Items between commas, `or`, `and`; the strongest joint among them."""
        items, joint = [self._item()], ","
        while True:
            if self._take(",", ";"):
                word = next((word for word in ("and", "or") if self._take(word)), ",")
            elif (found := self._peek().text) in ("or", "and"):
                self._place += 1
                word = found
            else:
                return items, joint
            joint = word if word != "," else joint
            if self._peek().kind == "end":
                raise UnreadableError("a list without its end")
            items.append(self._item())

    def _item(self) -> Node:
        """A chain of relations, with the unit behind it."""
        first = self._measured()
        terms, signs = [first], ""
        while (sign := self._peek().text) in RELATIONS and self._peek().kind == "sign":
            self._place += 1
            terms.append(self._measured())
            signs += sign
        return Node("relation", tuple(terms), name=signs) if signs else first

    def _measured(self) -> Node:
        found = self._sets()
        if not self._in_set and (self._take(":") or self._is_to()):
            parts = [found, self._sets()]
            while self._take(":") or self._is_to():
                parts.append(self._sets())
            found = Node("ratio", tuple(parts))
        tail = self._tail()
        return Node("unit", (found,), name=tail) if tail else found

    def _is_to(self) -> bool:
        return self._take("to")

    def _tail(self) -> str:
        """The text of the unit that begins here, up to the next separator."""
        token = self._peek()
        begins = token.kind in ("word", "name") or token.text in ("%", "°")
        if token.text == "(" and self._peek(1).kind in ("word", "name"):
            begins = True
        if not begins or token.text in ("or", "and", "to"):
            return ""
        parts: list[str] = []
        while (token := self._peek()).kind != "end":
            if token.text in (",", ";", "or", "and", ")", "]", "⦄") and not (
                token.text == ")" and "(" in "".join(parts)
            ):
                break
            if token.text in RELATIONS:
                break
            parts.append(" " * token.spaced + token.text + " " * (token.kind == "word"))
            self._place += 1
        return "".join(parts).strip()

    def _sets(self) -> Node:
        left = self._sum()
        while (sign := self._peek().text) in ("∪", "∩", "∖"):
            self._place += 1
            left = Node(sign, (left, self._sum()))
        if self._peek().text == "U" and left.op in ("sequence", "∪"):
            self._place += 1
            return Node("∪", (left, self._sets()))
        return left

    # ---- expressions

    def _sum(self) -> Node:
        self._deeper()
        sign = self._peek().text
        if sign in ("±", "∓"):
            self._place += 1
            left = Node(sign, (Node("num"), self._product()))
        else:
            left = self._product()
        while (sign := self._peek().text) in ("+", "-", "±", "∓"):
            self._place += 1
            left = Node(sign, (left, self._product()))
        self._depth -= 1
        return left

    def _product(self) -> Node:
        left = self._signed()
        while True:
            if self._take("*"):
                left = Node("*", (left, self._signed()))
            elif self._take("/"):
                left = Node("/", (left, self._signed()))
            elif self._is_times():
                left = Node("*", (left, self._signed()))
            elif self._starts_factor(left):
                left = Node("*", (left, self._power()))
            else:
                return left

    def _is_times(self) -> bool:
        """An `x` between numbers: `6.02 x 10^23`."""
        here, after = self._peek(), self._peek(1)
        return (
            here.text in ("x", "X")
            and here.spaced
            and after.kind == "num"
            and after.spaced
            and self._take(here.text)
        )

    def _signed(self) -> Node:
        if self._take("-"):
            self._deeper()
            inner = self._signed()
            self._depth -= 1
            return Node("neg", (inner,))
        if self._take("+"):
            return self._signed()
        return self._power()

    def _starts_factor(self, left: Node) -> bool:
        token = self._peek()
        if token.kind == "num":
            return self._signs[self._place - 1].text == "!"
        if token.kind == "name":
            return not self._is_unit(token) and self._is_symbols(token)
        if token.kind == "command":
            return token.text[1:] not in ("end", "choose")
        if token.text == "(":
            first, then = self._peek(1), self._peek(2)
            if first.kind == "word" or (first.kind == "name" and not self._is_symbols(first)):
                return False
            known = first.text in FUNCTIONS or first.text in CONSTANTS or len(first.text) == 1
            return known or first.kind != "name" or then.kind not in ("name", "end")
        return token.text in ("⌊", "⌈") or (token.text == "|" and not self._in_abs)

    def _is_symbols(self, token: Token) -> bool:
        """Whether a run of letters stands for symbols or a function, not for a word."""
        text = token.text
        if text in FUNCTIONS or text in CONSTANTS or text in GREEK:
            return True
        if text in ("or", "and", "to", "in", "is"):
            return False
        if len(text) == 1:
            return not (text == "U" and token.spaced)
        return len(text) <= 3 and (not token.spaced or not self._units)

    def _is_unit(self, token: Token) -> bool:
        """Whether the letters here are the unit of the number before them."""
        before = self._signs[self._place - 1] if self._place else Token("end", "", True)
        if not self._units or before.kind != "num" or token.text in ("e", "i", "x", "y", "z"):
            return False
        if token.spaced:
            rest = "".join(" " * one.spaced + one.text for one in self._signs[self._place :])
            rest = re.sub(r"[{}]", "", re.split(r",| or | and ", rest)[0])
            return parse_unit(rest.strip().rstrip(".")) is not None
        letters = token.text
        known = parse_unit(letters) is not None
        return known and (len(letters) > 1 or (self._attached and letters in "mgshL"))

    def _power(self) -> Node:
        base = self._postfix()
        if not self._take("^"):
            return base
        power = self._argument(signed=True)
        return Node("^", (base, power))

    def _postfix(self) -> Node:
        found = self._primary()
        while True:
            if self._take("!"):
                found = Node("factorial", (found,))
            elif self._peek().text == "°" and self._peek(1).kind == "sign" and self._depth > 1:
                self._place += 1
                found = Node("degrees", (found,))
            else:
                return found
