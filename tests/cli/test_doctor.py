"""`prorl doctor` says in words what is wrong with a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.skipif(not shutil.which("unshare"), reason="needs unshare(1) of util-linux")
def test_a_user_namespace_with_one_uid_is_named(tmp_path: Path) -> None:
    """Else `[Errno 22] Invalid argument`, and as its fix \"run as root\" to somebody who is."""
    unshare = ["unshare", "--user", "--map-root-user"]
    if subprocess.run([*unshare, "true"], capture_output=True).returncode:
        pytest.skip("user namespaces are not allowed here")
    command = [*unshare, sys.executable, "-m", "prorl.cli", "doctor", "--root", str(tmp_path)]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    line = next(line for line in said.splitlines() if "sandbox local" in line)
    assert "a user namespace that has one uid" in line
    assert "run as root" not in line
    assert "range of uids" in line
