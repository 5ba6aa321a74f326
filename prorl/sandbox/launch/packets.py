"""sandboxd's end of a child that it passes descriptors to: the zygote, the network's proxy.

A message is one JSON object in one packet of at most MESSAGE_BYTES, with descriptors beside it.
What the child has no room for waits here in order; at most a few packets a sandbox.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from prorl.sandbox.launch.spec import MESSAGE_BYTES


class PacketChild:
    """A Python module as a child process, `python -m MODULE CONTROL_FD PARENT_PID ARGUMENT...`.

    `on_message(object)` and `on_lost()` are called in the loop. Make it in the main thread:
    PDEATHSIG follows the thread that forks.
    """

    def __init__(
        self,
        module: str,
        arguments: Sequence[str],
        env: Mapping[str, str],
        on_message: Callable[[Any], None],
        on_lost: Callable[[], None],
    ) -> None:
        self._on_message, self._on_lost = on_message, on_lost
        self._unsent: deque[tuple[bytes, list[int]]] = deque()
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        with theirs:
            self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", module),
                    *(str(theirs.fileno()), str(os.getpid()), *arguments),
                ],
                env=env,
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
            )
        asyncio.get_running_loop().add_reader(self._control, self._receive)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def send(self, data: bytes, fds: Sequence[int] = ()) -> None:
        """Send a packet. The descriptors are duplicated, so the caller closes its own."""
        copies: list[int] = []
        try:
            for fd in fds:
                copies.append(os.dup(fd))
        except OSError:
            for fd in copies:
                os.close(fd)
            raise
        self._unsent.append((data, copies))
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
        while self._process is not None:
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
            self._on_message(json.loads(data))

    def close(self) -> None:
        """Kill the child and wait for its end. Idempotent."""
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
