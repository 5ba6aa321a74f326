"""The tests as they were collected: whether what runs later is still what the tests' files say.

Shipped as text into sandboxes beside `suspects.py`: standard library, Python 3.7 or newer. Code
under test shares the tests' modules, their helpers' and pytest's objects: it may put a function of
its own in the place of a helper, or of a test. What differs from the files, or changes after it was
collected, is told as a suspicion; a repository whose tests do so themselves is not blamed, since
they do it without the change, too.

Not promised: data of the tests that is changed in place, and a helper that is another one only
while no test reports.
"""

from __future__ import annotations

import ast
import builtins
import os
import sys
from collections import Counter
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from prorl.envs.swe.suspects import Mark, code_of, marks_of

TEST_FOLDERS = frozenset({"tests", "test", "__tests__", "spec", "specs", "unit_tests"})
MAX_LOOKED = 3000
"""Functions of helpers that are looked at after each test."""
MAX_READ, MAX_READ_BYTES = 300, 1 << 20
"""Files whose text is compared with their module."""
HOOKS = ("pytest_runtest", "pytest_pyfunc", "pytest_report", "pytest_assert")


class Kept:
    """Modules, tests and hooks of one process."""

    def __init__(self) -> None:
        self._root = os.path.join(os.getcwd(), "")
        self._marks: dict[str, list[Mark]] = {}
        self.paths: set[str] = set()
        """Files of tests."""
        self._helpers: list[Mark] = []
        self._items: dict[str, tuple[Any, list[Any]]] = {}
        self._ran: dict[str, Any] = {}

    def tests(self, paths: Iterable[str]) -> list[str]:
        """Files of tests, given before they run; what of them is not as it is written."""
        fresh = {path for path in map(real_path, paths) if path not in self.paths}
        if not fresh:
            return []
        self.paths |= fresh
        return [said for path, module in self._modules() for said in self._keep(path, module)]

    def item(self, item: Any) -> None:
        """A test of pytest."""
        self._items[item.nodeid] = item, shape_of(item)

    def runs(self, item: Any) -> None:
        """A test of pytest is run now."""
        self._ran[item.nodeid] = item

    def look(self, path: str, nodeid: str) -> list[str]:
        """What is no longer as it was, of a file's tests, of helpers, of one test of pytest."""
        said = []
        for mark in (*self._marks.get(real_path(path), ()), *self._helpers[:MAX_LOOKED]):
            if not mark.is_kept():
                said.append(f"changed {mark.name}")
        if nodeid and self._items:
            item, shape = self._items.get(nodeid, (None, []))
            if item is None:
                said.append("tells of tests that were not collected")
            elif item is not self._ran.get(nodeid) or not is_same(shape, shape_of(item)):
                said.append(f"changed {nodeid}")
        return said

    def found(self) -> list[str]:
        """What is no longer as it was, of everything."""
        every = [mark for marks in self._marks.values() for mark in marks]
        return [f"changed {mark.name}" for mark in every if not mark.is_kept()]

    def hooks(self, relay: Any) -> list[str]:
        """Functions of the repository, or of no code, among pytest's hooks around a test."""
        said = []
        for name, caller in list(vars(relay).items()):
            if not name.startswith(HOOKS):
                continue
            for one in getattr(caller, "get_hookimpls", list)():
                code = code_of(one.function)
                if code is None or self._is_own(code.co_filename):
                    where = code.co_filename if code else type(one.function).__name__
                    said.append(f"hook {name} of {where.replace(self._root, '')}")
            if not hasattr(caller, "get_hookimpls") and not hasattr(caller, "call_historic"):
                said.append(f"replaced hook {name}")
        return said

    def _modules(self) -> Iterable[tuple[str, ModuleType]]:
        """Modules of the tests that are not kept yet."""
        for module in list(sys.modules.values()):
            path = getattr(module, "__file__", None)
            if not isinstance(module, ModuleType) or not isinstance(path, str):
                continue
            path = real_path(path)
            if path not in self._marks and (path in self.paths or self._is_helper(path)):
                yield path, module

    def _is_helper(self, path: str) -> bool:
        if not self._is_own(path) or not path.endswith(".py"):
            return False
        return bool(test_folder(path[len(self._root) :])) or path.endswith("/conftest.py")

    def _is_own(self, path: str) -> bool:
        return path.startswith(self._root) and "-packages/" not in path

    def _keep(self, path: str, module: ModuleType) -> list[str]:
        short = path[len(self._root) :]
        scope = vars(module)
        keys = [key for key, thing in scope.items() if callable(thing)]
        inner = [key for key, thing in scope.items() if isinstance(thing, ModuleType)]
        self._marks[path] = [
            *marks_of(module.__name__, scope, keys),
            *(Mark(f"{module.__name__}.{key}", scope, key, scope[key], None) for key in inner),
        ]
        if path not in self.paths:
            self._helpers += self._marks[path]
        if len(self._marks) > MAX_READ or not path.endswith(".py"):
            return []
        return [f"another {name} in {short}" for name in strangers(path, scope)]


