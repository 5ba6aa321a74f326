"""The tool server's loop: accept clients, run one call at a time, answer. Started by `serve` with descriptors that exist already.

    {"id", "op": "hello"}                                        -> {"id", "ok": true, "workspace", "tools"}
    {"id", "op": "call", "tool", "arguments", "timeout_s"}       -> {"id", "ok": true, "exit_code", "duration_s", ...} + output
    {"id", "op": "exec", "argv", "timeout_s"} + stdin            -> the same
    {"id", "op": "put", "path", "mode", "offset"} + content      -> {"id", "ok": true}
    {"id", "op": "get", "path", "offset", "max_bytes"}           -> {"id", "ok": true, "size"} + content
    {"id", "op": "pack" | "pack_read" | "unpack", ...}            -> the workspace as a tar (`archive.py`)
    anything wrong                                               -> {"id", "ok": false, "error", "missing"}

The listening socket was made outside, so its file is out of the agent's reach. Calls of several clients are served in turn.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from prorl.tools.server import beneath
from prorl.tools.server.archive import Archive
from prorl.tools.server.bash import Bash, BashDied
from prorl.tools.server.children import MakeRoom, restrict, set_dumpable
from prorl.tools.server.events import ClientGone, Events
from prorl.tools.server.execute import Place, execute
from prorl.tools.server.files import Files
from prorl.tools.server.frames import FRAME_LIMIT, BadFrame, Frame, FrameBuffer, send
from prorl.tools.server.ipython import IPython
from prorl.tools.server.python import Python

OUTPUT_BYTES = 64 << 10
MAX_CLIENTS = 16
PEER = struct.Struct("3i")


class Server:
    """State of the loop: the clients, the tools."""

    def __init__(self, listener: socket.socket, config: dict[str, Any]) -> None:
        self._listener = listener
        self._listener.setblocking(False)
        self._events = Events()
        self._clients: dict[int, tuple[socket.socket, FrameBuffer]] = {}
        self._workspace: str = config["workspace"]
        self._env: dict[str, str] = dict(config["env"])
        self._refuse_uid: int = config.get("refuse_uid", -1)
        self._output_bytes: int = config.get("output_bytes", OUTPUT_BYTES)
        self._archive = Archive(self._workspace)
        self._room = MakeRoom(self._events, config.get("alone", False))
        self._bash = Bash(self._events, self._env, self._workspace, self._output_bytes, self._room)
        self._tools = self._make_tools(config.get("tools", ["bash", "python", "files"]), config)

    def _make_tools(self, names: list[str], config: dict[str, Any]) -> dict[str, Callable[..., dict[str, Any]]]:
        python = Python(self._events, self._env, self._workspace, self._output_bytes, self._room)
        known: dict[str, Callable[..., dict[str, Any]]] = {
            "bash": self._bash.run,
            "python": python.run,
            "files": Files(self._workspace, self._output_bytes).run,
        }
        for kind in ("ipython", "jupyter"):
            if kind in names:
                place = (self._events, self._env, self._workspace, self._output_bytes, self._room)
                known[kind] = IPython(kind, config["python"], config["packages"], *place).run
        return {name: known[name] for name in names if name in known}

    def run(self) -> None:
        """Serve until killed. The shell starts while the first client is still on its way."""
        if "bash" in self._tools:
            try:
                self._bash.start()
            except BashDied:
                pass  # told to whoever calls bash
        while True:
            for fd in self._events.wait([self._listener.fileno(), *self._clients], None, peers=True):
                if fd == self._listener.fileno():
                    self._accept()
                else:
                    self._receive(fd)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:
            return
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER.size)
        _pid, uid, _gid = PEER.unpack(credentials)
        if uid == self._refuse_uid or len(self._clients) >= MAX_CLIENTS:
            connection.close()
            return
        connection.setblocking(True)
        self._clients[connection.fileno()] = (connection, FrameBuffer())

    def _receive(self, fd: int) -> None:
        connection, buffer = self._clients[fd]
        try:
            data = connection.recv(FRAME_LIMIT)
            buffer.feed(data)
            frame = buffer.next()
            while frame is not None:
                self._answer(connection, frame)
                frame = buffer.next()
        except (OSError, BadFrame, ClientGone):
            data = b""
        if not data:
            self._events.client = -1
            del self._clients[fd]
            connection.close()

    def _answer(self, connection: socket.socket, frame: Frame) -> None:
        header, body = frame
        self._events.client = connection.fileno()
        try:
            reply, content = self._perform(header, body)
        except (OSError, ValueError, KeyError, TypeError, EOFError, BashDied) as error:
            missing = isinstance(error, FileNotFoundError)
            reply, content = {"ok": False, "error": f"{type(error).__name__}: {error}", "missing": missing}, b""
        finally:
            self._events.client = -1
        reply["id"] = header.get("id")
        send(connection, reply, content)

    def _perform(self, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
        op = header.get("op")
        if op == "call":
            return self._timed(self._tool(header), header)
        if op == "exec":
            return self._timed(self._program(header, body), header)
        if op == "put":
            beneath.put(self._workspace, header["path"], body, header["mode"], header["offset"])
            return {"ok": True}, b""
        if op == "get":
            limit = min(int(header["max_bytes"]), FRAME_LIMIT // 2)
            size, content = beneath.get(self._workspace, header["path"], header["offset"], limit)
            return {"ok": True, "size": size}, content
        if op == "pack":
            return {"ok": True, "size": self._archive.pack(header["max_bytes"])}, b""
        if op == "pack_read":
            return {"ok": True}, self._archive.read(header["offset"], min(int(header["max_bytes"]), FRAME_LIMIT // 2))
        if op == "unpack":
            self._archive.unpack(body, header["offset"], header["last"])
            return {"ok": True}, b""
        if op == "hello":
            return {"ok": True, "workspace": self._workspace, "tools": sorted(self._tools)}, b""
        raise ValueError(f"unknown op {op!r}")

    def _tool(self, header: dict[str, Any]) -> Callable[[float], dict[str, Any]]:
        name, arguments = header.get("tool"), header.get("arguments")
        if name not in self._tools:
            raise ValueError("no tool {!r} in this sandbox; there are {}".format(name, ", ".join(sorted(self._tools))))
        if not isinstance(arguments, dict):
            raise ValueError("`arguments` must be an object")
        tool = self._tools[name]
        return lambda until: tool(arguments, until)

    def _program(self, header: dict[str, Any], stdin: bytes) -> Callable[[float], dict[str, Any]]:
        argv = header.get("argv")
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            raise ValueError("`argv` must be a list of strings")
        place = Place(self._events, self._room, self._env, self._workspace, self._output_bytes)
        return lambda until: execute(place, argv, stdin, until)

    def _timed(
        self,
        work: Callable[[float], dict[str, Any]],
        header: dict[str, Any],
    ) -> tuple[dict[str, Any], bytes]:
        begin = time.monotonic()
        result = work(begin + float(header["timeout_s"]))
        output = result.pop("output")
        reply = dict(result, ok=True, truncated=output.truncated, duration_s=time.monotonic() - begin)
        return reply, output.value()


def serve(listener_fd: int, status_fd: int, config: dict[str, Any]) -> None:
    """Serve on a listening socket that was inherited; say `ok` on `status_fd` first. Never returns normally."""
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)
    os.chdir(config["workspace"])
    restrict(config.get("limits", {}), bytes.fromhex(config.get("seccomp", "")))
    set_dumpable(0)
    listener = socket.socket(fileno=listener_fd)
    listener.set_inheritable(False)
    server = Server(listener, config)
    os.write(status_fd, b"ok\n")
    os.close(status_fd)
    server.run()


def main() -> None:
    """`python3 server.pyz '{"listener": 3, "status": 4, ...}'`."""
    import json

    config = json.loads(sys.argv[1])
    serve(config.pop("listener"), config.pop("status"), config)


if __name__ == "__main__":
    main()
