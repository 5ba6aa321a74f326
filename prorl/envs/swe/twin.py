"""Rewrites the tests' side of a repository so that honest work fails: the altered twin.

A program for `python3 -I -c`, shipped as text with `altered.py`: standard library, Python 3.9 or
newer (before, it rewrites nothing).

    stdin: one JSON object {"seed", "draw", "turn", "closed", "watch", "names", "beside", "graded",
    "folders", "side", "without"}
    stdout: `{"altered": N, "tests": [NAME] or null, "draws": N, "watched": [KEY]}`; the files in the
    current folder are changed

In each test one site is altered, drawn by `draw`: the n-th `turn` takes the n-th of an order that
nobody knows, of those that are not `closed`. Turns alternate between what tests say themselves and
what helpers of theirs say: `tests` are the altered ones, null for helpers. Turn -1 alters none: the
run that counts is rewritten so, and looks as a twin does.

What a test expects gets another value: a literal in the file itself, all else when it is met
(`altered.py`); docs/software-engineering.md says how each assertion is altered. What cannot be
altered so that *every* honest solution fails is negated, or left as it is. Tests that are not named
stay as they are, or lose their bodies where `beside` is false. `assert same(a, b)` with a helper of
the tests' side is altered inside of it.
"""

from __future__ import annotations

import ast
import copy
import fnmatch
import json
import os
import random
import re
import sys
import tokenize
from typing import Any

from prorl.envs.swe.altered import TRUE, Twin, Values, fails, is_equality, last

MAX_FILES = 400


def side_files(job: dict[str, Any]) -> list[str]:
    """Returns Python files of the tests' side, none of which a change can write."""
    files = []
    for place, folders, names in os.walk("."):
        folders[:] = [folder for folder in folders if folder[0] != "." and folder != "__pycache__"]
        paths = [os.path.join(place, name)[2:] for name in names if name.endswith(".py")]
        files += [path for path in paths if is_side(path, job)]
    return sorted(files)


def is_side(path: str, job: dict[str, Any]) -> bool:
    """Returns whether a path is graded, in a folder of graded files, or named as tests' files are."""
    if path in job["without"] or path.endswith("conftest.py") or os.path.islink(path):
        return False
    if is_graded(path, job) or any(path.startswith(f"{folder}/") for folder in job["folders"]):
        return True
    names = path[:-3].split("/")
    return any(fnmatch.fnmatchcase(part, like) for part in names for like in job["side"])


def is_graded(path: str, job: dict[str, Any]) -> bool:
    return any(
        f"/{path}".endswith(ending if ending[0] == "/" else f"/{ending}")
        for ending in job["graded"]
    )


def read(path: str) -> ast.Module | None:
    """A file's program; None where this Python cannot read it."""
    try:
        with tokenize.open(path) as file:
            return ast.parse(file.read())
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def spoken_of(tree: ast.Module) -> set[str]:
    words: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names]
            words.update(".".join([getattr(node, "module", None) or "", *names]).split("."))
        elif isinstance(node, ast.Attribute):
            words.add(node.attr)
    return words


def reachable(job: dict[str, Any]) -> dict[str, ast.Module]:
    """Returns the graded files and what of the tests' side they import, one through another."""
    files = side_files(job)
    trees: dict[str, ast.Module] = {}
    pending = [path for path in files if is_graded(path, job)]
    while pending and len(trees) < MAX_FILES:
        path = pending.pop()
        tree = None if path in trees else read(path)
        if tree is None:
            continue
        trees[path] = tree
        words = spoken_of(tree)
        for other in files:
            name = other[:-3].split("/")
            if other not in trees and (name[-2] if name[-1] == "__init__" else name[-1]) in words:
                pending.append(other)
    return trees


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return [node for node in ast.walk(tree) if isinstance(node, kinds)]


def helpers_of(trees: list[ast.Module]) -> set[str]:
    """Returns functions of the tests' side that assert, or compare for an `assert`."""
    asserted = {
        last(test.func)
        for tree in trees
        for node in ast.walk(tree)
        for test in _asserted_calls(node)
    }
    helpers = set()
    for node in (node for tree in trees for node in functions(tree)):
        inner = list(ast.walk(node))
        compares = any(
            isinstance(child, ast.Return) and is_equality(child.value) for child in inner
        )
        asserts = any(isinstance(child, ast.Assert) or _asserts(child) for child in inner)
        if compares if node.name in asserted else asserts:
            helpers.add(node.name)
    return helpers


