"""The package has one import name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import prorl


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
