"""Reading what tests printed: a catalogue of parsers, one a harness.

Pure functions over text that a policy may have written: nothing here trusts it, or raises. Each
gives the names that passed somewhere and the names that failed somewhere; a test that did both has
failed. What pytest and unittest saw is known without their logs (`tested.py`), where they can be
asked.

| parser | reads |
|---|---|
| python | pytest `-rA`, unittest `-v`, Django's runner, tox around them: both at once |
| sympy | `bin/test --verbose` |
| go | `go test -v` |
| cargo | `cargo test` |
| jest | jest and vitest, `--verbose`; mocha's spec reporter |
| maven | surefire's line for each class |
| gradle | `test` with its events logged |
| ctest | CMake's ctest |
| tap | the Test Anything Protocol |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple


class Verdicts(NamedTuple):
    passed: frozenset[str]
    failed: frozenset[str]


Parser = Callable[[str], tuple[set[str], set[str]]]


def by_line(pattern: str, *good: str) -> Parser:
    """Makes the parser of a log with one line a test: groups `name` and `status`."""
    line_of = re.compile(pattern, re.MULTILINE)

    def parse(log: str) -> tuple[set[str], set[str]]:
        passed: set[str] = set()
        failed: set[str] = set()
        for match in line_of.finditer(log):
            (passed if match["status"] in good else failed).add(match["name"])
        return passed, failed

    return parse


_TAP = re.compile(r"^[^\S\n]*+(not ok|ok) \d+ -? ?(.*?)(?: # (time=|SKIP|TODO).*)?$", re.MULTILINE)


def tap(log: str) -> tuple[set[str], set[str]]:
    """The Test Anything Protocol; a test that was skipped, or is still to do, has not passed.

    >>> tap("ok 1 - adds # time=1ms\\nok 2 - later # SKIP\\nnot ok 3 - subs") == ({"adds"}, {"later", "subs"})
    True
    """
    passed: set[str] = set()
    failed: set[str] = set()
    for status, name, directive in _TAP.findall(log):
        good = status == "ok" and directive in ("", "time=")
        (passed if good else failed).add(name)
    return passed, failed


_PYTEST = re.compile(r"^(PASSED|XFAIL|FAILED|ERROR|XPASS|SKIPPED) (\S.*)$")
_UNITTEST = re.compile(r"^(\w+) \(([\w.]+)\)(.*)$")
_SUMMARY = re.compile(r"^(FAIL|ERROR): (\w+) \(([\w.]+)\)")
"""The line of a failed test, where unittest tells why: also when the test had printed `ok`."""
_PY_VERDICT = re.compile(
    r"(?:^|\.\.\. ?|\s)(ok|FAIL|ERROR|expected failure|unexpected success|skipped .*)$"
)
_PY_GOOD = {"PASSED", "XFAIL", "ok", "expected failure"}


def python(report: str) -> tuple[set[str], set[str]]:
    """Returns names of tests that passed somewhere, and of those that failed somewhere.

    >>> sorted(python("PASSED t.py::a\\nFAILED t.py::b - x\\ntest_c (t.T.test_c) ... ok")[0])
    ['t.py::a', 'test_c (t.T)', 'test_c (t.T.test_c)']
    """
    passed: set[str] = set()
    failed: set[str] = set()
    waiting: tuple[str, ...] = ()
    for line in report.splitlines():
        if summary := _names_and_status(line):
            names, status = summary
        elif match := _UNITTEST.match(line):
            names = waiting = _unittest_names(match[1], match[2])
            status = _verdict(match[3])
        else:
            names, status = waiting, _verdict(line) if waiting else ""
        if status:
            (passed if status in _PY_GOOD else failed).update(names)
            waiting = ()
    return passed, failed


def _names_and_status(line: str) -> tuple[tuple[str, ...], str] | None:
    """Returns the tests and their status that a line of pytest or of unittest's summary names."""
    if match := _PYTEST.match(line):
        name = match[2] if match[1] == "PASSED" else match[2].split(" - ")[0]
        return (name,), match[1]
    if match := _SUMMARY.match(line):
        return _unittest_names(match[2], match[3]), match[1]
    return None


def _verdict(text: str) -> str:
    """The verdict that a line of unittest ends with; a test may print before it."""
    match = _PY_VERDICT.search(text)
    return match[1] if match else ""


def _unittest_names(test: str, place: str) -> tuple[str, ...]:
    """Both names of a test of unittest.

    `test_a (mod.T)` is how Python before 3.11 and the data sets write it, and
    `test_a (mod.T.test_a)` how it is written now.
    """
    if place.endswith(f".{test}"):
        return f"{test} ({place})", f"{test} ({place[: -len(test) - 1]})"
    return f"{test} ({place})", f"{test} ({place}.{test})"


# a tree of suites by indentation, a mark before each test

