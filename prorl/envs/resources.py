"""The sandbox that a task asks for: its image, packages and resources."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from prorl.envs.tools import field_error
from prorl.errors import TaskError
from prorl.types import HOST_WHEELS, Json, SandboxSpec, Task, ToolSpec

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


_OWN = {"image", "tools", "requirements", "wheels"}
"""Fields of SandboxSpec that are fields of `task.data`."""
_RESOURCES = {field.name for field in fields(SandboxSpec)} - _OWN


def spec_of(task: Task, tools: Sequence[ToolSpec]) -> SandboxSpec:
    """A sandbox with the task's image and resources. Raises TaskError."""
    asked = _resources(task)
    spec = SandboxSpec(
        image=task.data.get("image", ""),
        tools=tuple(spec.name for spec in tools),
        requirements=requirements_of(task),
        wheels=wheels_of(task),
    )
    if spec.image and spec.requirements:
        raise field_error(
            task,
            "data.requirements beside data.image",
            "one of them: an image brings its own packages",
        )
    return replace(spec, **asked)


def _resources(task: Task) -> Mapping[str, Json]:
    """Fields of SandboxSpec that `data.sandbox` sets. Raises TaskError."""
    asked: Json = task.data.get("sandbox", {})
    if not isinstance(asked, Mapping):
        raise field_error(task, f"data.sandbox is {asked!r}", "an object")
    if unknown := sorted(set(asked) - _RESOURCES):
        expected = ", ".join(sorted(_RESOURCES))
        raise field_error(task, f"data.sandbox has {', '.join(unknown)}", expected)
    plain = SandboxSpec()
    for name, value in asked.items():
        kind = type(getattr(plain, name))
        fits = isinstance(value, (int, float) if kind is float else kind)
        if not fits or isinstance(value, bool) != (kind is bool) or value < 0:
            expected = f"{kind.__name__}, not negative"
            raise field_error(task, f"data.sandbox.{name} is {value!r}", expected)
    return asked
