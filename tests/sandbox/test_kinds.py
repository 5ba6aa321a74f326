"""The table of sandbox kinds: one owner of each fact, users' kinds beside ours."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from subprocess import DEVNULL

import pytest

import prorl
from prorl.cli.settings import service_settings
from prorl.errors import ConfigError
from prorl.sandbox import kinds
from prorl.sandbox.node.probe import choose, probe_kind
from tests.user_package import installed

ROOM = Path(__file__).parents[2] / "prorl"
MICROVM = """
    from prorl.sandbox.kinds.local import KIND as LOCAL

    KIND = LOCAL._replace(fix="buy one")
    ABSENT = LOCAL._replace(missing=lambda: "no /dev/kvm", fix="buy one")
"""


@pytest.mark.parametrize("name", kinds.CATALOGUE)
def test_every_row_has_a_kind(name: str) -> None:
    kind = kinds.load(name)
    assert (kind.launch is None) is not (kind.start is None)
    assert all((kind.fix, kind.cannot, kind.bare))


def test_a_kind_is_named_nowhere_but_in_its_own_file() -> None:
    """The needs and abilities of a kind are read from its record, never decided by its name."""
    names = "|".join(kinds.CATALOGUE)
    decided = re.compile(rf"""([=!]=|\bin\b)\s*\(?["'](?:{names})["']|case ["'](?:{names})["']""")
    offenders = [
        f"{path.relative_to(ROOM)}: {line.strip()}"
        for path in ROOM.rglob("*.py")
        for line in path.read_text().splitlines()
        if decided.search(line) and path.stem not in kinds.CATALOGUE
        # of nodes and clusters some are local, too
        if "local" not in line or "kind" in line
    ]
    assert not offenders


def test_a_wrong_kind_is_refused_before_anything_is_started() -> None:
    with pytest.raises(ConfigError, match=r"'pyn'; expected one of .*did you mean 'pyns'\?"):
        service_settings({"sandbox": {"kind": "pyn"}}, None)


async def test_a_users_kind_is_probed_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = {"microvm": "vms:KIND", "absent": "vms:ABSENT"}
    with installed(
        tmp_path, "vms", {"vms.py": MICROVM}, {"prorl.sandbox_kinds": points}, monkeypatch
    ):
        assert kinds.names() == (*kinds.CATALOGUE, "microvm", "absent")
        assert "microvm" not in kinds.automatic()
        verdict = await probe_kind("absent")
        assert (verdict.works, verdict.reason, verdict.fix) == (False, "no /dev/kvm", "buy one")
        assert await choose("microvm") == "microvm"


async def test_auto_takes_pyns_where_it_works_though_apptainer_does_too() -> None:
    if not (pyns := await probe_kind("pyns")).works:
        pytest.skip(f"pyns does not work here: {pyns.reason}")
    assert await choose() == "pyns"


def test_a_sandbox_starts_where_prorl_is_on_pythonpath_alone(tmp_path: Path) -> None:
    """The layout is that of `pip install --target`: no interpreter has it among its own
    packages.
    """
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    bare = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    there = subprocess.run([base, "-c", "import prorl"], env=bare, cwd="/", stderr=DEVNULL)
    if there.returncode == 0:
        pytest.skip("prorl is installed in the base interpreter")
    site = tmp_path / "site"
    site.mkdir()
    packages = Path(pytest.__file__).parents[1]
    for entry in (*packages.iterdir(), Path(prorl.__file__).parent):
        if entry.suffix not in (".pth", ".egg-link"):
            (site / entry.name).symlink_to(entry)
    done = subprocess.run(
        [base, "-P", "-m", "prorl.cli", "check", "arith:train?n=1", "--sandbox", "local"],
        env={**bare, "PYTHONPATH": "site"},  # relative, as a script may have it
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "1 task: reference right" in done.stdout
