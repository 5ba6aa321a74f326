"""A user's tool: an object made in a process of its own.

It comes from a zip that the server was given as a descriptor.

    <- [1, {"city": "Oslo"}]\\n     -> \\n1 exit code\\n

The same line protocol, interrupt and restart as `python.py`. The object is made when the process
starts, which says 0 or 1 once; a tool that cannot be made raises BadTool before the server serves,
so that it fails the sandbox's start and never a call of the agent.
"""

from __future__ import annotations

import fcntl
import importlib
import json
import os
import socket
import sys
import time
import zipimport
from typing import Any

from prorl.tools.server import BadTool
from prorl.tools.server.output import Capped, result_of
from prorl.tools.server.place import Place
from prorl.tools.server.python import Cell, Python, send_exit_code, serve_cells

INDEX = "prorl-tools.json"
LOAD_S = 25.0
"""Imports of a big library on a busy machine; sandboxd waits 30 s for a start."""
FIRST_FD = 100
MAX_ERROR_BYTES = 3000
"""The limit of the reason why a tool could not be made: it becomes the task's error."""


def moved_above_others(zip_fd: int) -> int:
    """The zip's descriptor, moved to where no child puts its own into place.

    It is closed to the programs that the agent runs.
    """
    moved = fcntl.fcntl(zip_fd, fcntl.F_DUPFD_CLOEXEC, FIRST_FD)
    os.close(zip_fd)
    return moved


class UserTool(Python):
    """One tool; its object is made again with the next call after its process has died."""

    noun = "tool"

    def __init__(self, place: Place, name: str, zip_fd: int) -> None:
        super().__init__(place)
        self._name, self.keep = name, zip_fd

    def start(self) -> None:
        """Make the object if it is not there.

        Raises BadTool, TimeoutError: a machine may be slow, which is not the tool's fault.
        """
        if self._pid:
            return
        super().start()
        output = Capped(MAX_ERROR_BYTES)
        code = self._wait(output, time.monotonic() + LOAD_S)
        if code != 0:
            self.stop()
            problem = f"tool {self._name!r} does not start inside the sandbox: "
            if code is None:
                raise TimeoutError(f"{problem}it was not made in {LOAD_S:g} s")
            raise BadTool(
                problem + (output.value().decode("utf-8", "replace").strip() or "its process ended")
            )

    def run(self, arguments: dict[str, Any], until: float) -> dict[str, Any]:
        """Call the object with the arguments by name."""
        try:
            return self._cell(arguments, until)
        except BadTool as error:
            output = Capped()
            output.feed(str(error).encode("utf-8", "replace"))
            return result_of(output, 1)

    def _serve(self, control: socket.socket) -> None:
        """Make the object, tell whether that worked, then answer calls."""
        path = f"/proc/self/fd/{self.keep}"
        sys.path[:] = [
            path,
            *sys.path,
            *(package for package in self._packages if package not in sys.path),
        ]
        with Cell(path) as cell:
            tool = _make(path, self._name)
        send_exit_code(control, 0, cell.exit_code)
        if cell.exit_code == 0:
            serve_cells(control, lambda arguments: _call(tool, arguments, path))
        os._exit(cell.exit_code)


def _make(path: str, name: str) -> Any:
    module, attribute = json.loads(zipimport.zipimporter(path).get_data(INDEX))[name]
    target: Any = importlib.import_module(module)
    for part in attribute.split("."):
        target = getattr(target, part)
    return target()


def _call(tool: Any, arguments: dict[str, Any], where: str) -> int:
    with Cell(where) as call:
        value = tool(**arguments)
        if value is not None:
            sys.stdout.write(value if isinstance(value, str) else json.dumps(value))
    return call.exit_code
