"""Logs of jest, vitest and mocha: a tree of suites by indentation, a mark before each test."""

from __future__ import annotations

import re

_MARK = re.compile(
    r"^(\s*)(✓|✔|√|✕|×|✖|○|\d+\)) (?:skipped )?(.+?)(?: \(?\d+(?:\.\d+)? ?m?s\)?)?\s*$"
)
_SUITE = re.compile(r"^(\s+|)(\S.*?)\s*$")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_GOOD = {"✓", "✔", "√"}


def verdicts(log: str) -> tuple[set[str], set[str]]:
    """Tests by their own names, and by those of their suites before them, with ` > ` and with a
    space between.

    >>> sorted(verdicts("PASS a.test.js\\n  add\\n    ✓ adds (2 ms)\\n    ✕ carries")[0])
    ['add > adds', 'add adds', 'adds']
    """
    passed: set[str] = set()
    failed: set[str] = set()
    suites: list[tuple[int, str]] = []
    for line in _COLOURS.sub("", log).splitlines():
        test = _MARK.match(line)
        suite = None if test else _SUITE.match(line)
        indent = len((test or suite)[1]) if test or suite else 0  # type: ignore[index]
        if test:  # it ends no suite: a test may print such a line
            names = [name for depth, name in suites if depth < indent] + [test[3]]
            known = {test[3], " > ".join(names), " ".join(names)}
            (passed if test[2] in _GOOD else failed).update(known)
            continue
        while suites and suites[-1][0] >= indent:
            suites.pop()
        if suite and indent:
            suites.append((indent, suite[2]))
    return passed, failed
