"""Logs of pytest (`-rA`) and of unittest (`-v`), both at once."""

from __future__ import annotations

import re

_PYTEST = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|XPASS|SKIPPED) (\S.*)$")
_UNITTEST = re.compile(r"^(\w+) \(([\w.]+)\)(.*)$")
_SUMMARY = re.compile(r"^(FAIL|ERROR): (\w+) \(([\w.]+)\)")
"""Of a failed test, where unittest tells why: also when the test had printed `ok`."""
_VERDICT = re.compile(
    r"(?:^|\.\.\. ?|\s)(ok|FAIL|ERROR|expected failure|unexpected success|skipped .*)$"
)
_GOOD = {"PASSED", "XFAIL", "ok", "expected failure"}


def verdicts(report: str) -> tuple[set[str], set[str]]:
    """Names of tests that passed somewhere, and of those that failed somewhere.

    >>> sorted(verdicts("PASSED t.py::a\\nFAILED t.py::b - x\\ntest_c (t.T.test_c) ... ok")[0])
    ['t.py::a', 'test_c (t.T)', 'test_c (t.T.test_c)']
    """
    passed: set[str] = set()
    failed: set[str] = set()
    waiting: tuple[str, ...] = ()
    for line in report.splitlines():
        if told := _told(line):
            names, status = told
        elif match := _UNITTEST.match(line):
            names = waiting = _unittest_names(match[1], match[2])
            status = _verdict(match[3])
        else:
            names, status = waiting, _verdict(line) if waiting else ""
        if status:
            (passed if status in _GOOD else failed).update(names)
            waiting = ()
    return passed, failed


def _told(line: str) -> tuple[tuple[str, ...], str] | None:
    """Tests and their verdict in a line that tells both, of pytest or of unittest's summary."""
    if match := _PYTEST.match(line):
        name = match[2] if match[1] == "PASSED" else match[2].split(" - ")[0]
        return (name,), match[1]
    if match := _SUMMARY.match(line):
        return _unittest_names(match[2], match[3]), match[1]
    return None


def _verdict(text: str) -> str:
    """The verdict that a line of unittest ends with; a test may print before it."""
    match = _VERDICT.search(text)
    return match[1] if match else ""


def _unittest_names(test: str, place: str) -> tuple[str, ...]:
    """Both names of a test of unittest.

    `test_a (mod.T)` is how Python before 3.11 and the data sets write it, and
    `test_a (mod.T.test_a)` how it is written now.
    """
    if place.endswith(f".{test}"):
        return f"{test} ({place})", f"{test} ({place[: -len(test) - 1]})"
    return f"{test} ({place})", f"{test} ({place}.{test})"