def _asserted_calls(node: ast.AST) -> list[ast.Call]:
    """Returns the calls that `assert a() and b()` or `assertTrue(a())` expects to be true."""
    tests = [node.test] if isinstance(node, ast.Assert) else []
    if isinstance(node, ast.Call) and last(node.func) in TRUE:
        tests = node.args[:1]
    parts = [getattr(test, "values", [test]) for test in tests]
    return [operand for values in parts for operand in values if isinstance(operand, ast.Call)]


def _asserts(node: ast.AST) -> bool:
    if isinstance(node, ast.If):
        return fails(node.body[0])
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and (last(node.value.func).lower().startswith("assert"))
    )


def target_tests(names: list[str], trees: list[ast.Module]) -> set[str]:
    """Returns test functions that the names speak of; empty if one of the names has none."""
    defined = [node.name for tree in trees for node in functions(tree)]
    tests = {name for name in defined if name.startswith("test")}
    spoken = [tests & set(re.findall(r"\w+", name)) for name in names]
    return set().union(*spoken) if all(spoken) else set()


def drawn(
    sites: dict[str, list[int]], tests: set[str], job: dict[str, Any]
) -> tuple[set[int], list[str] | None, int]:
    """Returns (keys of the active sites, tests that they are in, number of different draws)."""
    closed = set(job["closed"])
    undecided = {unit: [key for key in keys if key not in closed] for unit, keys in sites.items()}
    units = {unit: keys for unit, keys in undecided.items() if keys} or sites
    own = {unit: keys for unit, keys in units.items() if unit in tests}
    rest = {unit: keys for unit, keys in units.items() if unit not in tests}
    layers = [layer for layer in (own, rest) if layer]
    if not layers:
        return set(), [], 0
    num_draws = len(layers) * max(len(keys) for layer in layers for keys in layer.values())
    if job["turn"] < 0:
        return set(), [], num_draws
    layer, active = layers[job["turn"] % len(layers)], set()
    for unit, keys in layer.items():
        order = sorted(keys)
        random.Random(job["draw"] + unit).shuffle(order)
        active.add(order[job["turn"] // len(layers) % len(order)])
    return active, sorted(own) if layer is own else None, num_draws


def rewrite(job: dict[str, Any]) -> dict[str, Any]:
    if not hasattr(ast, "unparse"):
        return {"altered": 0, "tests": [], "draws": 0, "watched": []}
    watch = job["watch"] and os.path.abspath(job["watch"])
    trees = reachable(job)
    helpers = helpers_of(list(trees.values()))
    graded = [tree for path, tree in trees.items() if is_graded(path, job)]
    targets = target_tests(job["names"], graded)
    tests = targets or {
        node.name for tree in graded for node in functions(tree) if node.name.startswith("test")
    }

    def visited(values: Values, moved: dict[str, list[tuple[str, int]]]) -> dict[str, Twin]:
        """Returns the trees, rewritten."""
        twins = {}
        for path in trees:
            named = targets if is_graded(path, job) else set()
            twins[path] = Twin(values, path, helpers, named, moved, job["beside"])
            copies[path] = twins[path].visit(copy.deepcopy(trees[path]))
        return twins

    copies: dict[str, ast.Module] = {}
    scouts = visited(Values(job["seed"], ()), {}).values()
    movable = [helper for scout in scouts for helper in scout.movable]
    defined = [node.name for tree in trees.values() for node in functions(tree)]
    moved: dict[str, list[tuple[str, int]]] = {}
    for name, argument in movable:
        if defined.count(name) == 1:
            moved.setdefault(name, []).append(argument)
    sites: dict[str, list[int]] = {}
    for scout in visited(Values(job["seed"], ()), moved).values():
        for unit, keys in scout.sites.items():
            sites.setdefault(unit, []).extend(keys)
    active, drawn_tests, num_draws = drawn(sites, tests, job)
    values = Values(job["seed"], active, watch)
    twins = visited(values, moved)
    watched: list[int] = []
    for path, tree in copies.items():
        try:
            text = ast.unparse(ast.fix_missing_locations(_with(tree, values.text)))
            compile(text, path, "exec")
        except (ValueError, SyntaxError, RecursionError):
            continue
        watched += twins[path].watched
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    return {"altered": len(active), "tests": drawn_tests, "draws": num_draws, "watched": watched}


def _with(tree: ast.Module, text: str) -> ast.Module:
    """A module with this program in front, behind its docstring and `from __future__`."""
    place = 0
    for node in tree.body:
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if not is_text and getattr(node, "module", "") != "__future__":
            break
        place += 1
    tree.body[place:place] = ast.parse(text).body
    return tree


if __name__ == "__main__":
    print(json.dumps(rewrite(json.loads(sys.stdin.read()))))
