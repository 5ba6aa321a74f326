"""MCP servers as tools: they run inside the sandbox and are seen by their own schemas."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from importlib.util import find_spec

import pytest
import pytest_asyncio

from prorl.envs import get_env
from prorl.envs.tools import BAD_CALL
from prorl.errors import TaskError
from prorl.protocols import Sandbox
from prorl.sandbox import open as open_sandbox
from prorl.testing import make_task
from prorl.types import Json, Stage, ToolCall

SERVER = """
import json, os, sys, time
count = 0
for line in sys.stdin:
    asked = json.loads(line)
    if "id" not in asked or "method" not in asked:
        continue
    method, params = asked["method"], asked.get("params", {})
    name, given = params.get("name"), params.get("arguments", {})
    answer = {"result": {}}
    if method == "initialize":
        print("this is a log, on standard error", file=sys.stderr)
        answer["result"] = {"protocolVersion": params["protocolVersion"], "capabilities": {}}
    elif method == "tools/list":
        page = params.get("cursor")
        tool = {"name": "more" if page else "count", "inputSchema": {"type": "object"}}
        answer["result"] = {"tools": [tool], **({} if page else {"nextCursor": "2"})}
    elif name == "count":
        print(json.dumps({"jsonrpc": "2.0", "method": "notifications/progress"}), flush=True)
        print(json.dumps({"id": "x", "method": "sampling/createMessage"}), flush=True)
        count += given.get("by", 1)
        answer["result"] = {"content": [{"type": "text", "text": str(count)}, {"type": "image"}]}
    elif name == "user":
        answer["result"] = {"structuredContent": [os.environ["USER"], os.environ.get("CITY")]}
    elif name == "fail":
        answer["result"] = {"content": [{"type": "text", "text": "no"}], "isError": True}
    elif name == "hang":
        time.sleep(60)
    elif name == "die":
        sys.exit(3)
    elif name == "babble":
        print("hello", flush=True)
    else:
        answer = {"error": {"code": -32602, "message": "unknown tool " + str(name)}}
    print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], **answer}), flush=True)
"""
BY = {"type": "object", "properties": {"by": {"type": "integer"}}, "required": ["by"]}
NAMES = ("user", "fail", "hang", "die", "babble", "nothing")
TOOLS: list[Json] = [
    {"name": "count", "description": "Counts.", "inputSchema": BY},
    *({"name": name, "inputSchema": {"type": "object"}} for name in NAMES),
]
COMMAND = ["python3", "-c", SERVER]
TASK = make_task(
    "math",
    "Count.",
    answer="3",
    mcp={"box": {"command": COMMAND, "tools": TOOLS, "env": {"CITY": "Oslo"}}},
)
ENV = get_env("math")
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def sandbox(sandbox_kind: str) -> AsyncIterator[Sandbox]:
    async with open_sandbox(sandbox_kind, ENV.sandbox(TASK, Stage.RUN)) as sandbox:
        yield sandbox


async def _call(
    sandbox: Sandbox, tool: str, timeout_s: float = 60.0, **arguments: Json
) -> tuple[str, int]:
    done = await ENV.call(TASK, sandbox, ToolCall(f"box_{tool}", arguments), timeout_s)
    return done.output, done.exit_code


async def test_the_policy_sees_their_schemas_and_the_sandbox_one_row() -> None:
    ENV.check(TASK)
    specs = {spec.name: spec for spec in ENV.tools(TASK)}
    assert specs["box_count"].parameters == BY
    assert specs["box_count"].description == "Counts."
    spec = ENV.sandbox(TASK, Stage.RUN)
    assert spec is not None
    assert spec.tools == ("python", "mcp")


async def test_a_server_runs_inside_and_keeps_its_state(sandbox: Sandbox) -> None:
    assert await _call(sandbox, "count", by=2) == ("2\n[image]", 0)
    assert await _call(sandbox, "count", by=3) == ("5\n[image]", 0)
    inside = await sandbox.exec(["bash", "-c", "echo $USER"], 20.0)
    output, code = await _call(sandbox, "user")
    assert (json.loads(output), code) == ([inside.output.strip() or "user", "Oslo"], 0)


async def test_what_goes_wrong_is_told_to_the_policy(sandbox: Sandbox) -> None:
    assert await _call(sandbox, "count", by="two") == (
        "box_count: by is str, not integer",
        BAD_CALL,
    )
    assert await _call(sandbox, "fail") == ("no", 1)
    assert await _call(sandbox, "nothing") == ("box: unknown tool nothing\n", 1)
    assert await _call(sandbox, "die") == ("box: the server ended with exit status 3\n", 1)
    assert (await _call(sandbox, "count", by=1))[0].startswith("1\n")
    output, code = await _call(sandbox, "babble")
    assert "which is no JSON" in output
    assert code == 1
    assert (await _call(sandbox, "hang", timeout_s=2.0))[1] == 124
    assert (await _call(sandbox, "count", by=7))[0].startswith("7\n")


async def test_a_command_prints_what_a_server_offers() -> None:
    argv = [sys.executable, "-m", "prorl.envs.mcp", *COMMAND]
    done = subprocess.run(argv, check=True, capture_output=True, timeout=120)
    assert [tool["name"] for tool in json.loads(done.stdout)] == ["count", "more"]


OFFICIAL = """
try:
    from mcp.server.mcpserver import MCPServer as Server
except ImportError:
    from mcp.server.fastmcp import FastMCP as Server
server = Server("sums")
@server.tool()
def add(a: int, b: int = 1) -> int:
    "Adds."
    return a + b
server.run()
"""


async def test_a_server_of_the_official_package(sandbox_kind: str) -> None:
    if find_spec("mcp") is None:
        pytest.skip("the package `mcp` is not installed")
    command = [sys.executable, "-c", OFFICIAL]
    argv = [sys.executable, "-m", "prorl.envs.mcp", *command]
    done = subprocess.run(argv, check=True, capture_output=True, timeout=120)
    tools = json.loads(done.stdout)
    data: Json = {"sums": {"command": command, "tools": tools}}
    task = make_task("math", "Add.", answer="3", mcp=data)
    async with open_sandbox("local", ENV.sandbox(task, Stage.RUN)) as sandbox:
        call = ToolCall("sums_add", {"a": 2})
        assert (await ENV.call(task, sandbox, call, 60.0)).output == "3"


@pytest.mark.parametrize(
    ("mcp", "says"),
    [
        ([], "data.mcp is"),
        ({"box": {"command": "python"}}, "a list of texts"),
        ({"box": {"command": ["x"]}}, "python -m prorl.envs.mcp"),
        ({"box": {"command": ["x"], "tools": [{}]}}, "name and inputSchema"),
        ({"b x": {"command": ["x"], "tools": [{"name": "a"}]}}, "letters, digits"),
        (
            {"box": {"command": ["x"], "tools": [{"name": "a", "inputSchema": {"type": "no"}}]}},
            "JSON schema",
        ),
    ],
)
async def test_bad_servers_are_refused(mcp: Json, says: str) -> None:
    with pytest.raises(TaskError, match=says):
        ENV.check(make_task("math", "x", answer="3", mcp=mcp))
