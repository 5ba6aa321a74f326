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

from prorl.envs.swe.logs import javascript, jvm, python, rust


class Found(NamedTuple):
    """The names of tests that a log speaks of."""

    passed: frozenset[str]
    failed: frozenset[str]


Parser = Callable[[str], tuple[set[str], set[str]]]


def by_line(pattern: str, *good: str) -> Parser:
    """A harness that tells each test in a line of its own: groups `name` and `status`."""
    line_of = re.compile(pattern, re.MULTILINE)

    def parse(log: str) -> tuple[set[str], set[str]]:
        passed: set[str] = set()
        failed: set[str] = set()
        for found in line_of.finditer(log):
            (passed if found["status"] in good else failed).add(found["name"])
        return passed, failed

    return parse


_TAP = re.compile(r"^\s*(not ok|ok) \d+ -? ?(.*?)(?: # (time=|SKIP|TODO).*)?$", re.MULTILINE)


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


PARSERS: Mapping[str, Parser] = {
    "python": python.verdicts,
    "sympy": by_line(r"^(?P<name>test_\w+) (?P<status>ok|F|E|f|s|w)\b", "ok"),
    "go": by_line(r"^\s*--- (?P<status>PASS|FAIL|SKIP): (?P<name>\S+)", "PASS"),
    "cargo": rust.verdicts,
    "jest": javascript.verdicts,
    "maven": jvm.surefire,
    "gradle": by_line(r"^(?P<name>\S.* > .*?) (?P<status>PASSED|FAILED|SKIPPED)$", "PASSED"),
    "ctest": by_line(
        r"^\s*\d+/\d+ +Test +#\d+: (?P<name>\S+) \.+ *(?P<status>Passed|\*\*\*\w+)", "Passed"
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


def read_log(log: str, parser: str) -> Found:
    """What a log says, by a parser of PARSERS."""
    passed, failed = PARSERS[parser](log)
    return Found(frozenset(passed), frozenset(failed))
