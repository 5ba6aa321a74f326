"""Maven's log: surefire tells a line for each class, and one for each test that failed."""

from __future__ import annotations

import re

_CLASS = re.compile(
    r"Tests run: (\d+), Failures: (\d+), Errors: (\d+), Skipped: (\d+).*? -+ in (\S+)"
)
_TEST = re.compile(r"^\[ERROR\]\s+([\w.$]+)\.(\w+)(?:\(.*?\))?[:\s]", re.MULTILINE)


def surefire(log: str) -> tuple[set[str], set[str]]:
    """Classes, and `Class.test` of the ones that failed.

    >>> surefire("[INFO] Tests run: 2, Failures: 0, Errors: 0, Skipped: 0, Time elapsed: 0.1 s -- in a.BTest")
    ({'a.BTest'}, set())
    """
    passed: set[str] = set()
    failed = {f"{place}.{test}" for place, test in _TEST.findall(log)}
    for run, failures, errors, skipped, name in _CLASS.findall(log):
        good = int(failures) + int(errors) == 0 and int(run) > int(skipped)
        (passed if good else failed).add(name)
    return passed, failed
