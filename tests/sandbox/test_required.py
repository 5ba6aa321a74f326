"""CI's rule: a sandbox kind that PRORL_REQUIRE names may not be skipped."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_ci_requires_every_kind_that_isolates() -> None:
    script = re.sub(
        r"^(timeout .*)?make .*$", "env", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE
    )
    completed = subprocess.run(
        ["bash", "-c", script, str(ROOT / ".ci" / "run")],
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
    )
    assert "PRORL_REQUIRE=apptainer,pyns" in completed.stdout.splitlines(), completed.stderr
