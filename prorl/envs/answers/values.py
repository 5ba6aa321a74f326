r"""Values of an expression: numbers, letters, commands, functions, brackets, matrices."""

from __future__ import annotations

from abc import abstractmethod
from fractions import Fraction

from prorl.envs.answers.notation import (
    FUNCTIONS,
    GREEK,
    ROW_END,
    Token,
    UnreadableError,
)
from prorl.envs.answers.tree import Node, TokenReader

_ALIASES = {"asin": "arcsin", "acos": "arccos", "atan": "arctan", "lg": "log10", "log": "log10"}
_INVERSES = {"sin": "arcsin", "cos": "arccos", "tan": "arctan"}
CONSTANTS = {"pi": "pi", "infty": "inf", "infinity": "inf", "inf": "inf", "oo": "inf"}
_CLOSING = {"⌊": "⌋", "⌈": "⌉"}
_OPENING = frozenset("([]⦃{|∅⌊⌈")
"""Signs that a value may begin with."""
_MATRICES = frozenset(("pmatrix", "bmatrix", "matrix", "Bmatrix", "smallmatrix", "array"))


class Values(TokenReader):
    """Reads one value; what is between values is its subclass' matter (`parse.py`)."""

    @abstractmethod
    def _items(self) -> tuple[list[Node], str]:
        """Statements between commas, and what joins them."""

    @abstractmethod
    def _sum(self) -> Node:
        """Read an expression: terms that are added and subtracted."""

    @abstractmethod
    def _signed(self) -> Node:
        """A factor with its sign."""

    @abstractmethod
    def _power(self) -> Node:
        """Read a factor: a base and its exponent."""

    @abstractmethod
    def _postfix(self) -> Node:
        """A value with what stands behind it."""

    @abstractmethod
    def _starts_factor(self, left: Node) -> bool:
        """Whether what comes next multiplies `left`."""

    def _argument(self, *, signed: bool = False, digits: bool = False) -> Node:
        """What a command takes: a group, a number (one digit of it for `\\frac12`), a sign."""
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
        """What a brace opened; several items are a set."""
        outer, self._in_abs = self._in_abs, False
        items, _ = self._items()
        self._in_abs = outer
        self._want("}")
        return items[0] if len(items) == 1 else Node("sequence", tuple(items), name="⦃⦄")

    def _primary(self) -> Node:
        token = self._next()
        if token.kind == "num":
            return self._mixed(token)
        if token.kind == "name":
            return self._letters(token)
        if token.kind == "command":
            return self._command(token.text[1:])
        if token.kind != "sign" or token.text not in _OPENING:
            raise UnreadableError(f"{token.text!r} where a value belongs")
        self._deeper()
        found = self._opened(token.text)
        self._depth -= 1
        return found

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
        if not token.text.isdigit():
            return whole
        start = self._place
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
            index = self._argument()
            name += "_" + (index.name or str(index.value))
        while self._take("'"):
            name += "'"
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
        minus_one = Node("neg", (Node("num", value=Fraction(1)),))
        if power == minus_one and name in _INVERSES:
            return Node(_INVERSES[name], argument)
        found = _applied(name, argument, base)
        return Node("^", (found, power)) if power is not None else found

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
        found = self._signed()
        while self._starts_factor(found) and not (
            self._peek().text.strip("\\") in FUNCTIONS or self._peek().text == "("
        ):
            found = Node("*", (found, self._power()))
        return (Node("degrees", (found,)),) if self._take("°") else (found,)

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
        found = self._sum()
        self._in_abs = False
        self._want("|")
        return Node("abs", (found,))

    def _rounded(self, opening: str) -> Node:
        found = self._sum()
        self._want(_CLOSING[opening])
        return Node("floor" if opening == "⌊" else "ceil", (found,))

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


def _number(text: str) -> Node:
    mantissa, _, power = text.lower().partition("e")
    if abs(int(power or 0)) > 5000:
        raise UnreadableError("a number out of all proportion")
    return Node("num", value=Fraction(mantissa) * Fraction(10) ** int(power or 0))


def _plus(whole: Node, top: Node, bottom: Node) -> Node:
    if not bottom.value:
        raise UnreadableError("a fraction of nothing")
    return Node("num", value=whole.value + top.value / bottom.value)
