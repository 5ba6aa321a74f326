"""Alters an assertion of a test for the altered twin (`twin.py`, which says the rules).

Each place of a test where something else can be expected is a site with a key. All rewritten files
look alike: a site that is not active keeps its literal, and where a value is altered when the test
runs, the same call stands in every run and the module's numbers say, by key, whether it alters.

Shipped as text into sandboxes beside it: standard library, Python 3.9 or newer.
"""

from __future__ import annotations

import ast
import random
import re
import zlib
from collections.abc import Collection, Mapping
from typing import Any

_ALTER = """
from sys import _getframe as _PRORL_frame
class _PRORL_Other(Exception): pass
class _PRORL_Warned(Warning): pass
def _PRORL_same(value): return value
def _PRORL_is(key):
    ours = _PRORL_frame(2).f_globals is globals()
    return ours and key * _PRORL_M % 2305843009213693951 in _PRORL_D
def _PRORL_alter(value, key, far=False):
    return _PRORL_change(value, far) if _PRORL_is(key) else value
def _PRORL_kind(value, key):
    if not _PRORL_is(key): return value
    warns = isinstance(value, type) and issubclass(value, Warning)
    return _PRORL_Warned if warns else _PRORL_Other
def _PRORL_change(value, far=False):
    kind = type(value)
    other = object()
    if kind is bool: other = not value
    elif kind in (int, float, complex):
        other = value + _PRORL_K * (10 ** 6 * (1 + abs(value)) if far else 1)
    elif kind is str: other = value + _PRORL_T
    elif kind is bytes: other = value + _PRORL_T.encode()
    elif value is None: other = _PRORL_T
    elif kind in (list, tuple) and value:
        place = _PRORL_K % len(value)
        changed = _PRORL_change(value[place], far)
        other = value[:place] + kind([changed]) + value[place + 1:]
    elif kind is dict and value:
        key = list(value)[_PRORL_K % len(value)]
        other = {**value, key: _PRORL_change(value[key], far)}
    elif kind in (list, tuple): other = kind([_PRORL_T])
    elif kind in (set, frozenset): other = value | {_PRORL_T}
    elif kind is dict: other = {_PRORL_T: _PRORL_T}
    return object() if other == value else other
"""
"""Only code of the tests' module meets altered values: whoever else asks, to tell a twin from the run
that counts, gets the value back.
"""
_WATCH = """
import atexit as _PRORL_atexit, json as _PRORL_json
_PRORL_met = {}
def _PRORL_begin(*keys):
    for key in keys: _PRORL_met.setdefault(str(key), [0, 0])[0] += 1
def _PRORL_held(*keys):
    for key in keys: _PRORL_met[str(key)][1] += 1
def _PRORL_tell():
    with open(_PRORL_F, "a") as file: file.write(_PRORL_json.dumps(_PRORL_met) + chr(10))
_PRORL_atexit.register(_PRORL_tell)
"""
"""For honest code alone: how often each site was reached, and held."""
_PRIME, _NUM_MARKS = 2305843009213693951, 64
_OPPOSITE = {
    "assertFalse": "assertTrue",
    "assertIsNone": "assertIsNotNone",
    "assertIs": "assertIsNot",
    "assertIn": "assertNotIn",
    "assertIsInstance": "assertNotIsInstance",
    "assertRegex": "assertNotRegex",
    "assertLess": "assertGreaterEqual",
    "assertGreater": "assertLessEqual",
    "assert_called": "assert_not_called",
}
OPPOSITE = {**_OPPOSITE, **{there: here for here, there in _OPPOSITE.items()}}
OPPOSITE.update(
    assertNotEqual="assertEqual",
    assertNotAlmostEqual="assertAlmostEqual",
    assertNotEquals="assertEqual",
    assert_called_once="assert_not_called",
)
TRUE = ("assertTrue", "assert_", "failUnless", "assert_true", "ok_")
RAISES = re.compile(r"^_*assert_?raises|^raises", re.IGNORECASE)
WARNS = re.compile(r"^assert_?warns|^warns$|^deprecated_call$", re.IGNORECASE)
CALLED_WITH = ("assert_called_with", "assert_called_once_with", "assert_any_call")
TOLERANT = re.compile(r"almost|close|approx|within", re.IGNORECASE)
CLOSE = ("allclose", "isclose", "array_equal")
LISTED = ("fnmatch_lines", "re_match_lines", "assert_has_calls")
FAILS = ("fail", "AssertionError")