_MARK = re.compile(r"^(\s*)(✓|✔|√|✕|×|✖|○|\d+\)) (?:skipped )?(.+?)(?: \(?\d+(?:\.\d+)? ?m?s\)?)?$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_TICKS = {"✓", "✔", "√"}


def jest(log: str) -> tuple[set[str], set[str]]:
    """Returns names of tests that passed somewhere, and of those that failed somewhere.

    Each is known by its own name, and with its suites before it, joined by ` > ` or by a space.

    >>> sorted(jest("PASS a.test.js\\n  add\\n    ✓ adds (2 ms)\\n    ✕ carries")[0])
    ['add > adds', 'add adds', 'adds']
    """
    passed: set[str] = set()
    failed: set[str] = set()
    suites: list[tuple[int, str]] = []
    for line in map(str.rstrip, _COLOURS.sub("", log).splitlines()):
        if test := _MARK.match(line):  # it ends no suite: a test may print such a line
            names = [name for depth, name in suites if depth < len(test[1])] + [test[3]]
            aliases = {test[3], " > ".join(names), " ".join(names)}
            (passed if test[2] in _TICKS else failed).update(aliases)
            continue
        suite = line.lstrip()
        indent = len(line) - len(suite)
        while suites and suites[-1][0] >= indent:
            suites.pop()
        if indent:
            suites.append((indent, suite))
    return passed, failed


# surefire tells a line for each class, and one for each test that failed

_COUNTS = re.compile(
    r"Tests run: (\d{1,9}), Failures: (\d{1,9}), Errors: (\d{1,9}), Skipped: (\d{1,9})"
)
_CLASS = re.compile(r" -+ in (\S+)")
_TEST = re.compile(r"^\[ERROR\]\s+([\w.$]+)\.(\w+)(?:\(.*?\))?[:\s]", re.MULTILINE)


def surefire(log: str) -> tuple[set[str], set[str]]:
    """Classes, and `Class.test` of the ones that failed.

    >>> surefire("[INFO] Tests run: 2, Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 0.1 s -- in a.BTest")
    ({'a.BTest'}, set())
    """
    passed: set[str] = set()
    failed = {f"{place}.{test}" for place, test in _TEST.findall(log)}
    for line in log.split("\n"):
        at = 0
        while (counts := _COUNTS.search(line, at)) and (name := _CLASS.search(line, counts.end())):
            run, failures, errors, skipped = map(int, counts.groups())
            good = failures + errors == 0 and run > skipped
            (passed if good else failed).add(name[1])
            at = name.end()
    return passed, failed


# `test NAME ... ok`; with `--nocapture` what a test prints comes before its verdict

_CARGO_LINE = re.compile(r"^test (\S.*?) \.\.\. ?(?:(ok|FAILED|ignored)\b.*)?(.*)$")
_CARGO_VERDICT = re.compile(r"^(ok|FAILED)$")
_CARGO_LISTED = re.compile(r"^    (\S.*)$")


def cargo(log: str) -> tuple[set[str], set[str]]:
    """Returns names of tests that passed and of those that failed, of doc-tests with their line.

    The list of failures counts most: a test may print its own verdict.

    >>> outcomes = cargo("test a ... ok\\ntest b ... said\\nFAILED\\n\\nfailures:\\n    c\\n")
    >>> outcomes == ({"a"}, {"b", "c"})
    True
    """
    passed: set[str] = set()
    failed: set[str] = set()
    waiting, is_list = "", False
    for line in log.splitlines():
        if line == "failures:":
            is_list = True
        elif is_list and (listed := _CARGO_LISTED.match(line)):
            failed.add(listed[1])
        elif line.startswith(("test result:", "running ")):
            is_list, waiting = False, ""
        elif match := _CARGO_LINE.match(line):
            waiting = "" if match[2] else match[1]
            if match[2]:
                (passed if match[2] == "ok" else failed).add(match[1])
        elif waiting and (verdict := _CARGO_VERDICT.match(line)):
            (passed if verdict[1] == "ok" else failed).add(waiting)
            waiting = ""
    return passed, failed


PARSERS: Mapping[str, Parser] = {
    "python": python,
    "sympy": by_line(r"^(?P<name>test_\w+) (?P<status>ok|F|E|f|s|w)\b", "ok"),
    "go": by_line(r"^[^\S\n]*+--- (?P<status>PASS|FAIL|SKIP): (?P<name>\S+)", "PASS"),
    "cargo": cargo,
    "jest": jest,
    "maven": surefire,
    "gradle": by_line(r"^(?=\S.* > )(?P<name>\S.*) (?P<status>PASSED|FAILED|SKIPPED)$", "PASSED"),
    "ctest": by_line(
        r"^[^\S\n]*+\d+/\d+ +Test +#\d+: (?P<name>\S+) \.+ *(?P<status>Passed|\*\*\*\w+)", "Passed"
    ),
    "tap": tap,
}

_PROGRAMS = (
    ("go test", "go"),
    ("gotestsum", "go"),
    ("cargo", "cargo"),
    ("bin/test", "sympy"),
    ("jest", "jest"),
    ("vitest", "jest"),
    ("mocha", "jest"),
    ("npm ", "jest"),
    ("yarn ", "jest"),
    ("pnpm ", "jest"),
    ("mvn", "maven"),
    ("gradle", "gradle"),
    ("ctest", "ctest"),
    ("prove ", "tap"),
    ("tap ", "tap"),
)


def choose(command: str) -> str:
    """The parser for what a command prints.

    >>> choose("go test -v ./..."), choose("python -m pytest -rA"), choose("npx jest --verbose")
    ('go', 'python', 'jest')
    """
    return next((parser for words, parser in _PROGRAMS if words in f"{command} "), "python")


def read_log(log: str, parser: str) -> Verdicts:
    passed, failed = PARSERS[parser](log)
    return Verdicts(frozenset(passed), frozenset(failed))
