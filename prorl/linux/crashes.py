"""The attribution of a process's death: a page that it shares with its parent says what it was
doing, and who is charged.

    page = crashes.page()                                            # the parent
    Popen(..., pass_fds=(page,), env={VARIABLE: str(page)})
    crashes.start()                                                  # on its loop
    create_task(crashes.attribute_steps("run/5/1", work()))          # marks each step of it
    name = crashes.read(page)                                        # the parent, after its death
    crashes.charge(folder, name, "silent for 8 s")

The page names the piece of work in whose step the process died, so that it alone is charged, not
all that was in hand; at MOST_CHARGES the next incarnation does not touch it (`quarantine_reason`).
Charges are kept by the work's name without its last part, its attempt. Tasks that a step makes are
the same work. A run of whose work MOST_OF_RUN pieces ended the process, and none went well in
between, is not touched either: a file of bad tasks ends its own run.
"""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Callable, Coroutine, Generator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Final, TypeVar

VARIABLE: Final = "PRORL_CRASH_PAGE_FD"
FATAL_ATTEMPT: Final = "PRORL_FATAL_ATTEMPT"
"""A variable of the next incarnation: the piece of work (an attempt) whose step ended the last
one.
"""
PAGE_BYTES: Final = 4096
MOST_CHARGES: Final = 2
"""Deaths of a worker in one piece of work: one may be chance (memory, a machine), two are not."""
MOST_OF_RUN: Final = 4
"""Rollouts of one run that ended a worker: then the run is, or a thousand of its rollouts would
each be allowed two deaths.
"""

ResultT = TypeVar("ResultT")

_page: mmap.mmap | None = None
_now: bytes | None = None
"""The text that is marked now."""


def page() -> int:
    """Returns the page for a child; the caller closes it."""
    memfd = os.memfd_create("at-work", os.MFD_CLOEXEC)
    os.truncate(memfd, PAGE_BYTES)
    return memfd


def read(page: int) -> str:
    """Empty between steps."""
    return os.pread(page, PAGE_BYTES, 0).partition(b"\0")[0].decode("utf-8", "replace")


def start() -> None:
    """Mark on the page that the parent gave, if it did, what the running loop does. Once."""
    global _page
    text = os.environ.pop(VARIABLE, "")
    if text:
        with suppress(OSError, ValueError):  # some other parent's: it is not here
            _page = mmap.mmap(int(text), PAGE_BYTES)
            os.close(int(text))
            asyncio.get_running_loop().set_task_factory(_inherit)  # type: ignore[arg-type]


def clear() -> None:
    """This process ends for reasons of its own."""
    if _page is not None:
        _page[:1] = b"\0"


def attribute_steps(name: str, work: Coroutine[Any, Any, ResultT]) -> Coroutine[Any, Any, ResultT]:
    """The work, whose steps are marked while they last."""
    if _page is None:
        return work
    return _Marked(name.encode()[: PAGE_BYTES - 1] + b"\0", work, _page)


def current() -> Callable[[Coroutine[Any, Any, ResultT]], Coroutine[Any, Any, ResultT]]:
    """Returns what makes a coroutine part of the work of this step, whoever drives it later.

    For what callbacks of the loop start on behalf of the work: a connection's requests.
    """
    if _now is None or _page is None:
        return lambda work: work
    name, page = _now, _page
    return lambda work: _Marked(name, work, page)


def _inherit(
    loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, ResultT], **options: Any
) -> asyncio.Task[ResultT]:
    """Returns a task that is the same work as the step that makes it."""
    if _now is not None and _page is not None and not isinstance(work, _Marked):
        work = _Marked(_now, work, _page)
    return asyncio.Task(work, loop=loop, **options)


class _Marked(Coroutine[Any, Any, ResultT]):
    """A coroutine whose steps are marked while they last."""

    def __init__(self, name: bytes, work: Coroutine[Any, Any, ResultT], page: mmap.mmap) -> None:
        self._name, self._work, self._page = name, work, page

    def send(self, value: Any) -> Any:
        return self._step(self._work.send, value)

    def throw(self, kind: Any, value: Any = None, trace: TracebackType | None = None) -> Any:
        return self._step(self._work.throw, kind if value is None else value)

    def _step(self, step: Callable[[Any], Any], argument: Any) -> Any:
        global _now
        _now = self._name
        self._page[: len(self._name)] = self._name
        try:
            return step(argument)
        finally:
            self._page[:1], _now = b"\0", None

    def close(self) -> None:
        self._work.close()

    def __await__(self) -> Generator[Any, Any, ResultT]:
        return self._work.__await__()


def charge(folder: Path, name: str, why: str) -> int:
    """Charge a piece of work, and its run, with a death; how many it has now."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for path in (_file(folder, name), _of_run(folder, name)):
        with path.open("a") as file:
            file.write(f"{name} {why}\n")
    return len(_deaths(_file(folder, name)))


def quarantine_reason(folder: Path, name: str) -> tuple[str, bool]:
    """Returns why a piece of work is not touched, and whether all of its run is not; empty while it
    may end another process.
    """
    deaths = _deaths(_of_run(folder, name))
    if len({line.partition(" ")[0].rpartition("/")[0] for line in deaths}) >= MOST_OF_RUN:
        most = f"{MOST_OF_RUN} rollouts of its run have each ended a worker that was at them"
        return f"{most}, and none ended well since: {deaths[-1].partition(' ')[2]}", True
    deaths = _deaths(_file(folder, name))
    if len(deaths) >= MOST_CHARGES:
        return f"it ended a worker that was at it, twice: {deaths[-1].partition(' ')[2]}", False
    return "", False


def clear_crashes(folder: Path, name: str) -> None:
    _of_run(folder, name).unlink(missing_ok=True)


def _deaths(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def forget(folder: Path, run: str) -> None:
    """Drop all charges of a run's work."""
    for path in folder.glob("*"):
        if path.read_text().startswith(f"{run}/"):
            path.unlink()


def _of_run(folder: Path, name: str) -> Path:
    return _file(folder, f"{name.partition('/')[0]}/")


def _file(folder: Path, name: str) -> Path:
    return folder / blake2b(name.rpartition("/")[0].encode(), digest_size=12).hexdigest()
