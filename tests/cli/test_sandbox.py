"""`prorl sandbox open`: a real terminal in a task's sandbox, of which nothing stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import ptyprocess
import pytest

from prorl.cli.app import dispatch
from tests.sandbox.conftest import KINDS, why_not
from tests.waiting import wait_until

TASKS = (
    {
        "task_id": "HumanEval/0",
        "prompt": 'def add(a, b):\n    """Add."""\n',
        "canonical_solution": "    return a + b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n",
        "entry_point": "add",
    },
    {
        "task_id": "HumanEval/1",
        "prompt": 'def sub(a, b):\n    """Subtract."""\n',
        "canonical_solution": "    return a - b\n",
        "test": "def check(candidate):\n    assert candidate(1, 2) == -1\n",
        "entry_point": "sub",
    },
)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(b"\n".join(map(orjson.dumps, TASKS)))
    return path


class Terminal:
    """A person at a terminal of 100 columns and 30 rows in which the command runs."""

    def __init__(self, process: ptyprocess.PtyProcess) -> None:
        self.process, self.screen = process, ""

    def read_until(self, text: str) -> None:
        while text not in self.screen:
            self.screen += self.process.read(4096).decode("utf-8", "replace")

    def read_rest(self) -> None:
        while True:
            try:
                self.screen += self.process.read(4096).decode("utf-8", "replace")
            except EOFError:
                return

    def type(self, text: str) -> None:
        self.process.write(text.encode())


@contextmanager
def opened(*arguments: str) -> Iterator[Terminal]:
    command = [sys.executable, "-m", "prorl.cli", "sandbox", "open", *arguments]
    process = ptyprocess.PtyProcess.spawn(command, dimensions=(30, 100))
    try:
        yield Terminal(process)
    finally:
        process.close(force=True)


def below(pid: int) -> set[int]:
    """The processes that descend from one."""
    parents = {
        int(path.name): _parent(path) for path in Path("/proc").iterdir() if path.name.isdigit()
    }
    descendants = {pid}
    while (
        more := {child for child, parent in parents.items() if parent in descendants} - descendants
    ):
        descendants |= more
    return descendants - {pid}


def _parent(place: Path) -> int:
    try:
        return int((place / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return 0


def ended(pids: set[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


@pytest.mark.timeout(240)
def test_a_person_looks_around_solves_the_task_and_leaves(tasks: Path) -> None:
    with opened(str(tasks), "HumanEval/1", "--tests", "--sandbox", "local") as terminal:
        terminal.read_until("nothing of it stays")
        terminal.type("stty size; test -t 0 && echo at a ter''minal\r")
        terminal.read_until("at a terminal")
        assert "30 100" in terminal.screen
        terminal.process.setwinsize(20, 70)
        # the new size comes by a signal, which what is typed meanwhile may overtake
        terminal.type("until [ \"$(stty size)\" = '20 70' ]; do sleep .1; done; echo resi''zed\r")
        terminal.read_until("resized")
        terminal.type("bash -c 'echo sleep''ing; sleep 600'\r")
        terminal.read_until("sleeping")
        terminal.type("\x03")
        terminal.type("echo 'def sub(a, b): return a - b' > solution.py; echo writ''ten\r")
        terminal.read_until("written")
        mine = below(terminal.process.pid)
        words = [Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0") for pid in mine]
        (greeting,) = {word for line in words for word in line if word.startswith(b'{"socket"')}
        terminal.type("\x04")
        terminal.read_rest()
        assert terminal.process.wait() == 0
    assert "reward 1" in terminal.screen
    wait_until(lambda: ended(mine), "its processes are gone")
    assert not Path(orjson.loads(greeting)["root"]).parent.exists()


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "local"])
def test_the_reference_is_played_and_graded(
    tasks: Path, kind: str, capfd: pytest.CaptureFixture[str]
) -> None:
    if reason := why_not(kind):
        pytest.skip(reason)
    command = [sys.executable, "-m", "prorl.cli", "sandbox", "open", str(tasks)]
    command += ["--reference", "--tests", "--sandbox", kind]
    done = subprocess.run(command, input=b"cat solution.py\n", capture_output=True, check=True)
    assert b"return a + b" in done.stdout, "the shell sees what the reference wrote"
    assert b"reward 1" in done.stdout
    assert b"reference: files -> exit 0" in done.stderr


def test_a_script_may_be_a_file_or_nothing(tasks: Path) -> None:
    command = [sys.executable, "-m", "prorl.cli", "sandbox", "open", str(tasks)]
    command += ["--sandbox", "local"]
    script = tasks.with_name("script.sh")
    script.write_text("echo from a ''file\n")
    for path, output in ((script, b"from a file"), (Path(os.devnull), b"")):
        with path.open("rb") as stdin:
            done = subprocess.run(command, stdin=stdin, capture_output=True)
        assert done.returncode == 0, done.stderr
        assert output in done.stdout


@pytest.mark.timeout(240)
def test_a_window_that_is_closed_leaves_nothing(tasks: Path) -> None:
    with opened(str(tasks), "--sandbox", "local") as terminal:
        terminal.read_until("nothing of it stays")
        terminal.type("echo rea''dy\r")
        terminal.read_until("ready")
        mine = below(terminal.process.pid)
        os.kill(terminal.process.pid, signal.SIGHUP)
        wait_until(lambda: ended(mine), "its processes are gone")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nobody"], "no task 'nobody' in"),
        (["HumanEval/0", "--sandbox", "nowhere"], "nowhere"),
    ],
)
def test_a_mistake_is_a_single_line(
    tasks: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert dispatch(["sandbox", "open", str(tasks), *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_task_without_a_sandbox_is_refused_in_a_single_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "math.jsonl"
    row = {"task_id": "t", "env": "noop", "prompt": "say something"}
    path.write_bytes(orjson.dumps(row))
    assert dispatch(["sandbox", "open", str(path)]) == 2
    assert "needs no sandbox" in capsys.readouterr().err
