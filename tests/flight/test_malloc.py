"""Malloc settings: applied here, and refused on request.

In processes of their own, since they cannot be taken back.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("opt_out", "expected"), [("", "True"), ("1", "False")])
def test_tune(opt_out: str, expected: str) -> None:
    program = "from prorl.flight.malloc import tune; print(tune())"
    environment = {**os.environ, "PRORL_NO_MALLOC_TUNING": opt_out}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == expected