class Values:
    """One attempt's altered values, and the text that makes them inside of a test module.

    `active`: keys of the sites that are altered; `watch`: a file that is told which ones held.
    """

    def __init__(self, seed: str, active: Collection[int], watch: str = "") -> None:
        chance = random.Random(seed)
        self.active, self.is_watched = active, bool(watch)
        self.prefix = "_" + "".join(chance.choices("abcdefgh", k=8))
        number, letters = chance.randint(1, 9), "".join(chance.choices("jkqvwxz", k=8))
        self.letters = letters
        factor = chance.randrange(1 << 40, _PRIME)
        marks = [key * factor % _PRIME for key in active]
        while len(marks) % _NUM_MARKS or not marks:
            marks.append(chance.randrange(_PRIME))
        chance.shuffle(marks)
        head = f"_PRORL_K = {number}\n_PRORL_T = {letters!r}\n"
        head += f"_PRORL_M = {factor}\n_PRORL_D = {marks}\n"
        head += f"_PRORL_F = {watch!r}{_WATCH}" if watch else ""
        self.text = (head + _ALTER).replace("_PRORL", self.prefix)
        scope: dict[str, Any] = {}
        exec((head.partition("_PRORL_F")[0] + _ALTER).replace("_PRORL", self.prefix), scope)
        self._change = scope[f"{self.prefix}_change"]

    def literal(self, node: ast.AST, far: bool = False) -> ast.expr | None:
        """A literal's altered one; None where it is no literal, or none that can be written."""
        try:
            value = ast.literal_eval(node)
            other = self._change(value, far)
            if ast.literal_eval(repr(other)) != other:
                return None
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError, OverflowError):
            return None
        return ast.parse(repr(other), mode="eval").body

    def at_run_time(self, node: ast.expr, key: int, far: bool = False) -> ast.Call:
        """The value, altered when it is met if its site is active."""
        more = [ast.Constant(True)] if far else []
        return ast.Call(self.name("alter"), [node, ast.Constant(key), *more], [])

    def name(self, suffix: str) -> ast.Name:
        """One of the functions and classes in `text`."""
        return ast.Name(f"{self.prefix}_{suffix}", ast.Load())


