"""Helpers that envs share: tools' signatures, the check of a call and of a field, a reference
solution.

A call that does not fit its signature is told to the policy as a result with exit code 2; it never
reaches the sandbox. Tools that a task names are known by their row, users' by specs read from the
classes that packages register (`prorl/tools` is the whole story): importing a tool's module is all
that happens on the host. One that is unknown, cannot be imported or has no usable schema is a
TaskError before the task is accepted.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple

from prorl import plugins
from prorl.errors import GraderError, TaskError
from prorl.plugins import TOOLS
from prorl.protocols import Sandbox
from prorl.states import FailureCode
from prorl.tools.catalogue import CATALOGUE
from prorl.types import Json, Task, ToolCall, ToolResult, ToolSpec

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
BAD_CALL = 2
"""Exit code of a call that was not run."""


def make_spec(
    name: str, description: str, required: Sequence[str], **properties: Mapping[str, Json]
) -> ToolSpec:
    return ToolSpec(
        name, description, {"type": "object", "properties": properties, "required": list(required)}
    )


def served(name: str) -> ToolSpec:
    """The spec of a tool that every sandbox can serve, by its row in `prorl/tools/catalogue.py`."""
    row = CATALOGUE[name]
    return ToolSpec(name, row.description, row.parameters)


BASH, PYTHON, FILES = served("bash"), served("python"), served("files")
IPYTHON, JUPYTER = served("ipython"), served("jupyter")

ARGUMENT_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "array": list,
    "object": dict,
}


class Solution(NamedTuple):
    """A known way through a task; implements `prorl.protocols.Reference`."""

    calls: tuple[ToolCall, ...]
    answer: str
    replies: tuple[str, ...] = ()
    """To what the env says to `answer`, and to each of these, where it has turns of its own."""


async def run_call(
    tools: Sequence[ToolSpec], sandbox: Sandbox | None, call: ToolCall, timeout_s: float
) -> ToolResult:
    """Run a call that fits one of `tools` in the sandbox; others give exit code 2."""
    problem = call_problem(tools, call)
    if not problem and sandbox is None:
        problem = "this task has no sandbox"
    if problem or sandbox is None:
        return ToolResult(output=problem, exit_code=BAD_CALL)
    return await sandbox.call(call.name, call.arguments, timeout_s)


def call_problem(tools: Sequence[ToolSpec], call: ToolCall) -> str:
    """Returns why a call does not fit, in words for the policy; empty when it fits."""
    if call.error:
        return call.error
    spec = next((tool for tool in tools if tool.name == call.name), None)
    if spec is None:
        names = [tool.name for tool in tools]
        near = difflib.get_close_matches(call.name, names, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"there is {', '.join(names) or 'none'}"
        return f"there is no tool {call.name!r}; {hint}"
    return _argument_problem(spec, call.arguments)


def _argument_problem(spec: ToolSpec, arguments: Mapping[str, Json]) -> str:
    properties: Mapping[str, Mapping[str, Json]] = spec.parameters.get("properties", {})
    if missing := [name for name in spec.parameters.get("required", ()) if name not in arguments]:
        return f"{spec.name} lacks {', '.join(missing)}"
    for name, value in arguments.items():
        if name not in properties:
            return f"{spec.name} takes {', '.join(properties) or 'no arguments'}, not {name!r}"
        expected_type = properties[name].get("type", "")
        is_stray_bool = isinstance(value, bool) and expected_type in ("integer", "number")
        if is_stray_bool or not isinstance(value, ARGUMENT_TYPES.get(expected_type, object)):
            return f"{spec.name}: {name} is {type(value).__name__}, not {expected_type}"
        if "enum" in properties[name] and value not in properties[name]["enum"]:
            return (
                f"{spec.name}: {name} is one of {', '.join(map(str, properties[name]['enum']))},"
                f" not {value!r}"
            )
    return ""


def field_error(task: Task, problem: str, expected: str = "", hint: str = "") -> TaskError:
    """The error of a task's field: `problem` says what was given, cut where it is long."""
    return TaskError(f"task {task.task_id!r}: {problem}"[:300], expected, hint)


