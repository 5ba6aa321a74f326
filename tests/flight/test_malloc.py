"""Malloc settings, in a process of their own: they cannot be taken back."""

from __future__ import annotations

import subprocess
import sys


def test_tune() -> None:
    program = "from prorl.flight.malloc import tune; print(tune())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr
