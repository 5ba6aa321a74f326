"""cargo's log: `test NAME ... ok`; with `--nocapture` what a test prints stands before its verdict."""

from __future__ import annotations

import re

_LINE = re.compile(r"^test (\S.*?) \.\.\. ?(?:(ok|FAILED|ignored)\b.*)?(.*)$")
_VERDICT = re.compile(r"^(ok|FAILED)$")
_LISTED = re.compile(r"^    (\S.*)$")


def verdicts(log: str) -> tuple[set[str], set[str]]:
    """Names of tests that passed and of those that failed, of doc-tests with their line.

    The list of failures counts most: a test may print its own verdict.

    >>> found = verdicts("test a ... ok\\ntest b ... said\\nFAILED\\n\\nfailures:\\n    c\\n")
    >>> found == ({"a"}, {"b", "c"})
    True
    """
    passed: set[str] = set()
    failed: set[str] = set()
    waiting, is_list = "", False
    for line in log.splitlines():
        if line == "failures:":
            is_list = True
        elif is_list and (listed := _LISTED.match(line)):
            failed.add(listed[1])
        elif line.startswith(("test result:", "running ")):
            is_list, waiting = False, ""
        elif found := _LINE.match(line):
            waiting = "" if found[2] else found[1]
            if found[2]:
                (passed if found[2] == "ok" else failed).add(found[1])
        elif waiting and (said := _VERDICT.match(line)):
            (passed if said[1] == "ok" else failed).add(waiting)
            waiting = ""
    return passed, failed
