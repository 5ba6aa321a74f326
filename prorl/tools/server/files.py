"""The file editor: view, create, str_replace, insert.

Works below any path that the agent may touch.

It runs with the agent's own rights and opens regular files only, without blocking on a FIFO or
device. Errors of the agent are output with exit code 1, so that it can mend them.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import Any

from prorl.tools.server.output import Capped, result_of
from prorl.tools.server.place import Folder

MAX_FILE_BYTES = 8 << 20
"""The limit of a file to be viewed or edited: it is held in memory."""
MAX_LISTED = 500
"""Entries of a folder."""
OPEN = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Mistake(Exception):
    """The agent's mistake; the text is for the agent."""


class Files:
    def __init__(self, folder: Folder) -> None:
        self._cwd = folder.cwd

    def run(self, arguments: dict[str, Any], until: float) -> dict[str, Any]:
        """`{command: view | create | str_replace | insert, path, ...}`."""
        output = Capped()
        exit_code = 1
        try:
            text, exit_code = self._edit(arguments), 0
        except Mistake as mistake:
            text = f"error: {mistake}\n"
        except OSError as error:
            text = "error: {}: {}\n".format(arguments.get("path"), error.strerror)
        output.feed(text.encode("utf-8", "replace"))
        return result_of(output, exit_code)

    def _edit(self, arguments: dict[str, Any]) -> str:
        name = str(arguments.get("command"))
        command = COMMANDS.get(name)
        if command is None:
            raise Mistake(
                "unknown command {!r}; expected one of {}".format(
                    arguments.get("command"), ", ".join(COMMANDS)
                )
            )
        path = arguments.get("path")
        if not isinstance(path, str) or "\0" in path:
            raise Mistake("`path` is missing")
        return command(self, os.path.join(self._cwd, path), arguments)

    def _view(self, path: str, arguments: dict[str, Any]) -> str:
        if os.path.isdir(path):
            names = sorted(os.listdir(path))[:MAX_LISTED]
            return "".join(
                "{}{}\n".format(name, "/" if os.path.isdir(os.path.join(path, name)) else "")
                for name in names
            )
        lines = _read(path).splitlines()
        first, last = _range(arguments.get("view_range"), len(lines))
        return "".join(f"{number:6d}\t{lines[number - 1]}\n" for number in range(first, last + 1))

    def _create(self, path: str, arguments: dict[str, Any]) -> str:
        text = _text(arguments, "file_text")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write(path, text)
        return f"wrote {len(text.encode('utf-8', 'surrogateescape'))} bytes to {path}\n"

    def _replace(self, path: str, arguments: dict[str, Any]) -> str:
        old, new = _text(arguments, "old_str"), _text(arguments, "new_str")
        before = _read(path)
        count = before.count(old) if old else 0
        if count != 1:
            raise Mistake(f"`old_str` occurs {count} times in {path}; it must occur exactly once")
        _write(path, before.replace(old, new, 1))
        line = before[: before.index(old)].count("\n") + 1
        return f"replaced at line {line} of {path}\n"

    def _insert(self, path: str, arguments: dict[str, Any]) -> str:
        text, line = _text(arguments, "new_str"), arguments.get("insert_line")
        before = _read(path)
        lines = before.splitlines(True)
        if not isinstance(line, int) or not 0 <= line <= len(lines):
            raise Mistake(f"`insert_line` must be a number from 0 to {len(lines)}")
        if line and not lines[line - 1].endswith("\n"):
            lines[line - 1] += "\n"
        if text and not text.endswith("\n") and line < len(lines):
            text += "\n"
        _write(path, "".join([*lines[:line], text, *lines[line:]]))
        return f"inserted after line {line} of {path}\n"


COMMANDS: dict[str, Callable[..., str]] = {
    "view": Files._view,
    "create": Files._create,
    "str_replace": Files._replace,
    "insert": Files._insert,
}


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise Mistake(f"`{name}` (a string) is missing")
    return value


def _range(bounds: Any, count: int) -> tuple[int, int]:
    if bounds is None:
        return 1, count
    if not (
        isinstance(bounds, list)
        and len(bounds) == 2
        and all(isinstance(number, int) for number in bounds)
    ):
        raise Mistake("`view_range` must be [first line, last line]; -1 means the end")
    first, last = bounds
    last = count if last == -1 else min(last, count)
    if not 1 <= first <= max(last, 1):
        raise Mistake(f"`view_range` {bounds} is outside the {count} lines")
    return first, last


def _read(path: str) -> str:
    fd = os.open(path, os.O_RDONLY | OPEN)
    with open(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise Mistake(f"{path} is not a regular file")
        if about.st_size > MAX_FILE_BYTES:
            raise Mistake(
                f"{path} has {about.st_size} bytes; the editor opens at most {MAX_FILE_BYTES}"
            )
        return file.read(MAX_FILE_BYTES).decode("utf-8", "surrogateescape")


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | OPEN, 0o644)
    with open(fd, "wb") as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise Mistake(f"{path} is not a regular file")
        file.truncate(0)
        file.write(text.encode("utf-8", "surrogateescape"))
