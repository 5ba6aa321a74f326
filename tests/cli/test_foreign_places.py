"""Roots with odd names, roots of others, and users without a name."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from prorl.cli.runs import root_option
from prorl.tasks import load_tasks

NAMELESS = 1000770000


def test_a_line_to_copy_quotes_its_path() -> None:
    root = Path("/x/exp[1] *a'b?#50% é")
    assert shlex.split(root_option(root)) == ["--root", str(root)]


def test_load_tasks_takes_what_the_command_takes() -> None:
    tasks = load_tasks("arith:train?n=3,shop:train?n=2")
    assert [task.data_source for task in tasks] == [tasks[0].data_source] * 3 + [
        tasks[3].data_source
    ] * 2


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from prorl.view.server import user_name; print(user_name())", str(NAMELESS)),
        ("from prorl.cli.app import dispatch; print(dispatch(['verify', ROOT + '/x']))", "2"),
    ],
)
def test_a_user_without_a_name_or_rights_reads_no_traceback(
    tmp_path: Path, line: str, expected: str
) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "x" / "manifest.json").write_text("{}")
    tmp_path.chmod(0o700)
    become = f"import os; os.setgid({NAMELESS}); os.setuid({NAMELESS}); ROOT = {str(tmp_path)!r}"
    names = ("LOGNAME", "USER", "LNAME", "USERNAME")
    env = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", f"import prorl.cli.app, prorl.view.server; {become}; {line}"],
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in done.stderr
    assert done.stdout.strip() == expected, done.stderr
