"""`prorl doctor` says in words what is wrong with a machine."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.cli.probes import _images


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


def test_it_says_which_way_images_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_SANDBOX__IMAGES", str(tmp_path / "images"))
    monkeypatch.setenv("PATH", str(tmp_path))
    found = _images()
    assert (found.level, found.what) == ("warn", "images")
    assert "stacked by overlayfs" in found.found or "merged by hard links" in found.found
    assert "Dockerfiles by none" in found.found
    assert "buildah" in found.fix
