"""What tasks say of the Python packages that they need, as their sandboxes are asked for them."""

from __future__ import annotations

import re

from prorl.errors import TaskError
from prorl.types import HOST_WHEELS, Json, Task

_COMMENT = re.compile(r"(?:^|\s)#.*$")


def requirements_of(task: Task) -> tuple[str, ...]:
    """The Python packages that `data.requirements` names. Raises TaskError.

    It is a list of requirements, or the text of a requirements.txt without options.
    """
    given: Json = task.data.get("requirements") or []
    lines = given.splitlines() if isinstance(given, str) else given
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise TaskError(
            f"task {task.task_id!r}: data.requirements is {given!r}"[:300],
            "a list of requirements, or the text of a requirements.txt",
        )
    found = [line for raw in lines if (line := _COMMENT.sub("", raw).strip())]
    if options := [line for line in found if line.startswith("-") or "\\" in line]:
        raise TaskError(
            f"task {task.task_id!r}: data.requirements has {options[0]!r}",
            "names of packages with their versions, no options",
            "say where wheels are in data.wheels",
        )
    return tuple(found)


def wheels_of(task: Task) -> str:
    """`data.wheels`: a folder of the node, an index's URL, or `host`. Raises TaskError."""
    wheels: Json = task.data.get("wheels") or ""
    known = isinstance(wheels, str) and (wheels[:1] in ("", "/") or "://" in wheels)
    if not known and wheels != HOST_WHEELS:
        raise TaskError(
            f"task {task.task_id!r}: data.wheels is {wheels!r}"[:300],
            f"the absolute path of a folder of wheels, an index's URL, or {HOST_WHEELS!r}",
        )
    return str(wheels)
