"""Packages as users install them, made by hand: modules and a dist-info folder on the path, found
by importlib.metadata.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from textwrap import dedent

import pytest


@contextmanager
def installed(
    folder: Path,
    name: str,
    files: Mapping[str, str],
    entry_points: Mapping[str, Mapping[str, str]],
    patch: pytest.MonkeyPatch,
) -> Iterator[None]:
    """Install `files` (path -> source) with entry points (group -> name -> value) for this process
    and the ones that it starts.
    """
    for path, source in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(dedent(source))
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    sections = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points.items())
        for group, points in entry_points.items()
    )
    (about / "entry_points.txt").write_text("\n".join(sections))
    modules = {path.split("/")[0].removesuffix(".py") for path in files}
    with patch.context() as scope:
        scope.syspath_prepend(str(folder))
        scope.setenv("PYTHONPATH", str(folder))
        importlib.invalidate_caches()
        yield
    for module in list(sys.modules):
        if module.partition(".")[0] in modules:
            del sys.modules[module]
