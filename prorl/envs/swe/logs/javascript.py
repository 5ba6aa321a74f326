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
    """Names of tests that passed somewhere, and of those that failed somewhere.

    Each is known by its own name, and with its suites before it, joined by ` > ` or by a space.

    >>> sorted(verdicts("PASS a.test.js\\n  add\\n    ✓ adds (2 ms)\\n    ✕ carries")[0])
    ['add > adds', 'add adds', 'adds']
    """
    passed: set[str] = set()
    failed: set[str] = set()
    suites: list[tuple[int, str]] = []
    for line in _COLOURS.sub("", log).splitlines():
        if test := _MARK.match(line):  # it ends no suite: a test may print such a line
            names = [name for depth, name in suites if depth < len(test[1])] + [test[3]]
            known = {test[3], " > ".join(names), " ".join(names)}
            (passed if test[2] in _GOOD else failed).update(known)
            continue
        suite = _SUITE.match(line)
        indent = len(suite[1]) if suite else 0
        while suites and suites[-1][0] >= indent:
            suites.pop()
        if suite and indent:
            suites.append((indent, suite[2]))
    return passed, failed
