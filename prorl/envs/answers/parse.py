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
from fractions import Fraction
from typing import NamedTuple

from prorl.envs.answers.notation import (
    FUNCTIONS,
    GREEK,
    ROW_END,
    Token,
    UnreadableError,
    spell,
    tokens,
)
from prorl.envs.units import parse_unit

_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10", "log": "log10"}
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
CONSTANTS = {"pi": "pi", "infty": "inf", "infinity": "inf", "inf": "inf", "oo": "inf"}
_MARKS = frozenset(("vec", "hat", "underline", "bar", "overline", "dot", "tilde"))
r"""Signs over a letter: `\hat{v}` is another than `\vec{v}`."""
_CLOSING = {"⌊": "⌋", "⌈": "⌉"}
_OPENING = frozenset("([]⦃{|∅⌊⌈")
"""Signs that a value may begin with."""
_MATRICES = frozenset(("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"))
RELATIONS = frozenset("=<>≤≥≠≈∈∉")
MAX_DEPTH = 40
"""The greatest depth of brackets and signs."""
MAX_LEVELS = 120
"""The greatest depth of a tree: a product of so many factors has as many."""


class Node(NamedTuple):
    """An operator with its arguments; `num` and `sym` are the leaves.

    Others: + - * / ^ neg ± ∓ and functions by name; `call` (of an `f` or `g` of which nothing is
    known), `sequence` (name: its brackets; a list's are empty), `matrix` (rows), `relation` (name:
    its signs), `ratio`, `unit` (name: the unit's text), `builder`, `list` (name: `or`, `and` or a
    comma), ∪ ∩ ∖.
    """

    op: str
    args: tuple[Node, ...] = ()
    value: Fraction = Fraction(0)
    name: str = ""


def parse(text: str, *, attached_units: bool = True, units: bool = True) -> Node:
    """The tree of a text. Raises UnreadableError.

    `units`: letters behind a number and a space are its unit where they are one (`5 m`), else they
    multiply it; `attached_units`: also without the space (`5m`).
    """
    return _Parser(tokens(spell(text)), units, attached_units).statement()


