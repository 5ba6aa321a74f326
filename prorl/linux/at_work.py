"""What a process was at when it died: a page that it shares with its parent, and who is charged.

    page = at_work.page()                                       # the parent
    Popen(..., pass_fds=(page,), env={VARIABLE: str(page)})
    at_work.start()                                             # the child
    create_task(at_work.during("run/5/1", work()))              # ... each step of this is marked
    name = at_work.read(page)                                   # the parent, when it has died
    at_work.charge(folder, name, "silent for 8 s")

A process dies in a step of its loop that never ends, or that the interpreter does not survive. The
page names the piece of work whose step that was, so that it alone is charged, not all that was in
hand; at MOST_CHARGES the next life of the process does not touch it (`poison`). Charges are kept
by the work's name without its last part, its attempt.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Coroutine, Generator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

VARIABLE: Final = "PRORL_AT_WORK_FD"
PAGE_BYTES: Final = 4096
MOST_CHARGES: Final = 2

ResultT = TypeVar("ResultT")

_page: mmap.mmap | None = None


def page() -> int:
    """A page for a child; the caller closes it."""
    made = os.memfd_create("at-work", os.MFD_CLOEXEC)
    os.truncate(made, PAGE_BYTES)
    return made


def read(page: int) -> str:
    """What the process that has the page is at; empty between steps."""
    return os.pread(page, PAGE_BYTES, 0).partition(b"\0")[0].decode("utf-8", "replace")


def start() -> None:
    """Mark on the page that the parent gave, if it did. Once."""
    global _page
    text = os.environ.pop(VARIABLE, "")
    if text:
        with suppress(OSError, ValueError):  # some other parent's: it is not here
            _page = mmap.mmap(int(text), PAGE_BYTES)
            os.close(int(text))


def during(name: str, work: Coroutine[Any, Any, ResultT]) -> Coroutine[Any, Any, ResultT]:
    """The same work, each step of which is marked by this name."""
    return work if _page is None else _Marked(name, work, _page)


class _Marked(Coroutine[Any, Any, ResultT]):
    """A coroutine whose steps are marked while they last."""

    def __init__(self, name: str, work: Coroutine[Any, Any, ResultT], page: mmap.mmap) -> None:
        self._name, self._work, self._page = name.encode()[: PAGE_BYTES - 1] + b"\0", work, page

    def send(self, value: Any) -> Any:
        self._page[: len(self._name)] = self._name
        try:
            return self._work.send(value)
        finally:
            self._page[:1] = b"\0"

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        self._page[: len(self._name)] = self._name
        try:
            return self._work.throw(kind if value is None else value)
        finally:
            self._page[:1] = b"\0"

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, ResultT]:
        return self._work.__await__()


def charge(folder: Path, name: str, why: str) -> int:
    """Charge a piece of work with a death; how many it has now."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = _file(folder, name)
    with path.open("a") as file:
        file.write(f"{name} {why}\n")
    return len(path.read_text().splitlines())


def poison(folder: Path, name: str) -> str:
    """How a piece of work ended a process the last time; empty while it may end another one."""
    path = _file(folder, name)
    deaths = path.read_text().splitlines() if path.exists() else []
    return deaths[-1].partition(" ")[2] if len(deaths) >= MOST_CHARGES else ""


def forget(folder: Path, run: str) -> None:
    """Drop all charges of a run's work."""
    for path in folder.glob("*"):
        if path.read_text().startswith(f"{run}/"):
            path.unlink()


def _file(folder: Path, name: str) -> Path:
    return folder / blake2b(name.rpartition("/")[0].encode(), digest_size=12).hexdigest()
