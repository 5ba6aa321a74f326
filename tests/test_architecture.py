"""What house style can be checked by reading: broad catches, unbounded queues, where the
environment is read.
"""

from __future__ import annotations

import ast
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


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_what_it_owns(path: Path) -> None:
    text = path.read_text()
    assert not text.strip() or ast.get_docstring(ast.parse(text))


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
        and path.name not in ("judge.py", "child.py", "__main__.py")
        and not any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
    ]
    assert not found, f"use prorl.errors.boundary: {found}"
