"""Each guard is switched off, one at a time, in a copy of the tree, and a test must fail there.

    .venv/bin/python -m pytest -m faults tests/faults/test_guards.py -k fsync -s

A guard is one line that carries a guarantee (`docs/guarantees.md`); a suite that passes without it
would not have seen the bug. The same tests pass in an unchanged copy.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("prorl", "stages", "storage", "trainer", "tests", "configs", "pyproject.toml")
PASSED, FAILED = 0, 1

pytestmark = [pytest.mark.faults, pytest.mark.timeout(900)]


class Guard(NamedTuple):
    """A line, what stands there when it is off, and the one test that must fail then."""

    file: str
    line: str
    off: str
    test: str


POWER = "tests/faults/test_power.py::test_what_was_promised_survives_a_power_cut"
SESSIONS = "tests/service/test_sessions.py"
GATEWAY = "tests/service/test_gateway.py"
APP = "tests/service/test_app.py"
WRITER = "tests/storage/test_writer.py"
LIFECYCLE = "tests/service/test_lifecycle.py"

GUARDS = {
    "fsync of a file before its rename": Guard(
        "storage/files/durable.py", "os.fsync(file.fileno())", "pass", POWER
    ),
    "fsync of the directory after a rename": Guard(
        "storage/files/durable.py", "sync_directory(path.parent)", "pass", POWER
    ),
    "fsync of a run's directory": Guard(
        "storage/files/layout.py", "sync_directory(Path(self.root))", "pass", POWER
    ),
    "fsync above a directory that is made": Guard(
        "prorl/linux/files.py", "sync_directory(folder.parent)", "pass", POWER
    ),
    "fsync of the token": Guard("prorl/linux/files.py", "os.fsync(fd)", "pass", POWER),
    "fsync of the log": Guard(
        "prorl/service/log/log.py", "PRAGMA synchronous=FULL", "PRAGMA synchronous=NORMAL", POWER
    ),
    "an answer waits for the disk": Guard(
        "prorl/service/gateway.py",
        "        await waiter\n",
        "        waiter.cancel()\n",
        "tests/service/test_durable.py::test_every_promise_waits_for_its_transaction",
    ),
    "fencing by attempt": Guard(
        "prorl/service/core/lifecycle.py",
        "event.kind not in _ABOUT_ROLLOUT and event.attempt != life.attempt",
        "False",
        LIFECYCLE,
    ),
    "fencing of a commit": Guard(
        "prorl/service/core/commits.py",
        "record is None or record.key != key:\n                refused",
        "record is None:\n                refused",
        f"{GATEWAY}::test_a_dead_worker_costs_an_attempt_and_its_late_writes_are_fenced",
    ),
    "dedupe of submissions": Guard(
        "prorl/service/core/accept.py",
        "there.get(candidate.key) or run.keys.get(candidate.key)",
        "None",
        f"{APP}::test_the_same_key_from_fifty_clients_at_once_is_a_single_group",
    ),
    "another digest under a key": Guard(
        "prorl/service/core/candidates.py",
        "name = digest(text, str(body.n).encode(), sampling.encode())",
        'name = ""',
        f"{APP}::test_the_same_key_from_fifty_clients_at_once_is_a_single_group",
    ),
    "dedupe of commits": Guard(
        "prorl/service/core/commits.py",
        "commit_seq = self._commit_seq(run, part)",
        "commit_seq = None",
        f"{GATEWAY}::test_commit_answers_the_same_to_the_same_part",
    ),
    "dedupe of rows that come again": Guard(
        "storage/write/writer.py",
        "waiting = self._flying.knows(key) or self._waiting.knows(key)",
        "waiting = None",
        f"{WRITER}::test_a_row_that_comes_again_is_stored_once_and_acked_each_time",
    ),
    "dedupe of rows that are durable": Guard(
        "prorl/service/core/commits.py",
        "return RefusalReason.COMMITTED\n        if record.life.state is not",
        "return None\n        if record.life.state is not",
        f"{GATEWAY}::test_commit_answers_the_same_to_the_same_part",
    ),
    "sessions on control streams": Guard(
        "prorl/service/gateway.py",
        "elif not self.core.workers.current(worker):",
        "elif False:",
        SESSIONS,
    ),
    "incarnations on lease streams": Guard(
        "prorl/service/core/leases.py",
        'worker.incarnation != hello.get("incarnation", "")',
        "False",
        SESSIONS,
    ),
    "earlier incarnations are refused": Guard(
        "prorl/service/core/workers.py",
        'if next(keys, "") != worker.incarnation:',
        "if False:",
        SESSIONS,
    ),
    "the sweep's guard": Guard(
        "storage/files/layout.py",
        "[path for path in orphans if path not in named]",
        "orphans",
        f"{WRITER}::test_nothing_that_a_commit_on_disk_names_is_removed",
    ),
    "the end of an ended compaction": Guard(
        "storage/keep/tidy.py",
        "if not done:",
        "if False:",
        "tests/storage/test_tidy.py::test_what_dies_leaves_no_pack",
    ),
    "packs of a run that lacks a commit": Guard(
        "storage/keep/compact.py",
        "if not names or not run.whole(names[-1].last):",
        "if False:",
        "tests/storage/test_compact.py::test_no_pack_goes_while_a_commit_is_missing",
    ),
    "a directory that the log does not know": Guard(
        "prorl/service/core/manifest.py",
        "if directory.written():",
        "if False:",
        "tests/service/test_directories.py"
        "::test_a_directory_that_the_log_does_not_know_is_refused_and_untouched",
    ),
    "freeze becomes death": Guard(
        "prorl/supervisor/service.py",
        "if child.silence(TICK_S) >= silence_s:",
        "if False:",
        "tests/supervisor/test_service.py::test_a_frozen_child_is_ended_and_started_again",
    ),
    "a task that nobody awaits ends its process": Guard(
        "prorl/process.py",
        "set_exception_handler(_loudly)",
        "set_exception_handler(None)",
        "tests/test_process.py::test_a_task_that_dies_with_nobody_waiting_ends_the_process",
    ),
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree, where nothing minds what is done to it."""
    folder = tmp_path_factory.mktemp("guards")
    for name in COPIED:
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
        else:
            shutil.copy2(ROOT / name, folder / name)
    return folder