def cut_short(part: str) -> GraderError:
    """The error of a grader that EVAL's own time ended before the task's limit for `part`."""
    return GraderError(
        FailureCode.GRADER_ERROR, f"too little of EVAL's time was left for the {part}"
    )


def text_field(task: Task, name: str) -> str:
    """Returns a string that the task's data must hold. Raises TaskError."""
    value = task.data.get(name)
    if not isinstance(value, str) or not value.strip():
        actual = (
            f"{type(value).__name__}"
            if name in task.data
            else f"only {', '.join(task.data) or 'nothing'}"
        )
        raise field_error(
            task,
            f"data.{name}: found {actual}",
            "a string",
            f"an env {task.env!r} task needs it",
        )
    return value


# ---- tools that a task names


def task_tools(task: Task) -> tuple[ToolSpec, ...]:
    """Specs of the tools that `task.data["tools"]` names, none if it is not there.

    Raises TaskError.
    """
    names: Json = task.data.get("tools", [])
    if (
        not isinstance(names, list)
        or not all(isinstance(name, str) for name in names)
        or len(set(names)) < len(names)
    ):
        raise TaskError(
            f"task {task.task_id!r}: data.tools is {names!r}",
            "a list of different names of tools",
        )
    return tuple(map(spec_by_name, names))


def spec_by_name(name: str) -> ToolSpec:
    """The spec of a tool of ours or of a registered one. Raises TaskError."""
    return served(name) if name in CATALOGUE else user_spec(name)


@cache
def user_spec(name: str) -> ToolSpec:
    """The spec of a registered tool. Raises TaskError."""
    if name in CATALOGUE or not NAME.fullmatch(name):
        raise TaskError(
            f"tool {name!r}",
            "a name of letters, digits, `_` and `-` that is none of ours",
            "register it under another name",
        )
    users = plugins.registered(TOOLS)
    if name not in users:
        raise plugins.unknown(TOOLS, name, [*CATALOGUE, *users], TaskError)
    return _spec_of_class(name, plugins.load(TOOLS, name, TaskError))


def _spec_of_class(name: str, tool: Json) -> ToolSpec:
    """Returns the spec that a tool's class declares. Raises TaskError for one that lacks
    something.
    """
    if not isinstance(tool, type) or not any("__call__" in vars(base) for base in tool.__mro__):
        raise TaskError(f"tool {name!r} is {_short(tool)}", "a class with a method __call__")
    description: Json = getattr(tool, "description", None)
    parameters: Json = getattr(tool, "parameters", None)
    if not isinstance(description, str) or not description.strip():
        raise TaskError(
            f"tool {name!r}: its description is {description!r}",
            "a text",
            "give its class a `description`",
        )
    if problem := schema_problem(parameters):
        raise TaskError(
            f"tool {name!r}: its parameters: {problem}",
            "a JSON schema of an object",
            "see prorl/tools/__init__.py",
        )
    return ToolSpec(name, description, parameters)


def schema_problem(parameters: Json) -> str:
    """Returns why this is no schema that a call can be checked against; empty when it is.

    >>> schema_problem({"type": "object", "properties": {"city": {"type": "text"}}})[:40]
    "property 'city' has type 'text', which i"
    """
    if not isinstance(parameters, Mapping) or parameters.get("type") != "object":
        return f"{_short(parameters)} is no object schema"
    properties, required = parameters.get("properties", {}), parameters.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list | tuple):
        return "`properties` is no object or `required` no list"
    for name, value in properties.items():
        if problem := _property_problem(name, value):
            return problem
    if missing := [name for name in required if name not in properties]:
        return f"`required` names {missing[0]!r}, which is no property"
    try:
        json.dumps(parameters)
    except (TypeError, ValueError) as error:
        return f"not JSON: {error}"
    return ""


def _property_problem(name: str, value: Json) -> str:
    if not isinstance(value, Mapping):
        return f"property {name!r} is {_short(value)}"
    kind = value.get("type", "object")
    if isinstance(kind, str) and kind in ARGUMENT_TYPES:
        return ""
    types = ", ".join(sorted(ARGUMENT_TYPES))
    return f"property {name!r} has type {kind!r}, which is none of {types}"


def _short(value: Json) -> str:
    return repr(value)[:100]
