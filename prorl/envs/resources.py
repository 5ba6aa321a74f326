"""The sandbox that a task asks for: its image, packages and resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

from prorl.envs.mcp import ROW as MCP
from prorl.envs.mcp import mcp_tools
from prorl.envs.requirements import requirements_of, wheels_of
from prorl.envs.tools import field_error
from prorl.types import Json, SandboxSpec, Task, ToolSpec

_OWN = {"image", "tools", "requirements", "wheels"}
"""Fields of SandboxSpec that are fields of `task.data`."""
_RESOURCES = {field.name for field in fields(SandboxSpec)} - _OWN


def _served_by(task: Task, tools: Sequence[ToolSpec]) -> tuple[str, ...]:
    """Names of what the sandbox's tool server serves: MCP servers' tools by one row."""
    theirs = {spec.name for spec in mcp_tools(task)}
    return tuple(dict.fromkeys(MCP if spec.name in theirs else spec.name for spec in tools))


def spec_of(task: Task, tools: Sequence[ToolSpec]) -> SandboxSpec:
    """A sandbox with the task's image and resources. Raises TaskError."""
    asked = _resources(task)
    spec = SandboxSpec(
        image=task.data.get("image", ""),
        tools=_served_by(task, tools),
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
