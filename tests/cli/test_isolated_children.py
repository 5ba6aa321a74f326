"""Every child of ours ignores the working folder's files: `queue.py` there is a user's own."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("prorl", "stages", "storage", "trainer")
USERS = ("prorl/bench/", "prorl/guests/")
"""Benchmarks start programs of a checkout, guests those of other people's interpreters."""


def test_every_module_that_we_start_is_started_isolated() -> None:
    """`-m MODULE` puts the working folder first on the path unless `-P` stands before it."""
    unsafe = []
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*.py")):
            name = str(path.relative_to(ROOT))
            if name.startswith(USERS) or path.is_relative_to(ROOT / "prorl" / room):
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.List | ast.Tuple | ast.Call):
                    parts = node.args if isinstance(node, ast.Call) else node.elts
                    words = [ast.unparse(part) for part in parts]
                    first = "".join(words[:3])
                    if words[:1] == ["sys.executable"] and "-m" in first and "-P" not in first:
                        unsafe.append(f"{name}:{node.lineno}")
    assert unsafe == []
