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
from prorl.types import FailureCode, Json

MAX_LOG_BYTES = 4 << 20
MAX_REPORT_BYTES = 32 << 20
RUNNER_S = 15.0
"""For the runner's own work, beside the tests' limit."""

_CANARY = "prorl_canary"
_PYTEST = """import sys
import prorl_kept
import prorl_suspects
import prorl_witness
_seen = [prorl_witness, prorl_witness.connect(prorl_suspects.Suspects(), prorl_kept.Kept())]


def pytest_addoption(parser):
    prorl_witness.forget(sys.modules)


def pytest_configure(config):
    if _seen:
        witness, ours = _seen[0], _seen[1]
        del _seen[:]
        witness.attach(config, ours)
"""
_SITE = """import sys
from importlib.machinery import PathFinder
ours = next((path for path in sys.path if path.startswith("/proc/self/fd/")), None)
found = PathFinder.find_spec("sitecustomize", [path for path in sys.path if path != ours])
if found is not None and found.loader is not None:
    from importlib.util import module_from_spec
    found.loader.exec_module(module_from_spec(found))
import unittest.result
import prorl_kept
import prorl_suspects
import prorl_witness
prorl_witness.watch_unittest(prorl_suspects.Suspects(), prorl_kept.Kept())
prorl_witness.forget(sys.modules)
"""


class Tested(NamedTuple):
    """What came out of one run of the tests."""

    passed: frozenset[str]
    log: str
    """End of what was printed."""
    timed_out: bool = False
    is_witnessed: bool = False
    """Whether pytest or unittest told what passed; else it was read from the log."""
    suspects: frozenset[str] = frozenset()
    """What code of the repository did to the judgement (`suspects.py`, `runner.py`)."""
    modules: Mapping[str, str] = {}
    """Where top-level modules came from."""
    failed: frozenset[str] = frozenset()
    expected: frozenset[str] = frozenset()
    """Those that passed because they were expected to fail, and did."""
    workspace: str = ""
    """Path of the repository, as the tests saw it."""

    def count(self, names: Sequence[str]) -> int:
        """How many of these tests passed.

        A published name may end at the first space of the real one, or be without its file
        (`T.test_a` for `t.py::T::test_a`): then all that are called so must have passed.
        """
        good, bad = _short(self.passed), _short(self.failed)
        return sum(name in self.passed or (name in good and name not in bad) for name in names)


async def run_tests(
    sandbox: Sandbox,
    command: str,
    limit_s: float,
    environment: Mapping[str, str],
    parser: str,
    watched: Sequence[str] = (),
) -> Tested:
    """Run the command; `parser` reads its log where no witness tells; `watched` are files and
    folders that it must not write. Raises GraderError when it cannot be run, SandboxError.
    """
    nonce = secrets.token_hex(16)
    job = {
        "nonce": nonce,
        "command": command,
        "limit_s": limit_s,
        "environment": dict(environment),
        "witness": base64.b64encode(_witness("pytest" not in command)).decode(),
        "report": REPORT,
        "max_log_bytes": MAX_LOG_BYTES,
        "watched": list(watched),
    }
    argv = ["python3", "-I", "-c", _source("runner.py")]
    done = await sandbox.exec(argv, limit_s + RUNNER_S, orjson.dumps(job))
    line = next((line for line in done.output.splitlines() if line.startswith(nonce)), "")
    if not line:
        if done.timed_out:
            return Tested(frozenset(), "the tests did not end in time", timed_out=True)
        if done.exit_code in (126, 127) or "Error" in done.output:
            raise GraderError(
                FailureCode.GRADER_ERROR, f"the tests' runner failed: {done.output[-1000:]}"
            )
        return Tested(frozenset(), "the tests ended the program that runs them")
    try:
        content = await sandbox.get(REPORT, MAX_REPORT_BYTES)
    except (FileNotFoundError, SandboxError):
        return Tested(frozenset(), "the tests removed their own report")
    if hashlib.sha256(content).hexdigest() != orjson.loads(line.partition(" ")[2])["digest"]:
        return Tested(frozenset(), "the tests changed their own report")
    try:  # the runner's own file, but names and places in it are the tests' to choose
        return _read(json.loads(zlib.decompress(content)), parser)
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Tested(frozenset(), "the tests spoiled their report")


def _text(said: str) -> str:
    """What the tests said, without halves of surrogate pairs, which no table holds."""
    return said.encode("utf-8", "backslashreplace").decode()


def _texts(said: Iterable[str]) -> set[str]:
    return set(map(_text, said))


def _short(names: Iterable[str]) -> set[str]:
    """What published rows call tests of these names."""
    found = {name.split(" ", 1)[0] for name in names}
    return found | {".".join(name.split("::")[1:]) for name in names if "::" in name}


def _read(report: Json, parser: str) -> Tested:
    """What a report of the runner says."""
    log, sessions = report["log"], report["sessions"]
    if report["timed_out"]:
        return Tested(frozenset(), f"{log}\nthe tests did not end in time", timed_out=True)
    suspects: set[str] = set(report["touched"])
    if not sessions:
        good, bad = read_log(log, parser)
        return Tested(good - bad, log, failed=bad, suspects=frozenset(suspects))
    passed: set[str] = set()
    failed: set[str] = set()
    expected: set[str] = set()
    modules: dict[str, str] = {}
    for session in sessions:
        outcomes = session.get("outcomes", {})
        if not session["ended"] or not session.get("told") or not outcomes.get(_CANARY):
            log += "\na session of tests did not end well: what it saw does not count"
            failed.update(_texts(outcomes))
            continue
        passed.update(_texts(name for name, good in outcomes.items() if good))
        failed.update(_texts(name for name, good in outcomes.items() if not good))
        suspects.update(_texts(session.get("suspects", [])))
        expected.update(_texts(session.get("expected", [])))
        modules.update({_text(name): _text(at) for name, at in session.get("modules", {}).items()})
    return Tested(
        frozenset(passed - failed - {_CANARY}),
        log,
        is_witnessed=True,
        suspects=frozenset(suspects),
        modules=modules,
        failed=frozenset(failed),
        expected=frozenset(expected),
        workspace=report["workspace"],
    )


@cache
def _source(name: str) -> str:
    return files("prorl.envs.swe").joinpath(name).read_text()


@cache
def _witness(with_unittest: bool) -> bytes:
    """The modules that go in front of the tests' own, as a zip."""
    members = {"prorl_witness.py": _source("witness.py"), "prorl_pytest.py": _PYTEST}
    members["prorl_suspects.py"] = _source("suspects.py")
    members["prorl_kept.py"] = _source("kept.py").replace("prorl.envs.swe.", "prorl_")
    if with_unittest:
        members["sitecustomize.py"] = _SITE
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, text in members.items():
            archive.writestr(zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0)), text)
    return out.getvalue()