class _Parser:
    """A place in a row of tokens, and how deep the reading is there."""

    def __init__(self, signs: list[Token], units: bool, attached: bool) -> None:
        self._signs, self._units, self._attached = signs, units, attached
        self._place, self._depth = 0, 0
        self._in_abs = False
        self._in_set = False

    def _peek(self, ahead: int = 0) -> Token:
        place = self._place + ahead
        return self._signs[place] if place < len(self._signs) else Token("end", "", True)

    def _next(self) -> Token:
        token = self._peek()
        self._place += 1
        return token

    def _take(self, *texts: str) -> bool:
        token = self._peek()
        if token.kind != "end" and token.text in texts:
            self._place += 1
            return True
        return False

    def _want(self, *texts: str) -> str:
        token = self._next()
        if token.text not in texts or token.kind == "end":
            raise UnreadableError(f"{token.text!r} where {texts[0]!r} belongs")
        return token.text

    def _deeper(self) -> None:
        """Raises UnreadableError where brackets and signs are nested too deep."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise UnreadableError("too deep")

    # ---- statements

    def statement(self) -> Node:
        """Parse the whole text as one statement."""
        if not self._signs:
            raise UnreadableError("nothing")
        items, joints = self._items()
        if self._peek().kind != "end":
            raise UnreadableError(f"{self._peek().text!r} is left")
        level, num_levels = items, 0
        while level := [arg for node in level for arg in node.args]:
            if (num_levels := num_levels + 1) > MAX_LEVELS:
                raise UnreadableError("too many levels")
        return items[0] if len(items) == 1 else Node("list", tuple(items), name=joints)

    def _items(self) -> tuple[list[Node], str]:
        """Returns items between commas, `or`, `and`; the strongest joint among them."""
        items, joint = [self._item()], ","
        while True:
            if self._take(",", ";"):
                word = next((word for word in ("and", "or") if self._take(word)), ",")
            elif (conjunction := self._peek().text) in ("or", "and"):
                self._place += 1
                word = conjunction
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
        node = self._sets()
        if not self._in_set and (self._take(":") or self._is_to()):
            parts = [node, self._sets()]
            while self._take(":") or self._is_to():
                parts.append(self._sets())
            node = Node("ratio", tuple(parts))
        tail = self._tail()
        if node.op == "ratio" and (parse_unit(tail) or re.match("0[0-9]", self._signs[2].text)):
            raise UnreadableError("a time of the day")
        return Node("unit", (node,), name=tail) if tail else node

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
        node = self._sum()
        while (sign := self._peek().text) in ("∪", "∩", "∖"):
            self._place += 1
            node = Node(sign, (node, self._sum()))
        if self._peek().text == "U" and node.op in ("sequence", "∪"):
            self._place += 1
            return Node("∪", (node, self._sets()))
        return node

    # ---- expressions

    def _sum(self) -> Node:
        self._deeper()
        sign = self._peek().text
        if sign in ("±", "∓"):
            self._place += 1
            node = Node(sign, (Node("num"), self._product()))
        else:
            node = self._product()
        while (sign := self._peek().text) in ("+", "-", "±", "∓"):
            self._place += 1
            node = Node(sign, (node, self._product()))
        self._depth -= 1
        return node

    def _product(self) -> Node:
        node = self._signed()
        while True:
            if self._take("*") or self._is_times():
                node = _times(node, self._signed())
            elif self._take("/"):
                node = Node("/", (node, self._signed()))
            elif self._starts_factor():
                node = _times(node, self._power())
            else:
                return node

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

    def _starts_factor(self) -> bool:
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
            is_operand = first.text in FUNCTIONS or first.text in CONSTANTS or len(first.text) == 1
            return is_operand or first.kind != "name" or then.kind not in ("name", "end")
        return token.text in ("⌊", "⌈") or (token.text == "|" and not self._in_abs)

    def _is_symbols(self, token: Token) -> bool:
        """Returns whether a run of letters stands for symbols or a function, not for a word."""
        text = token.text
        if text in FUNCTIONS or text in CONSTANTS or text in GREEK:
            return True
        if text in ("or", "and", "to", "in", "is"):
            return False
        if len(text) == 1:
            return not (text == "U" and token.spaced)
        return len(text) <= 3 and (not token.spaced or not self._units)

    def _is_unit(self, token: Token) -> bool:
        """Returns whether the letters here are the unit of the number before them."""
        before = self._signs[self._place - 1] if self._place else Token("end", "", True)
        if not self._units or before.kind != "num" or token.text in ("e", "i", "x", "y", "z"):
            return False
        if token.spaced:
            rest = "".join(" " * sign.spaced + sign.text for sign in self._signs[self._place :])
            rest = re.sub(r"[{}]", "", re.split(r",| or | and ", rest)[0])
            return parse_unit(rest.strip().rstrip(".")) is not None
        letters = token.text
        is_unit = parse_unit(letters) is not None
        return is_unit and (len(letters) > 1 or (self._attached and letters in "mgshL"))

    def _power(self) -> Node:
        base = self._postfix()
        if not self._take("^"):
            return base
        power = self._argument(signed=True)
        if base.op == "sequence" and base.name in ("()", "[]") and power.name in ("T", "top"):
            return Node("matrix", tuple(Node("row", (item,)) for item in base.args))
        return Node("^", (base, power))

    def _postfix(self) -> Node:
        node = self._primary()
        while True:
            if self._take("!"):
                node = Node("factorial", (node,))
            elif self._peek().text == "°" and self._peek(1).kind == "sign" and self._depth > 1:
                self._place += 1
                node = Node("degrees", (node,))
            else:
                return node

    # ---- values

    def _argument(self, *, signed: bool = False, digits: bool = False) -> Node:
        """Parses what a command takes: a group, a number (one digit of it for `\\frac12`), a
        sign.
        """
        if self._take("{"):
            return self._group()
        token = self._peek()
        if token.kind == "num":
            self._place += 1
            if digits and len(token.text) > 1:
                self._place -= 1
                self._signs[self._place] = Token("num", token.text[1:], False)
                return Node("num", value=Fraction(token.text[0]))
            return _number(token.text)
        if signed and token.text in ("-", "+"):
            return self._signed()
        if token.kind == "name" and len(token.text) > 1 and token.text not in FUNCTIONS:
            self._signs[self._place] = Token("name", token.text[1:], False)
            return Node("sym", name=token.text[0])
        return self._postfix()

    def _group(self) -> Node:
        """Parses what a brace opened; several items are a set."""
        outer, self._in_abs = self._in_abs, False
        items, _ = self._items()
        self._in_abs = outer
        self._want("}")
        return items[0] if len(items) == 1 else Node("sequence", tuple(items), name="⦃⦄")

    def _primary(self) -> Node:
        token = self._next()
        if token.kind == "num":
            return self._mixed(token)
        self._deeper()
        if token.kind == "name":
            node = self._letters(token)
        elif token.kind == "command":
            node = self._command(token.text[1:])
        elif token.kind == "sign" and token.text in _OPENING:
            node = self._opened(token.text)
        else:
            raise UnreadableError(f"{token.text!r} where a value belongs")
        self._depth -= 1
        return node

    def _opened(self, sign: str) -> Node:
        """The value that a sign of _OPENING begins."""
        if sign == "⦃":
            return self._set()
        if sign == "{":
            return self._group()
        if sign == "|":
            return self._absolute()
        if sign == "∅":
            return Node("sequence", (), name="⦃⦄")
        return self._rounded(sign) if sign in _CLOSING else self._bracket(sign)

    def _mixed(self, token: Token) -> Node:
        whole = _number(token.text)
        start = self._place
        is_divisor = start > 1 and self._signs[start - 2].text == "/"
        if not token.text.isdigit() or is_divisor:  # `1/2 1/2` is no quotient by 2 1/2
            return whole
        joined = self._take("and") and self._peek().kind == "num"
        if self._peek().text == "\\frac":
            self._place += 1
            parts = (self._argument(digits=True), self._argument(digits=True))
            if all(part.op == "num" and part.value.denominator == 1 for part in parts):
                return _plus(whole, *parts)
        elif self._peek().kind == "num" and self._peek().spaced and self._peek(1).text == "/":
            top, bottom = self._next(), (self._next(), self._next())[1]
            fits = top.text.isdigit() and bottom.kind == "num" and bottom.text.isdigit()
            if fits and not (joined and int(top.text) >= int(bottom.text)):
                return _plus(whole, _number(top.text), _number(bottom.text))
        self._place = start
        return whole

    def _letters(self, token: Token) -> Node:
        text = token.text
        if text in FUNCTIONS:
            return self._function(text)
        if text in CONSTANTS:
            return Node("sym", name=CONSTANTS[text])
        if text in GREEK:
            return self._symbol(text)
        if text in ("or", "and", "to") or len(text) > 3:
            raise UnreadableError(f"the word {text!r}")
        if len(text) == 1:
            return self._symbol(text)
        if self._units and token.spaced and self._peek().kind in ("name", "word", "end"):
            raise UnreadableError(f"the word {text!r}")
        self._place -= 1
        self._signs[self._place] = Token("name", text[1:], False)
        return Node("sym", name=text[0])

    def _symbol(self, name: str) -> Node:
        """A letter with its subscript and primes; a letter before a bracket may be a function."""
        if self._take("_"):
            name += "_" + _written(self._argument())
        while self._take("'"):
            name += "'"
        if name[0] in "fg" and self._peek().text == "(" and not self._peek().spaced:
            self._place += 1
            items, _ = self._items()
            self._want(")")
            return Node("call", tuple(items), name=name)
        return Node("sym", name=name)

    def _command(self, name: str) -> Node:
        if name == "frac":
            top, bottom = self._argument(digits=True), self._argument(digits=True)
            return Node("/", (top, bottom))
        if name == "sqrt":
            return self._root()
        if name == "binom":
            return Node("binom", (self._argument(digits=True), self._argument(digits=True)))
        if name == "begin":
            return self._matrix()
        if name in FUNCTIONS:
            return self._function(name)
        if name in CONSTANTS:
            return Node("sym", name=CONSTANTS[name])
        if name in GREEK:
            return self._symbol(name)
        if name in _MARKS:
            marked = self._argument()
            if marked.op != "sym":
                raise UnreadableError(f"\\{name} of more than a letter")
            return marked._replace(name=f"{name} {marked.name}")
        if name in "RZNQC":
            return Node("sym", name=f"\\{name}")
        raise UnreadableError(f"\\{name}")

    def _root(self) -> Node:
        index = Node("num", value=Fraction(2))
        if self._take("["):
            index = self._sum()
            self._want("]")
        return Node("root", (self._argument(), index))

    def _function(self, name: str) -> Node:
        name = _ALIASES.get(name, name)
        power: Node | None = None
        base: Node | None = None
        for _ in range(2):
            if self._take("^"):
                power = self._argument(signed=True)
            elif self._take("_"):
                base = self._argument(digits=True)
        argument = self._applied_to(name)
        inverse_power = Node("neg", (Node("num", value=Fraction(1)),))
        if power == inverse_power and name in _INVERSES:
            return Node(_INVERSES[name], argument)
        node = _applied(name, argument, base)
        return Node("^", (node, power)) if power is not None else node

    def _applied_to(self, name: str) -> tuple[Node, ...]:
        if self._take("("):
            items, _ = self._items()
            self._want(")")
            if items[0].op == "unit" and items[0].name == "°":
                return (Node("degrees", items[0].args),)
            return tuple(items)
        if self._take("{"):
            return (self._group(),)
        if name == "sqrt" and self._peek().kind != "num":
            raise UnreadableError("sqrt of nothing")
        node = self._signed()
        while self._starts_factor() and not (
            self._peek().text.strip("\\") in FUNCTIONS or self._peek().text == "("
        ):
            node = Node("*", (node, self._power()))
        return (Node("degrees", (node,)),) if self._take("°") else (node,)

    # ---- brackets

    def _bracket(self, opening: str) -> Node:
        outer, self._in_abs = self._in_abs, False
        items, _ = self._items()
        self._in_abs = outer
        closing = self._want(*("[", "]") if opening == "]" else (")", "]", "["))
        if len(items) == 1 and ((opening, closing) == ("(", ")") or items[0].op == "matrix"):
            return items[0]
        rows = [item.args for item in items if item.op == "sequence" and item.name == "[]"]
        if opening == "[" and closing == "]" and len(rows) == len(items):
            return Node("matrix", tuple(Node("row", row) for row in rows))
        return Node("sequence", tuple(items), name=opening + closing)

    def _set(self) -> Node:
        if self._take("⦄"):
            return Node("sequence", (), name="⦃⦄")
        outer, self._in_abs, self._in_set = self._in_abs, True, True
        items, _ = self._items()
        self._in_abs, self._in_set = outer, False
        if self._take("|", ":"):
            conditions, joint = self._items()
            self._want("⦄")
            whole = Node("list", tuple(conditions), name="and" if joint == "," else joint)
            return Node("builder", (items[0], whole if len(conditions) > 1 else conditions[0]))
        self._want("⦄")
        return Node("sequence", tuple(items), name="⦃⦄")

    def _absolute(self) -> Node:
        self._in_abs = True
        node = self._sum()
        self._in_abs = False
        self._want("|")
        return Node("abs", (node,))

    def _rounded(self, opening: str) -> Node:
        node = self._sum()
        self._want(_CLOSING[opening])
        return Node("floor" if opening == "⌊" else "ceil", (node,))

    def _matrix(self) -> Node:
        self._want("{")
        name = self._next().text
        self._want("}")
        if name not in _MATRICES:
            raise UnreadableError(f"the environment {name}")
        if name == "array" and self._take("{"):
            while not self._take("}"):
                if self._next().kind == "end":
                    raise UnreadableError("an array without its end")
        rows = self._rows()
        for sign in ("\\end", "{", name, "}"):
            self._want(sign)
        return Node("matrix", tuple(rows))

    def _rows(self) -> list[Node]:
        """The rows up to the matrix' end; one before it that is empty is none."""
        rows, row = [], [self._sum()]
        while True:
            if self._take("&"):
                row.append(self._sum())
                continue
            rows.append(Node("row", tuple(row)))
            if not self._take(ROW_END) or self._peek().text == "\\end":
                return rows
            row = [self._sum()]


