"""What house style can be checked by reading: sizes, broad catches, unbounded queues, where the
environment is read.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("prorl", "stages", "storage", "trainer")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(p.is_symlink() for p in path.parents if p != ROOT)
)


def functions(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_fits_on_a_few_screens(path: Path) -> None:
    text = path.read_text()
    assert len(text.splitlines()) <= 400, "split the file"
    tree = ast.parse(text)
    assert not text.strip() or ast.get_docstring(tree), "say what the module owns"
    for function in functions(tree):
        code = function.body[1 if ast.get_docstring(function) and len(function.body) > 1 else 0]
        length = (function.end_lineno or 0) - code.lineno + 1
        assert length <= 55, f"{function.name} has {length} lines below its docstring"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_queues_are_bounded(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            bounded_by_bytes = path.name == "queues.py" and path.parent.name == "flight"
            if not bounded_by_bytes and name in (
                "Queue",
                "SimpleQueue",
                "LifoQueue",
                "PriorityQueue",
            ):
                assert node.args or node.keywords, f"line {node.lineno}: an unbounded {name}"


def test_broad_catches_live_in_boundary_only() -> None:
    """Apart: what runs inside a sandbox (no prorl to import there), and a process's main, which
    logs its last words.
    """
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and isinstance(node.type, ast.Name)
        and node.type.id in ("Exception", "BaseException")
        if path.name != "errors.py"
        and path.parent.name != "server"
        and path.name not in ("judge.py", "suspects.py", "__main__.py")
        and not any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
    ]
    assert not found, f"use prorl.errors.boundary: {found}"
