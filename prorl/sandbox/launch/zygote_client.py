"""sandboxd's end of the zygote: starts it, passes descriptors, hears of launchers' ends.

Restarted by its owner when it dies.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from prorl.linux.python_path import python_path
from prorl.sandbox.launch.spec import MESSAGE_BYTES, Launch

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
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        """Spawn it. Call from the main thread: PDEATHSIG follows the thread that forks."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        arguments = (str(theirs.fileno()), str(os.getpid()), TOOL_SERVER, self._place)
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "prorl.sandbox.launch.zygote", *arguments],
            env=self._environment(),
            pass_fds=(theirs.fileno(),),
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._control = ours
        asyncio.get_running_loop().add_reader(ours, self._receive)

    def _environment(self) -> dict[str, str]:
        """A minimal one: what the zygote has, /proc/1/environ shows inside every sandbox."""
        env = {"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
        return env | python_path()  # where prorl and a user's kind may be

    def launch(self, launch: Launch, listener: socket.socket, status_fd: int) -> None:
        """Fork a launcher with these two descriptors.

        They are duplicated, so the caller closes its own.
        """
        fds = [os.dup(listener.fileno())]
        try:
            fds.append(os.dup(status_fd))
        except OSError:
            os.close(fds[0])
            raise
        self._send(launch.to_json(), fds)

    def kill(self, sandbox_id: str, number: int) -> None:
        self._send(json.dumps({"kill": sandbox_id, "signal": number}).encode(), [])

    def _send(self, data: bytes, fds: list[int]) -> None:
        self._unsent.append((data, fds))
        if len(self._unsent) == 1:
            self._flush()

    def _flush(self) -> None:
        loop = asyncio.get_running_loop()
        while self._unsent:
            data, fds = self._unsent[0]
            try:
                socket.send_fds(self._control, [data], fds)
            except BlockingIOError:
                loop.add_writer(self._control, self._flush)
                return
            except OSError:
                pass  # it has died; the reader says so
            for fd in fds:
                os.close(fd)
            self._unsent.popleft()
        loop.remove_writer(self._control)

    def _receive(self) -> None:
        while True:
            try:
                data = self._control.recv(MESSAGE_BYTES)
            except BlockingIOError:
                return
            except ConnectionError:
                data = b""
            if not data:
                self.close()
                self._on_lost()
                return
            message = json.loads(data)
            if "started" in message:
                self._on_started(message["started"], message["pid"])
            else:
                self._on_exit(message["exited"], Exit(message["status"], message["cpu_s"]))

    def close(self) -> None:
        if self._process is None:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._control)
        loop.remove_writer(self._control)
        self._control.close()
        while self._unsent:
            for fd in self._unsent.popleft()[1]:
                os.close(fd)
        self._process.kill()
        self._process.wait()
        self._process = None


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