@contextmanager
def _off(path: Path, guard: Guard) -> Iterator[None]:
    """The file without its guard, until the block ends."""
    text, of = path.read_text(), path.stat()
    assert text.count(guard.line) == 1, f"{guard.file} has {text.count(guard.line)} such lines"
    path.write_text(text.replace(guard.line, guard.off))
    # Bytecode is known by whole seconds and size: neither state may be taken for the other one.
    os.utime(path, (of.st_atime, of.st_mtime + 100))
    yield
    path.write_text(text)
    os.utime(path, (of.st_atime, of.st_mtime))


def _run(copy: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    # No power cut at as many moments as its own test has: a guard is missed at most of them.
    env = {**os.environ, "PYTHONPATH": str(copy), "PRORL_POWER_CUTS": "60"}
    argv = [sys.executable, "-m", "pytest", "-qx", "-m", "", "-p", "no:cacheprovider", *tests]
    return subprocess.run(argv, cwd=copy, env=env, capture_output=True, text=True)


def test_the_tests_pass_in_a_copy(copy: Path) -> None:
    completed = _run(copy, *sorted({guard.test for guard in GUARDS.values()}))
    assert completed.returncode == PASSED, completed.stdout[-3000:]


@pytest.mark.parametrize("name", GUARDS)
def test_a_test_fails_without(copy: Path, name: str) -> None:
    guard = GUARDS[name]
    with _off(copy / guard.file, guard):
        completed = _run(copy, guard.test)
    failed = [line for line in completed.stdout.splitlines() if line.startswith("FAILED")]
    print(f"\n{name}: off -> {failed}", file=sys.stderr)
    assert completed.returncode == FAILED, completed.stdout[-3000:]
    assert failed, completed.stdout[-3000:]
