"""Runs a task's tests in a sandbox that holds the repository, the change and the tests.

What the tests saw leaves by a channel that the code under test is kept from: `runner.py` and
`witness.py`, which are sent as text.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import secrets
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import NamedTuple

import orjson

from prorl.envs.swe.logs import read_log
from prorl.envs.swe.shell import REPORT
from prorl.errors import GraderError, SandboxError
from prorl.protocols import Sandbox
from prorl.types import FailureCode, Json, ToolResult
from prorl.waits import wait_limit_s

MAX_LOG_BYTES = 4 << 20
MAX_REPORT_BYTES = 32 << 20
RUNNER_S = wait_limit_s("tests.runner")

_PYTEST = """import prorl_witness
voice = prorl_witness.connect()


def pytest_configure(config):
    prorl_witness.attach(config, voice)
"""
_SITE = """import sys
from importlib.machinery import PathFinder
ours = next((path for path in sys.path if path.startswith("/proc/self/fd/")), None)
found = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != ours])
if found is not None and found.loader is not None:
    from importlib.util import module_from_spec
    found.loader.exec_module(module_from_spec(found))
import prorl_witness
prorl_witness.watch_unittest()
"""


class Tested(NamedTuple):
    passed: frozenset[str]
    log: str
    """End of what was printed."""
    timed_out: bool = False
    failed: frozenset[str] = frozenset()

    def count(self, names: Sequence[str]) -> int:
        """Returns how many of these tests passed.

        A published name may end at the first space of the real one, or be without its file
        (`T.test_a` for `t.py::T::test_a`): then all that are called so must have passed.
        """
        return len(self.passing(names))

    def passing(self, names: Sequence[str]) -> list[str]:
        good, bad = _short(self.passed), _short(self.failed)
        return [name for name in names if name in self.passed or (name in good and name not in bad)]

    def missing(self, names: Sequence[str]) -> list[str]:
        passed = set(self.passing(names))
        return [name for name in names if name not in passed]

    def failing(self, names: Sequence[str]) -> list[str]:
        bad = _short(self.failed)
        return [name for name in names if name in self.failed or name in bad]


class Harness(NamedTuple):
    command: str
    limit_s: float
    environment: Mapping[str, str]
    parser: str
    """Reads the log where no witness tells."""

    @property
    def trusts_silent_witness(self) -> bool:
        """Returns whether a witness that was there is believed when it has seen no test."""
        return "pytest" in self.command or "-m unittest" in self.command

    def job(self, nonce: str) -> Json:
        return {
            "nonce": nonce,
            "command": self.command,
            "limit_s": self.limit_s,
            "environment": dict(self.environment),
            "witness": base64.b64encode(_witness("pytest" not in self.command)).decode(),
            "report": REPORT,
            "max_log_bytes": MAX_LOG_BYTES,
        }


async def run_tests(sandbox: Sandbox, harness: Harness) -> Tested:
    """Run the tests; what came out. Raises GraderError when they cannot be run, SandboxError."""
    nonce = secrets.token_hex(16)
    argv = ["python3", "-I", "-c", _source("runner.py")]
    job = orjson.dumps(harness.job(nonce))
    done = await sandbox.exec(argv, harness.limit_s + RUNNER_S, job)
    line = next((line for line in done.output.splitlines() if line.startswith(nonce)), "")
    if not line:
        return _without_report(done)
    return await _reported(sandbox, line.partition(" ")[2], harness)


def _without_report(done: ToolResult) -> Tested:
    """Grades a run without a report of the runner. Raises GraderError where it could not run."""
    if done.timed_out:
        return Tested(frozenset(), "the tests did not end in time", timed_out=True)
    if done.exit_code in (126, 127) or "Error" in done.output:
        raise GraderError(
            FailureCode.GRADER_ERROR, f"the tests' runner failed: {done.output[-1000:]}"
        )
    return Tested(frozenset(), "the tests ended the program that runs them")


async def _reported(sandbox: Sandbox, digest_line: str, harness: Harness) -> Tested:
    """Reads the report if its digest is the runner's; without such a report no test has passed."""
    try:
        content = await sandbox.get(REPORT, MAX_REPORT_BYTES)
    except (FileNotFoundError, SandboxError):
        return Tested(frozenset(), "the tests removed their own report")
    if hashlib.sha256(content).hexdigest() != orjson.loads(digest_line)["digest"]:
        return Tested(frozenset(), "the tests changed their own report")
    try:  # the runner's own file, but names and places in it are the tests' to choose
        return _read(json.loads(zlib.decompress(content)), harness)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Tested(frozenset(), "the tests spoiled their report")


def _text(text: str) -> str:
    """Returns a text of the tests without halves of surrogate pairs, which no table holds."""
    return text.encode("utf-8", "backslashreplace").decode()


def _short(names: Iterable[str]) -> set[str]:
    """Returns the names that published rows give to tests of these names."""
    short_names = {name.split(" ", 1)[0] for name in names}
    return short_names | {".".join(name.split("::")[1:]) for name in names if "::" in name}


def _read(report: Json, harness: Harness) -> Tested:
    log = report["log"]
    if report["timed_out"]:
        return Tested(frozenset(), f"{log}\nthe tests did not end in time", timed_out=True)
    outcomes = {_text(name): good for name, good in report["outcomes"].items()}
    passed = frozenset(name for name, good in outcomes.items() if good)
    failed = frozenset(outcomes) - passed
    if not outcomes and not (report["is_witnessed"] and harness.trusts_silent_witness):
        good, failed = read_log(log, harness.parser)
        passed = good - failed
    return Tested(passed, log, failed=failed)


@cache
def _source(name: str) -> str:
    return files("prorl.envs.swe").joinpath(name).read_text()


@cache
def _witness(with_unittest: bool) -> bytes:
    members = {"prorl_witness.py": _source("witness.py"), "prorl_pytest.py": _PYTEST}
    if with_unittest:
        members["sitecustomize.py"] = _SITE
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text)
    return out.getvalue()
