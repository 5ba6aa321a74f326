"""Tools of MCP servers that a task names.

The servers run inside the sandbox (`prorl/tools/server/mcp.py`); the policy sees each tool by its
own schema.

| `task.data.mcp`: server's name -> | |
|---|---|
| command | list of texts; what it names must be in the sandbox: an image, `requirements` |
| tools | as the server lists them: {name, description, inputSchema} |
| env | variables of the server |

`python -m prorl.envs.mcp COMMAND ...` starts a server on this machine and prints its `tools`. The
policy calls a tool as SERVER_TOOL.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping

from prorl.envs.user_tools import NAME, schema_problem
from prorl.errors import TaskError
from prorl.tools.server.mcp import Server
from prorl.types import Json, Task, ToolCall, ToolSpec

ROW = "mcp"
"""The tool of the catalogue that serves them all."""


def mcp_tools(task: Task) -> tuple[ToolSpec, ...]:
    """Specs of the tools that `task.data.mcp` names. Raises TaskError."""
    return tuple(spec for spec, _, _ in _offered(task))


def inside(task: Task, call: ToolCall) -> ToolCall:
    """What the sandbox is asked for a call that has been checked; others as they are."""
    for spec, server, tool in _offered(task):
        if spec.name == call.name:
            about = task.data["mcp"][server]
            arguments = {
                "server": server,
                "command": about["command"],
                "env": about.get("env", {}),
                "tool": tool,
                "arguments": call.arguments,
            }
            return call._replace(name=ROW, arguments=arguments)
    return call


def _offered(task: Task) -> Iterator[tuple[ToolSpec, str, str]]:
    """(as the policy sees it, its server, its own name)."""
    servers: Json = task.data.get("mcp", {})
    if not isinstance(servers, Mapping):
        raise _error(task, "", servers, "an object: a server's name -> {command, tools}")
    for server, about in servers.items():
        if not isinstance(about, Mapping) or not _are_texts(about.get("command")):
            raise _error(task, server, about, "an object with `command`, a list of texts")
        if not isinstance(about.get("env", {}), Mapping):
            raise _error(task, f"{server}.env", about["env"], "names of variables with texts")
        tools: Json = about.get("tools")
        if not isinstance(tools, list) or not tools:
            hint = "as `python -m prorl.envs.mcp COMMAND ...` prints them"
            raise _error(task, f"{server}.tools", tools, f"a list of tools, {hint}")
        for tool in tools:
            yield _spec(task, server, tool), server, tool["name"]


def _spec(task: Task, server: str, tool: Json) -> ToolSpec:
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise _error(task, f"{server}.tools", tool, "an object with name and inputSchema")
    name = f"{server}_{tool['name']}"
    if not NAME.fullmatch(name):
        raise _error(task, f"{server}.tools", name, "letters, digits, `_` and `-`, at most 64")
    schema: Json = tool.get("inputSchema", {"type": "object"})
    if problem := schema_problem(schema):
        raise _error(task, f"{server}.tools: {name}", problem, "a JSON schema of an object")
    return ToolSpec(name, str(tool.get("description") or name), schema)


def _are_texts(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, str) for one in value)


def _error(task: Task, place: str, found: Json, expected: str) -> TaskError:
    where = f"data.mcp.{place}" if place else "data.mcp"
    return TaskError(f"task {task.task_id!r}: {where} is {found!r}"[:300], expected)


def main() -> int:
    """Print what a server offers."""
    if len(sys.argv) < 2:
        print("python -m prorl.envs.mcp COMMAND ...", file=sys.stderr)
        return 2
    server = Server(sys.argv[1:], {})
    try:
        print(json.dumps(server.tools(), indent=2))
    finally:
        server.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
