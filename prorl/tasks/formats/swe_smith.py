"""SWE-smith (Yang et al. 2025, github.com/SWE-bench/SWE-smith): faults put into repositories.

`patch` is the diff that puts the fault in; the repository without it lies in /testbed of the
producer's image, `image_name`. So the workspace is /testbed with the fault, the reference is the
reverse of `patch`, and the tests are the repository's own: those that FAIL_TO_PASS and
PASS_TO_PASS name, which a change cannot replace.
"""

from __future__ import annotations

import re
import shlex

from prorl.tasks.formats import Format, Row, text
from prorl.tasks.formats.swebench import PYTEST, in_image, names_of
from prorl.types import Task

_END = "PRORL_END_OF_PATCH"
_OTHER_SIGN = {"+": "-", "-": "+"}
_HUNK = re.compile(r"^@@ -(\S+) \+(\S+) @@(.*)$", re.DOTALL)


def reverse(patch: str) -> str:
    """The unified diff that undoes one.

    >>> print(reverse("--- a/x\\n+++ b/x\\n@@ -1,2 +1 @@ f\\n-a\\n-b\\n+c\\n"), end="")
    --- a/x
    +++ b/x
    @@ -1 +1,2 @@ f
    +a
    +b
    -c
    """
    lines: list[str] = []
    is_head = True
    for line in patch.splitlines(keepends=True):
        hunk = _HUNK.match(line)
        is_head = not hunk and (is_head or line.startswith("diff --git "))
        lines.append(_head(line) if is_head else _body(line))
        if is_head and lines[-1].startswith("--- ") and lines[:-1] and lines[-2].startswith("+++ "):
            lines[-2], lines[-1] = lines[-1], lines[-2]
    return "".join(lines)


def _body(line: str) -> str:
    """A line of a hunk, with what goes and what comes exchanged."""
    if hunk := _HUNK.match(line):
        return f"@@ -{hunk[2]} +{hunk[1]} @@{hunk[3]}"
    return _OTHER_SIGN.get(line[0], line[0]) + line[1:]


def _head(line: str) -> str:
    """A line before a file's hunks, with what was and what will be exchanged."""
    for one, other in (("new file mode ", "deleted file mode "), ("old mode ", "new mode ")):
        for was, is_now in ((one, other), (other, one)):
            if line.startswith(was):
                return is_now + line.removeprefix(was)
    if line.startswith("--- "):
        return "+++ " + line[4:].replace("a/", "b/", 1)
    if line.startswith("+++ "):
        return "--- " + line[4:].replace("b/", "a/", 1)
    return line


def read(row: Row, index: int) -> Task:
    """instance_id, problem_statement, patch, FAIL_TO_PASS, PASS_TO_PASS, image_name."""
    kept = ("repo", "base_commit", "FAIL_TO_PASS", "PASS_TO_PASS")
    data = {key: row[key] for key in kept if row.get(key)}
    fault = text(row, "patch")
    names = (*names_of(row, "FAIL_TO_PASS"), *names_of(row, "PASS_TO_PASS"))
    files = sorted({name.partition("::")[0] for name in names if "::" in name})
    given = {
        **data,
        "setup": f"git apply --whitespace=nowarn - <<'{_END}'\n{fault.rstrip()}\n{_END}",
        "test_command": f"{PYTEST} {' '.join(map(shlex.quote, files))}",
    }
    return Task(
        task_id=text(row, "instance_id"),
        env="swe",
        prompt=text(row, "problem_statement"),
        data={**data, "patch": reverse(fault), **in_image(row, given, text(row, "image_name"))},
        data_source="swe-smith",
    )


FORMAT = Format(
    "swe-smith",
    ("instance_id", "problem_statement", "patch", "FAIL_TO_PASS", "image_name"),
    read,
    lambda row: not row.get("test_patch"),
)
