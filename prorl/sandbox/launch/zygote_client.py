"""sandboxd's end of the zygote: starts it, passes descriptors, hears of launchers' ends.

Restarted by its owner when it dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import Callable
from typing import Any, NamedTuple

from prorl.linux.python_path import python_path
from prorl.sandbox.launch.packets import PacketChild
from prorl.sandbox.launch.spec import Launch

TOOL_SERVER = "prorl.tools.server.main"
"""Loaded by name: the tool server is not a part of this package, and inside an image it is a
zipapp.
"""
MAX_STATUS_BYTES = 4096


class Exit(NamedTuple):
    """A launcher's end: a wait status, and the CPU seconds of everything that it reaped."""

    status: int
    cpu_s: float


class ZygoteClient:
    """One zygote process, for the kind whose record is at `place` (`module:attribute`).

    `on_started(id, pid)`, `on_exit(id, Exit)` and `on_lost()` are called in the loop.
    """

    def __init__(
        self,
        place: str,
        on_started: Callable[[str, int], None],
        on_exit: Callable[[str, Exit], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._place = place
        self._on_started, self._on_exit, self._on_lost = on_started, on_exit, on_lost
        self._child: PacketChild | None = None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    def start(self) -> None:
        """Spawn it. Call from the main thread."""
        self._child = PacketChild(
            "prorl.sandbox.launch.zygote",
            (TOOL_SERVER, self._place),
            self._environment(),
            self._receive,
            self._on_lost,
        )

    def _environment(self) -> dict[str, str]:
        """A minimal one: what the zygote has, /proc/1/environ shows inside every sandbox."""
        env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        return env | python_path()  # where prorl and a user's kind may be

    def launch(self, launch: Launch, listener: socket.socket, status_fd: int) -> None:
        """Fork a launcher with these two descriptors, of which the caller closes its own."""
        assert self._child is not None
        self._child.send(launch.to_json(), (listener.fileno(), status_fd))

    def kill(self, sandbox_id: str, number: int) -> None:
        assert self._child is not None
        self._child.send(json.dumps({"kill": sandbox_id, "signal": number}).encode())

    def _receive(self, message: dict[str, Any]) -> None:
        if "started" in message:
            self._on_started(message["started"], message["pid"])
        else:
            self._on_exit(message["exited"], Exit(message["status"], message["cpu_s"]))

    def close(self) -> None:
        if self._child is not None:
            self._child.close()


async def read_status(fd: int, timeout_s: float) -> str:
    """`ok`, or all that was said until the pipe was closed or the time over.

    `fd` is the status pipe, which does not block and stays the caller's: what a launcher, and then
    the tool server that it starts, say: `ok` and a newline, or `error: ...` and the end. A foreign
    launcher's complaints come in pieces, and its `error:` is its own.
    """
    loop, readable, text = asyncio.get_running_loop(), asyncio.Event(), b""
    loop.add_reader(fd, readable.set)  # a stream and its transport would cost more than the read
    try:
        async with asyncio.timeout(timeout_s):
            while not text.endswith(b"ok\n") and len(text) < MAX_STATUS_BYTES:
                await readable.wait()
                readable.clear()
                try:
                    part = os.read(fd, MAX_STATUS_BYTES)
                except BlockingIOError:
                    continue
                if not part:
                    break
                text += part
    except TimeoutError:
        text = text or f"not ready after {timeout_s:g} s".encode()
    finally:
        loop.remove_reader(fd)
    if text.endswith(b"ok\n"):
        return "ok"
    return text.decode("utf-8", "replace").removeprefix("error: ").strip()
