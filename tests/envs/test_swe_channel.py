"""The way from the tests to the verdict: what is believed of a report, and what is not."""

from __future__ import annotations

import zlib
from pathlib import Path

import orjson
import pytest

from prorl.envs.swe.shell import REPORT
from prorl.envs.swe.tested import Harness, run_tests
from prorl.testing import LocalSandbox

TEST = (
    "import unittest\nclass T(unittest.TestCase):\n    def test_a(self): self.assertTrue(False)\n"
)
COMMAND = "python3 -m unittest -v test_it"


class Forged(LocalSandbox):
    """Somebody rewrites the report before it is read."""

    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        report = orjson.loads(zlib.decompress(await super().get(path, max_bytes)))
        report["sessions"][0]["outcomes"]["test_it.T.test_a"] = True
        return zlib.compress(orjson.dumps(report))


def _folder(folder: Path, text: str = TEST) -> Path:
    (folder / Path(REPORT).parent).mkdir()
    (folder / "test_it.py").write_text(text)
    return folder


@pytest.mark.parametrize("kind", [LocalSandbox, Forged])
async def test_a_report_that_is_not_the_runners_says_nothing(
    kind: type[LocalSandbox], tmp_path: Path
) -> None:
    tested = await run_tests(kind(_folder(tmp_path)), Harness(COMMAND, 20.0, {}, "python"))
    assert tested.passed == frozenset()
    assert ("changed their own report" in tested.log) is (kind is Forged)


async def test_what_no_watched_function_did_the_canary_sees(tmp_path: Path) -> None:
    """Every failure is forgotten by a result that the witness cannot name."""
    forget = "import unittest.result\nunittest.result.TestResult.addFailure = lambda *a: None\n"
    text = f"{forget}{TEST}".replace("self.assertTrue(False)", "pass")
    tested = await run_tests(
        LocalSandbox(_folder(tmp_path, text)), Harness(COMMAND, 20.0, {}, "python")
    )
    assert tested.passed == frozenset()
    assert "did not end well" in tested.log


async def test_an_honest_run_is_believed(tmp_path: Path) -> None:
    text = TEST.replace("False", "True")
    tested = await run_tests(
        LocalSandbox(_folder(tmp_path, text)), Harness(COMMAND, 20.0, {}, "python")
    )
    assert tested.count(["test_a (test_it.T)", "test_a (test_it.T.test_a)"]) == 2
    assert tested.is_witnessed


HALF = """import sys, types
sys.modules["\\ud800"] = odd = types.ModuleType("odd")
odd.__file__ = "/tmp/\\udfff.py"
"""
LIES = """import gc
for one in gc.get_objects():
    if type(one).__name__ == "Witness":
        held = one._voice.gi_frame.f_locals
        held["end"].sendall(held["key"] + {line!r} + b"\\n")
"""


LAST = b'{"say": "bye", "outcomes": {"prorl_canary": true}, '


async def test_half_a_surrogate_pair_in_a_modules_name_is_read(tmp_path: Path) -> None:
    text = HALF + TEST.replace("False", "True")
    tested = await run_tests(
        LocalSandbox(_folder(tmp_path, text)), Harness(COMMAND, 20.0, {}, "python")
    )
    assert tested.count(["test_a (test_it.T)"]) == 1
    assert tested.modules["\\ud800"] == "/tmp/\\udfff.py"


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"{",
        b"7",
        b"[" * 100_000,
        b'{"outcomes": [1]}',
        LAST + b'"modules": 7}',
        LAST + b'"modules": {"a": 7}}',
        LAST + b'"suspects": [[]]}',
        LAST + b'"expected": 7}',
    ],
    ids=lambda line: line[-24:].decode(),
)
async def test_what_no_witness_says_is_a_verdict_and_no_failure_of_the_grader(
    line: bytes, tmp_path: Path
) -> None:
    """Code that finds the witness in its process and speaks with its key."""
    text = TEST.replace("self.assertTrue(False)", "exec(LIES)")
    text = f"LIES = {LIES.format(line=line)!r}\n{text}"
    tested = await run_tests(
        LocalSandbox(_folder(tmp_path, text)), Harness(COMMAND, 20.0, {}, "python")
    )
    assert tested.passed == frozenset()
    assert "spoiled their report" in tested.log or "did not end well" in tested.log