def _applied(name: str, argument: tuple[Node, ...], base: Node | None) -> Node:
    """A function of its argument; a root and a logarithm with what they are to."""
    if base is not None:
        if name != "log10":
            raise UnreadableError(f"{name} with a subscript")
        return Node("log", (*argument, base))
    if name == "sqrt":
        return Node("root", (*argument, Node("num", value=Fraction(2))))
    return Node(name, argument)


def _times(left: Node, right: Node) -> Node:
    """A product; a number before a matrix multiplies each of its items."""
    if right.op != "matrix" or left.op == "matrix":
        return Node("*", (left, right))
    rows = (tuple(_scaled(left, item) for item in row.args) for row in right.args)
    return Node("matrix", tuple(Node("row", row) for row in rows))


def _scaled(scale: Node, item: Node) -> Node:
    if scale.op == "/" and all(arg.op == "num" and arg.value for arg in scale.args):
        scale = Node("num", value=scale.args[0].value / scale.args[1].value)
    if scale.op == item.op == "num":
        return Node("num", value=scale.value * item.value)
    return Node("*", (scale, item))


def _written(node: Node) -> str:
    """An index as text: of `n-1` another one than of `n+1`."""
    if not node.args:
        return node.name or str(node.value)
    return f"({node.op}{node.name} {' '.join(map(_written, node.args))})"


def _number(text: str) -> Node:
    mantissa, _, power = text.lower().partition("e")
    if abs(int(power or 0)) > 5000:
        raise UnreadableError("a number out of all proportion")
    return Node("num", value=Fraction(mantissa) * Fraction(10) ** int(power or 0))


def _plus(whole: Node, top: Node, bottom: Node) -> Node:
    if not bottom.value:
        raise UnreadableError("a fraction of nothing")
    return Node("num", value=whole.value + top.value / bottom.value)
