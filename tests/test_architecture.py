"""What house style can be checked by reading: broad catches, unbounded queues, where the
environment is read.
"""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("prorl", "stages", "storage", "trainer")
FILES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if not any(p.is_symlink() for p in path.parents if p != ROOT)
)


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


BY_BYTES = Path("prorl/flight/queues.py")
"""Its queues are bounded by bytes."""

QUEUES = ("Queue", "SimpleQueue", "LifoQueue", "PriorityQueue")


def test_a_module_says_what_it_owns() -> None:
    assert not [
        str(path) for path, tree in trees().items() if tree.body and not ast.get_docstring(tree)
    ]


def test_queues_are_bounded() -> None:
    found = [
        f"{path}:{node.lineno}"
        for path, tree in trees().items()
        if path != ROOT / BY_BYTES
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "id", getattr(node.func, "attr", "")) in QUEUES
        and not (node.args or node.keywords)
    ]
    assert not found, f"unbounded: {found}"


def test_broad_catches_live_in_boundary_only() -> None:
    """Apart: what runs inside a sandbox (no prorl to import there), and a process's main, which
    logs its last words.
    """
    found = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path, tree in trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ExceptHandler)
        and isinstance(node.type, ast.Name)
        and node.type.id in ("Exception", "BaseException")
        if path.name != "errors.py"
        and path.parent.name != "server"
        and path.name not in ("judge.py", "child.py", "__main__.py")
        and not any(isinstance(inner, ast.Raise) and inner.exc is None for inner in ast.walk(node))
    ]
    assert not found, f"use prorl.errors.boundary: {found}"
