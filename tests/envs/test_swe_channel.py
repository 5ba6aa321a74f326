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
    async def get(self, path: str, max_bytes: int = 1 << 20) -> bytes:
        report = orjson.loads(zlib.decompress(await super().get(path, max_bytes)))
        report["outcomes"]["test_it.T.test_a"] = True
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


async def test_who_leaves_before_a_test_has_ended_has_passed_none(tmp_path: Path) -> None:
    output = "test_a (test_it.T.test_a) ... ok\n"
    text = f"import os\nos.write(1, {output.encode()!r})\nos._exit(0)\n{TEST}"
    tested = await run_tests(
        LocalSandbox(_folder(tmp_path, text)), Harness(COMMAND, 20.0, {}, "python")
    )
    assert output in tested.log
    assert tested.passed == frozenset()


async def test_a_reported_failure_stays_a_failure(tmp_path: Path) -> None:
    text = f"{TEST}class U(T):\n    def id(self): return 'test_it.T.test_a'\n"
    text += "    def test_a(self): pass\n"
    tested = await run_tests(
        LocalSandbox(_folder(tmp_path, text)), Harness(COMMAND, 20.0, {}, "python")
    )
    assert tested.count(["test_a (test_it.T)"]) == 0
    assert tested.failing(["test_it.T.test_a"])


async def test_an_honest_run_is_believed(tmp_path: Path) -> None:
    text = TEST.replace("False", "True")
    tested = await run_tests(
        LocalSandbox(_folder(tmp_path, text)), Harness(COMMAND, 20.0, {}, "python")
    )
    assert tested.count(["test_a (test_it.T)", "test_a (test_it.T.test_a)"]) == 2
    assert not tested.failed


SPEAKS = """
import os, stat
for fd in range(3, 40):
    try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
            os.write(fd, {line!r} + b"\\n")
    except OSError:
        pass
"""


@pytest.mark.parametrize(
    "line",
    [
        b"[1]",
        b"{",
        b"7",
        b"\xff",
        b"[" * 100_000,
        b'{"outcomes": [1]}',
        b'{"outcomes": {"a": []}}',
        b'{"outcomes": {"\\ud800": true}}',
    ],
    ids=lambda line: line[-24:].decode("utf-8", "replace"),
)
async def test_what_no_witness_says_is_no_failure_of_the_grader(
    line: bytes, tmp_path: Path
) -> None:
    """Code that finds the witness's socket and speaks over it."""
    text = SPEAKS.format(line=line) + TEST
    tested = await run_tests(
        LocalSandbox(_folder(tmp_path, text)), Harness(COMMAND, 20.0, {}, "python")
    )
    assert tested.count(["test_a (test_it.T)"]) == 0
