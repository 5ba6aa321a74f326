"""The file editor: view, create, str_replace, insert, undo, search.

Works below any path that the agent may touch.

It runs with the agent's own rights and opens regular files only, without blocking on a FIFO or
device. Errors of the agent are output with exit code 1, so that it can mend them.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Callable, Iterator
from typing import Any

from prorl.tools.server.output import Capped, result_of
from prorl.tools.server.place import Folder

MAX_FILE_BYTES = 8 << 20
"""Of a file to be viewed or edited: it is held in memory."""
MAX_UNDO = 20
"""Versions kept in all, newest first to be undone."""
MAX_LISTED = 500
"""Entries of a folder, or lines found by `search`."""
OPEN = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


class Mistake(Exception):
    """The agent's mistake; the text is for the agent."""


class Files:
    """One editor; remembers the versions that it replaced."""

    def __init__(self, folder: Folder) -> None:
        self._cwd, self._cap = folder.cwd, folder.output_bytes
        self._undo: list[tuple[str, str]] = []

    def run(self, arguments: dict[str, Any], until: float) -> dict[str, Any]:
        """`{command: view | create | str_replace | insert | undo | search, path, ...}`."""
        output = Capped(self._cap)
        exit_code = 1
        try:
            text, exit_code = self._edit(arguments, until), 0
        except Mistake as mistake:
            text = f"error: {mistake}\n"
        except OSError as error:
            text = "error: {}: {}\n".format(arguments.get("path"), error.strerror)
        output.feed(text.encode("utf-8", "replace"))
        return result_of(output, exit_code)

    def _edit(self, arguments: dict[str, Any], until: float) -> str:
        """What a command says. Raises Mistake, OSError."""
        name = str(arguments.get("command"))
        command = COMMANDS.get(name)
        if command is None:
            raise Mistake(
                "unknown command {!r}; expected one of {}".format(
                    arguments.get("command"), ", ".join(COMMANDS)
                )
            )
        path = arguments.get("path", "." if name == "search" else None)
        if not isinstance(path, str) or "\0" in path:
            raise Mistake("`path` is missing")
        return command(self, os.path.join(self._cwd, path), arguments, until)

    def _view(self, path: str, arguments: dict[str, Any], until: float) -> str:
        if os.path.isdir(path):
            names = sorted(os.listdir(path))[:MAX_LISTED]
            return "".join(
                "{}{}\n".format(name, "/" if os.path.isdir(os.path.join(path, name)) else "")
                for name in names
            )
        lines = _read(path).splitlines()
        first, last = _range(arguments.get("view_range"), len(lines))
        return "".join(f"{number:6d}\t{lines[number - 1]}\n" for number in range(first, last + 1))

    def _create(self, path: str, arguments: dict[str, Any], until: float) -> str:
        text = _text(arguments, "file_text")
        if os.path.lexists(path):
            self._remember(path, _read(path))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _write(path, text)
        return f"wrote {len(text.encode('utf-8', 'surrogateescape'))} bytes to {path}\n"

    def _replace(self, path: str, arguments: dict[str, Any], until: float) -> str:
        old, new = _text(arguments, "old_str"), str(arguments.get("new_str") or "")
        before = _read(path)
        count = before.count(old) if old else 0
        if count != 1:
            raise Mistake(f"`old_str` occurs {count} times in {path}; it must occur exactly once")
        self._remember(path, before)
        _write(path, before.replace(old, new, 1))
        line = before[: before.index(old)].count("\n") + 1
        return f"replaced at line {line} of {path}\n"

    def _insert(self, path: str, arguments: dict[str, Any], until: float) -> str:
        text, line = _text(arguments, "new_str"), arguments.get("insert_line")
        before = _read(path)
        lines = before.splitlines(True)
        if not isinstance(line, int) or not 0 <= line <= len(lines):
            raise Mistake(f"`insert_line` must be a number from 0 to {len(lines)}")
        if line and not lines[line - 1].endswith("\n"):
            lines[line - 1] += "\n"
        if text and not text.endswith("\n") and line < len(lines):
            text += "\n"
        self._remember(path, before)
        _write(path, "".join([*lines[:line], text, *lines[line:]]))
        return f"inserted after line {line} of {path}\n"

    def _undo_edit(self, path: str, arguments: dict[str, Any], until: float) -> str:
        for index in range(len(self._undo) - 1, -1, -1):
            if self._undo[index][0] == path:
                _write(path, self._undo.pop(index)[1])
                return f"undid the last edit of {path}\n"
        raise Mistake(f"no edit of {path} is remembered")

    def _search(self, path: str, arguments: dict[str, Any], until: float) -> str:
        """Lines that hold a fixed string: no pattern, so no pattern can hang the server."""
        wanted = _text(arguments, "query")
        found: list[str] = []
        for name in _walk(path):
            if time.monotonic() >= until:
                raise Mistake("the search ran out of time")
            try:
                lines = _read(name).splitlines()
            except (OSError, Mistake):
                continue
            found += [
                f"{name}:{number}:{line}" for number, line in enumerate(lines, 1) if wanted in line
            ]
            if len(found) > MAX_LISTED:
                break
        return "".join(line + "\n" for line in found[:MAX_LISTED]) or "nothing found\n"

    def _remember(self, path: str, text: str) -> None:
        self._undo.append((path, text))
        del self._undo[:-MAX_UNDO]


COMMANDS: dict[str, Callable[..., str]] = {
    "view": Files._view,
    "create": Files._create,
    "str_replace": Files._replace,
    "insert": Files._insert,
    "undo": Files._undo_edit,
    "undo_edit": Files._undo_edit,
    "search": Files._search,
}


def _text(arguments: dict[str, Any], name: str) -> str:
    value = arguments.get(name)
    if not isinstance(value, str):
        raise Mistake(f"`{name}` (a string) is missing")
    return value


def _range(wanted: Any, count: int) -> tuple[int, int]:
    if wanted is None:
        return 1, count
    if not (
        isinstance(wanted, list)
        and len(wanted) == 2
        and all(isinstance(number, int) for number in wanted)
    ):
        raise Mistake("`view_range` must be [first line, last line]; -1 means the end")
    first, last = wanted
    last = count if last == -1 else min(last, count)
    if not 1 <= first <= max(last, 1):
        raise Mistake(f"`view_range` {wanted} is outside the {count} lines")
    return first, last


def _walk(path: str) -> Iterator[str]:
    if os.path.isfile(path):
        yield path
        return
    for folder, folders, names in os.walk(path):  # does not follow links
        folders[:] = sorted(name for name in folders if name != ".git")
        for name in sorted(names):
            yield os.path.join(folder, name)


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