class Twin(ast.NodeTransformer):
    """Rewrites one module: the active sites are altered, all others say what they said."""

    def __init__(
        self,
        values: Values,
        path: str,
        helpers: set[str],
        targets: set[str],
        moved: Mapping[str, list[tuple[str, int]]],
        beside: bool = True,
    ) -> None:
        self._values, self._path = values, path
        self._helpers, self._targets, self._moved = helpers, targets, moved
        self._beside = beside
        self._names: list[tuple[str, ast.Call]] = []
        self._is_helper = False
        self._unit, self._count = "", 0
        self.sites: dict[str, list[int]] = {}
        """Keys by the outermost function that they are in."""
        self.watched: list[int] = []
        self.movable: list[tuple[str, tuple[str, int]]] = []
        """Helpers with an argument that is compared and used for nothing else."""

    def _site(self) -> tuple[int, bool]:
        """The key of a further site, and whether it is active; the same ones in every rewriting."""
        self._count += 1
        key = zlib.crc32(f"{self._path}:{self._count}".encode())
        self.sites.setdefault(self._unit, []).append(key)
        return key, key in self._values.active

    def _is_active(self) -> bool:
        return self._site()[1]

    def _seen(self, node: ast.stmt, before: int) -> ast.stmt | list[ast.stmt]:
        """Returns a statement between the calls that count how often its sites are reached and hold."""
        keys = self.sites.get(self._unit, [])[before:]
        self.watched += keys
        if not keys or not self._values.is_watched:
            return node
        counted: list[ast.expr] = [ast.Constant(key) for key in keys]
        begin, end = (
            ast.Expr(ast.Call(self._values.name(name), counted, [])) for name in ("begin", "held")
        )
        return [begin, node, end]

    def _num_sites(self) -> int:
        return len(self.sites.get(self._unit, []))

    def visit_FunctionDef(
        self, node: ast.FunctionDef | ast.AsyncFunctionDef
    ) -> ast.FunctionDef | ast.AsyncFunctionDef:
        if self._targets and node.name.startswith("test") and node.name not in self._targets:
            node.body = node.body if self._beside else [ast.Pass()]
            return node
        outer, self._names = self._names, []
        outside, self._is_helper = self._is_helper, node.name in self._helpers
        unit, self._unit = self._unit, self._unit or node.name
        self.generic_visit(node)
        for name in sorted({name for name, _ in self._names}):
            self._alter_where_bound(node, name)
        self._names, self._is_helper, self._unit = outer, outside, unit
        return node

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Assert(self, node: ast.Assert) -> Any:
        before = self._num_sites()
        node.test = self._assertion(node.test)
        return self._seen(node, before)

    def visit_Return(self, node: ast.Return) -> ast.Return:
        self.generic_visit(node)
        if self._is_helper and node.value is not None and is_equality(node.value):
            node.value = self._assertion(node.value)
        return node

    def visit_If(self, node: ast.If) -> Any:
        self.generic_visit(node)
        before = self._num_sites()
        if fails(node.body[0]) and not node.orelse:
            if is_equality(node.test, ast.NotEq):
                self._alter_equality(node.test)
            elif self._is_active():
                node.test = _negated(node.test)
        return self._seen(node, before)

    def visit_With(self, node: ast.With | ast.AsyncWith) -> Any:
        before = self._num_sites()
        node.items = [self.visit(item) for item in node.items]
        changed = self._seen(node, before)
        node.body = [
            new
            for statement in node.body
            for new in _listed(self.visit(statement))
            if new is not None
        ]
        return changed

    visit_AsyncWith = visit_With

    def visit_Expr(self, node: ast.Expr) -> Any:
        before = self._num_sites()
        self.generic_visit(node)
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call):
            self._statement(call)
        return self._seen(node, before)

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        name = last(node.func)
        is_other = RAISES.match(name) or WARNS.match(name)
        if is_other and node.args and name not in self._helpers:
            key = ast.Constant(self._site()[0])
            node.args[0] = ast.Call(self._values.name("kind"), [node.args[0], key], [])
        elif name in self._moved:
            for argument, index in self._moved[name]:
                if len(node.args) > index:
                    node.args[index] = self._other(node.args[index])
                for keyword in node.keywords:
                    keyword.value = (
                        self._other(keyword.value) if keyword.arg == argument else keyword.value
                    )
        return node

    def _statement(self, call: ast.Call) -> None:
        name = last(call.func)
        if name in self._helpers or RAISES.match(name) or WARNS.match(name):
            return
        if name in TRUE and call.args:
            call.args[0] = self._assertion(call.args[0])
            return
        if name == "assertIn" and len(call.args) > 1:
            member = ast.Compare(call.args[0], [ast.In()], [call.args[1]])
            if self._member(member):
                call.args[:2] = [member.left, member.comparators[0]]
                return
        if name in OPPOSITE and isinstance(call.func, ast.Attribute):
            call.func.attr = OPPOSITE[name] if self._is_active() else name
        elif name in CALLED_WITH:
            call.args += [ast.Constant(self._values.letters)] if self._is_active() else []
        elif name in LISTED and call.args:
            call.args[0] = self._other(call.args[0])
        elif name.startswith("assert") and len(call.args) > 1:
            far = bool(TOLERANT.search(name))
            call.args[0], call.args[1] = self._sides(call.args[0], call.args[1], far)
        elif name.startswith("assert") and not call.args and call.keywords and self._is_active():
            for keyword in call.keywords:
                keyword.value = self._values.literal(keyword.value) or keyword.value

    def _assertion(self, test: ast.expr) -> ast.expr:
        """Returns what is false for every honest solution where a site of it is active."""
        if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
            test.values = [self._assertion(operand) for operand in test.values]
            return test
        self.visit(test)
        if is_equality(test):
            self._alter_equality(test)
            return test
        if isinstance(test, ast.Call) and last(test.func) in self._helpers:
            return test
        if isinstance(test, ast.Call) and last(test.func) in CLOSE and len(test.args) > 1:
            test.args[:2] = self._sides(test.args[0], test.args[1], far=True)
            return test
        if isinstance(test, ast.Compare) and len(test.ops) == 1 and self._member(test):
            return test
        return _negated(test) if self._is_active() else test

    def _alter_equality(self, test: Any) -> None:
        test.left, test.comparators[0] = self._sides(test.left, test.comparators[0])

    def _member(self, test: ast.Compare) -> bool:
        """Alters `x in (1, 2)` and `"text" in x`; False where neither can be."""
        if not isinstance(test.ops[0], ast.In):
            return False
        right = test.comparators[0]
        if isinstance(right, (ast.List, ast.Tuple, ast.Set)):
            others = [self._values.literal(element, far=True) for element in right.elts]
            had = [ast.dump(element) for element in right.elts]
            if others and all(
                element is not None and ast.dump(element) not in had for element in others
            ):
                if self._is_active():
                    right.elts = [element for element in others if element is not None]
                return True
        is_text = isinstance(test.left, ast.Constant) and isinstance(test.left.value, (str, bytes))
        other = self._values.literal(test.left) if is_text else None
        if other is not None and self._is_active():
            test.left = other
        return other is not None

    def _sides(
        self, left: ast.expr, right: ast.expr, far: bool = False
    ) -> tuple[ast.expr, ast.expr]:
        """Returns both sides, altered where a site is: the one that is expected, or else each."""
        expected = [self._is_expected(side) for side in (left, right)]
        if not expected[1] or expected[0]:
            left = self._other(left, far)
        if not expected[0] or expected[1]:
            right = self._other(right, far)
        return left, right

    def _is_expected(self, node: ast.expr) -> bool:
        is_approx = isinstance(node, ast.Call) and bool(TOLERANT.match(last(node.func)))
        return is_approx or self._values.literal(node) is not None

    def _other(self, node: ast.expr, far: bool = False) -> ast.expr:
        if isinstance(node, ast.Call) and node.args and TOLERANT.match(last(node.func)):
            node.args[0] = self._other(node.args[0], far=True)
            return node
        key, is_active = self._site()
        literal = self._values.literal(node, far)
        if literal is not None:
            return literal if is_active else node
        call = self._values.at_run_time(node, key, far)
        if isinstance(node, ast.Name):
            self._names.append((node.id, call))
        return call

    def _alter_where_bound(
        self, function: ast.FunctionDef | ast.AsyncFunctionDef, name: str
    ) -> None:
        """A name that is compared and used for nothing else is altered where it gets its value, an
        argument of a helper where that is called: for code that reads its callers.
        """
        calls = [call for other, call in self._names if other == name]
        inner = list(ast.walk(function))
        message_ids = {
            id(part) for node in inner for place in _messages(node) for part in ast.walk(place)
        }
        uses = [node for node in inner if _id(node) == name and id(node) not in message_ids]
        bound = [
            node
            for node in inner
            if isinstance(node, ast.Assign) and [_id(target) for target in node.targets] == [name]
        ]
        loops = [
            node
            for node in inner
            if isinstance(node, (ast.For, ast.AsyncFor))
            and name in [_id(target) for target in ast.walk(node.target)]
        ]
        arguments = [argument.arg for argument in function.args.args]
        num_bound = len(bound) + len(loops) + (name in arguments)
        if num_bound != 1 or len(uses) != len(calls) + len(bound) + len(loops):
            return
        alter, (key, *far) = calls[0].func, calls[0].args[1:]
        number: Any = ast.literal_eval(key)
        if bound:
            literal = self._values.literal(bound[0].value)
            if literal is None:
                bound[0].value = ast.Call(alter, [bound[0].value, key, *far], [])
            elif number in self._values.active:
                bound[0].value = literal
        elif name not in dict(self._moved.get(function.name, [])):
            change = ast.Call(alter, [ast.Name(name, ast.Load()), key, *far], [])
            place = loops[0] if loops else function
            place.body.insert(0, ast.Assign([ast.Name(name, ast.Store())], change))
            if self._is_helper and name in arguments and not function.decorator_list and not far:
                is_method = arguments[0] in ("self", "cls")
                self.movable.append((function.name, (name, arguments.index(name) - is_method)))
        else:  # altered where the helper is called
            number = None
        for call in calls:
            other: Any = ast.literal_eval(call.args[1])
            if other != number:
                self.sites[self._unit].remove(other)
            call.func, call.args = self._values.name("same"), call.args[:1]


def _listed(node: Any) -> list[Any]:
    return node if isinstance(node, list) else [node]


def _messages(node: ast.AST) -> list[ast.AST]:
    """Returns the nodes that are only reached, or only printed, when a test has failed."""
    if isinstance(node, ast.If) and fails(node.body[0]):
        return [*node.body]
    return [node.msg] if isinstance(node, ast.Assert) and node.msg else []


def _id(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else ""


def last(node: ast.expr) -> str:
    """`assertEqual` of `self.assertEqual`."""
    return node.attr if isinstance(node, ast.Attribute) else _id(node)


def is_equality(node: ast.expr | None, kind: type = ast.Eq) -> bool:
    is_single = isinstance(node, ast.Compare) and len(node.ops) == 1
    return is_single and isinstance(node.ops[0], kind)  # type: ignore[union-attr]


def _negated(test: ast.expr) -> ast.expr:
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return test.operand
    return ast.UnaryOp(ast.Not(), test)


def fails(node: ast.stmt) -> bool:
    """Returns whether a statement says that a test has failed."""
    value = node.exc if isinstance(node, ast.Raise) else getattr(node, "value", None)
    return last(value.func if isinstance(value, ast.Call) else value) in FAILS  # type: ignore[arg-type]
