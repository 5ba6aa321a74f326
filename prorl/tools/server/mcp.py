"""Servers of the Model Context Protocol (stdio).

Each runs beside the agent, with its rights, and is started when one of its tools is first called.

    <- [1, {"server": NAME, "command": [...], "env": {...}, "tool": T, "arguments": {...}}]\\n

The same line protocol, interrupt and restart as `python.py`; the client, which waits for servers,
is the child. Without `tool` it prints the server's tools as JSON. What a server writes to standard
error is kept from the policy. A server that ends is started again by the next call.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from typing import Any

from prorl.tools.server.python import Cell, Python, become_child, serve_cells

VERSION = "2025-06-18"
"""Of the protocol; a server answers with the one that it speaks."""
MAX_LINE_BYTES = 16 << 20


class Mcp(Python):
    """Calls tools of MCP servers; the servers keep their state between calls."""

    noun = "MCP client"

    def run(self, arguments: dict[str, Any], until: float) -> dict[str, Any]:
        """Call a tool of a server, or list its tools."""
        command = arguments.get("command")
        if not isinstance(command, list) or not command:
            raise ValueError("mcp needs `command` (a list of texts)")
        return self._cell(arguments, until)

    def _become(self, control: socket.socket, output: int) -> None:
        servers: dict[str, Server] = {}
        channel = become_child(control, output, self._env, self._cwd)
        try:
            serve_cells(channel, lambda asked: _call(servers, asked))
        except KeyboardInterrupt:
            pass
        os._exit(0)


class McpError(Exception):
    """A server that does not answer as it should."""


class Server:
    """One server's process and its pipes."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        import subprocess  # in the child, at its first call

        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **env},
        )
        self._number = 0
        client = {"name": "prorl", "version": "1"}
        self.ask(
            "initialize", {"protocolVersion": VERSION, "capabilities": {}, "clientInfo": client}
        )
        self._send({"method": "notifications/initialized"})

    def ask(self, method: str, params: dict[str, Any]) -> Any:
        """The result of a request. Raises McpError."""
        self._number += 1
        self._send({"id": self._number, "method": method, "params": params})
        while True:
            answer = self._hear()
            if "method" in answer and "id" in answer:  # it asks us: we offer nothing
                error = {"code": -32601, "message": "not offered"}
                self._send({"id": answer["id"], "error": error})
            elif answer.get("id") == self._number:
                if "error" in answer:
                    raise McpError(str(answer["error"].get("message", answer["error"])))
                return answer.get("result") or {}

    def tools(self) -> list[Any]:
        """All of its tools, as it describes them."""
        found: list[Any] = []
        page: dict[str, Any] = {}
        for _ in range(100):
            result = self.ask("tools/list", page)
            found += result.get("tools", [])
            if not result.get("nextCursor"):
                break
            page = {"cursor": result["nextCursor"]}
        return found

    def stop(self) -> None:
        self._process.kill()
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            line = json.dumps({"jsonrpc": "2.0", **message}) + "\n"
            self._process.stdin.write(line.encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise McpError("the server has ended") from None

    def _hear(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline(MAX_LINE_BYTES)
        if not line:
            raise McpError(f"the server ended with exit status {self._process.wait()}")
        try:
            answer = json.loads(line.decode("utf-8", "replace"))
        except ValueError:
            raise McpError(f"the server said {line[:200]!r}, which is no JSON") from None
        if not isinstance(answer, dict):
            raise McpError(f"the server said {line[:200]!r}")
        return answer


def _call(servers: dict[str, Server], asked: dict[str, Any]) -> int:
    name = str(asked.get("server", ""))
    with Cell("<none>") as cell:
        try:
            if name not in servers:
                servers[name] = Server(asked["command"], asked.get("env") or {})
            cell.exit_code = _ask(servers[name], asked)
        except (McpError, OSError) as error:
            if name in servers:
                servers.pop(name).stop()
            print(f"{name}: {error}")
            cell.exit_code = 1
        except KeyboardInterrupt:  # an answer that comes later must not be taken for the next one
            if name in servers:
                servers.pop(name).stop()
            raise
    return cell.exit_code


def _ask(server: Server, asked: dict[str, Any]) -> int:
    """Print the server's tools, or what one of them gave; 1 where it says that it failed."""
    if not asked.get("tool"):
        print(json.dumps(server.tools()))
        return 0
    given = {"name": asked["tool"], "arguments": asked.get("arguments") or {}}
    result = server.ask("tools/call", given)
    sys.stdout.write(_text(result))
    return int(bool(result.get("isError")))


def _text(result: dict[str, Any]) -> str:
    """What a tool gave: its texts; of other content what it is."""
    blocks = result.get("content") or []
    texts = [
        block["text"] if block.get("type") == "text" else f"[{block.get('type')}]"
        for block in blocks
        if isinstance(block, dict)
    ]
    if not texts and result.get("structuredContent") is not None:
        return json.dumps(result["structuredContent"])
    return "\n".join(map(str, texts))
