"""The examples in docstrings, module by module; modules without any are not imported."""

from __future__ import annotations

import doctest
from importlib import import_module
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODULES = sorted(
    ".".join(path.relative_to(folder.parent).with_suffix("").parts).removesuffix(".__init__")
    for folder in (ROOT / name for name in ("prorl", "stages", "storage", "trainer"))
    for path in folder.rglob("*.py")
    if not any(parent.is_symlink() for parent in path.parents) and ">>> " in path.read_text()
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name: str) -> None:
    root = "" if name.startswith("prorl") else "prorl."
    failed, attempted = doctest.testmod(import_module(root + name))
    assert attempted
    assert not failed
