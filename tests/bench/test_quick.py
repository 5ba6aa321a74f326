"""Every bench by its own command, as a user plays it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.cli.commands.bench import benches


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", benches())
def test_it_plays(name: str, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "prorl.cli", "bench", name, "--quick", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert report["bench"] == name
    assert report["rows"]
