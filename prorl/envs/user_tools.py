"""Tools that a task names, as the policy sees them.

Ours are known by their row, users' by specs read from the classes that packages register
(`prorl/tools` is the whole story).

Importing a tool's module is all that happens on the host; it is made and called inside sandboxes
only. A tool that is unknown, cannot be imported or has no usable schema is a TaskError where a task
asks for it, which is before the task is accepted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache

from prorl import plugins
from prorl.envs.tools import ARGUMENT_TYPES, served
from prorl.errors import TaskError
from prorl.plugins import TOOLS
from prorl.tools.catalogue import CATALOGUE
from prorl.types import Json, Task, ToolSpec

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")


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
    return tuple(served(name) if name in CATALOGUE else user_spec(name) for name in names)


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
    """What a tool's class says of itself. Raises TaskError for one that lacks something."""
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
    """Why this is no schema that a call can be checked against; empty when it is.

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
    known = ", ".join(sorted(ARGUMENT_TYPES))
    return f"property {name!r} has type {kind!r}, which is none of {known}"


def _short(value: Json) -> str:
    return repr(value)[:100]
