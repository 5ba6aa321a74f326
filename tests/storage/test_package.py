"""The package's front door: one import name, light until used."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import prorl.storage


def test_public_names_load_on_first_use() -> None:
    for name in prorl.storage.__all__:
        assert getattr(prorl.storage, name).__name__ == name
    with pytest.raises(AttributeError, match="nothing_like_it"):
        prorl.storage.nothing_like_it  # noqa: B018


def test_the_folder_itself_cannot_be_imported() -> None:
    root = Path(prorl.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", "import storage"],
        capture_output=True,
        text=True,
        cwd=root,
        check=False,
    )
    assert "import prorl.storage instead of storage" in done.stderr


def test_importing_does_nothing_heavy() -> None:
    code = (
        "import sys, prorl.storage; print(sorted({'pyarrow', 'duckdb', 'fsspec'} &"
        " set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