def real_path(path: str) -> str:
    """A path without links; what is no path, as a module may say that it has, stays."""
    try:
        return os.path.realpath(path)
    except ValueError:
        return path


def test_folder(path: str) -> str:
    """The outermost folder of tests that a file lies in; empty: none.

    >>> test_folder("pkg/tests/unit/test_a.py"), test_folder("pkg/test_a.py")
    ('pkg/tests', '')
    """
    parts = path.split("/")[:-1]
    for index, part in enumerate(parts):
        if part in TEST_FOLDERS or part.endswith(("_tests", "-tests")):
            return "/".join(parts[: index + 1]) if path[0] != "/" else ""
    return ""


def strangers(path: str, scope: Any) -> list[str]:
    """Names of a module that are bound to something else than its text says.

    As far as that can be told: plain functions, imports, and built-in names that it does not bind.
    """
    tree = parsed(path)
    if tree is None:
        return []
    bound, said = bindings(tree), []
    if "*" in bound:
        return []
    for name in list(scope):
        if bound[name] == 0 and name in vars(builtins) and not name.startswith("__"):
            said.append(name)
    own = scope.get("__builtins__")
    if own is not vars(builtins) and own is not builtins:
        said.append("__builtins__")
    for node in tree.body:
        for name, is_right in wanted(node, path, scope):
            if bound[name] == 1 and name in scope and not is_right:
                said.append(name)
    return said


def parsed(path: str) -> ast.Module | None:
    """What a module's file says; None where it is too large or no Python."""
    try:
        if os.path.getsize(path) > MAX_READ_BYTES:
            return None
        with open(path, "rb") as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def wanted(node: ast.stmt, path: str, scope: Any) -> Iterable[tuple[str, bool]]:
    """Names that a statement binds, and whether they are what it says."""
    if isinstance(node, ast.FunctionDef) and not node.decorator_list:
        code = code_of(scope.get(node.name))
        is_ours = code is not None and real_path(code.co_filename) == path
        yield node.name, is_ours and code is not None and code.co_firstlineno == node.lineno
    elif isinstance(node, ast.ImportFrom) and not node.level and node.module in sys.modules:
        source = vars(sys.modules[node.module])
        for alias in node.names:
            name = alias.asname or alias.name
            if callable(source.get(alias.name)):
                yield name, scope.get(name) is source[alias.name]
    elif isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.partition(".")[0]
            if whole in sys.modules:
                name = alias.asname or whole
                yield name, scope.get(name) is sys.modules[whole]


def bindings(tree: ast.Module) -> Counter[str]:
    """How often a module's text binds each of its names; `*` where it takes all of another's."""
    found: Counter[str] = Counter()
    left: list[ast.AST] = list(tree.body)
    while left:
        node = left.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found[node.name] += 1
            inner = [one for one in ast.walk(node) if isinstance(one, ast.Global)]
            found.update(name for one in inner for name in one.names)
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            found.update(one.asname or one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            found[node.id] += 1
        elif isinstance(node, ast.ExceptHandler) and node.name:
            found[node.name] += 1
        left.extend(ast.iter_child_nodes(node))
    return found


def shape_of(item: Any) -> list[Any]:
    """What a test of pytest is run by.

    Its class, its function, its fixtures' functions, its parameters, and methods of its own.
    """
    inner = vars(item)
    definitions = getattr(getattr(item, "_fixtureinfo", None), "name2fixturedefs", None) or {}
    fixtures = [
        code_of(getattr(one, "func", None))
        for name in sorted(definitions)
        for one in definitions[name]
    ]
    parameters = getattr(inner.get("callspec"), "params", None) or {}
    given = [parameters[name] for name in sorted(parameters)]
    own = sorted(name for name, value in inner.items() if code_of(value) and name != "_obj")
    return [type(item), code_of(inner.get("_obj")), *fixtures, *given, *own]


def is_same(one: list[Any], other: list[Any]) -> bool:
    """Whether two shapes are of the same objects; names are compared as texts."""
    return len(one) == len(other) and all(
        a is other[index] or (type(a) is str is type(other[index]) and a == other[index])
        for index, a in enumerate(one)
    )
