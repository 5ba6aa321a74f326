"""Files of an object store: puts that give a name once, and a busy store asked again and again.

Arrow's datasets read them on threads of Arrow's own (`ObjectFiles`), and no Python error may come
out of these: to put one into words, Arrow waits for Python's lock while it holds a lock of its own,
and whoever has Python's lock and starts a scan at that moment waits for the latter. Both then wait
for ever (pyarrow 26, `Scanner.to_reader`). So a read that fails in the end gives no bytes: Arrow
says in its own words that the file ends too early, and the reason is logged.
"""

from __future__ import annotations

import asyncio
import errno
import io
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
import pyarrow.fs as pafs
from fsspec.implementations.local import LocalFileSystem

from prorl.errors import StorageError
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem

log = logging.getLogger("prorl.storage")

PUT_S = wait_limit_s("store.put")

SLOW_LINK = 1 << 20
"""Bytes a second that any network to an object store has."""

PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Between tries at an object store, about: half a minute in all, then the process starts again."""

_SCAN_PAUSES_S = PAUSES_S[:3]
"""Beyond the tries of the store's own client."""

_BUSY = {errno.EBUSY, errno.EREMOTEIO, errno.EIO}
"""The error that a store's client makes of 503 and 409, of 500, and of the rest of 5xx."""

_Answer = TypeVar("_Answer")


class NameConflictError(StorageError):
    """A name that is given once holds something else."""


def failures() -> tuple[type[Exception], ...]:
    """Returns what a filesystem raises when it fails; AWS's client has errors of its own."""
    boto = sys.modules.get("botocore.exceptions")
    return (OSError,) if boto is None else (OSError, boto.BotoCoreError)


def _again(
    call: Callable[[], _Answer],
    is_busy: Callable[[Exception], bool],
    pauses_s: Sequence[float] = PAUSES_S,
    sleep: Callable[[float], None] = time.sleep,
) -> _Answer:
    """Tried again after each pause while the store is busy. Raises what the last try raised."""
    for wait_s in pauses_s:
        try:
            return call()
        except failures() as error:
            if not is_busy(error):
                raise
        sleep(wait_s * random.uniform(0.5, 1.5))
    return call()


def _patiently(
    call: Callable[[], _Answer],
    operation: str,
    pauses_s: Sequence[float] = PAUSES_S,
    sleep: Callable[[float], None] = time.sleep,
) -> _Answer:
    """Calls again for about half a minute, whatever the store refuses. Raises FileNotFoundError and
    FileExistsError at once, StorageError with `operation` in the end.
    """
    final = FileNotFoundError, FileExistsError, PermissionError
    try:
        return _again(call, lambda error: not isinstance(error, final), pauses_s, sleep)
    except (FileNotFoundError, FileExistsError):
        raise
    except failures() as error:
        raise _error(operation, error) from error


def ask(fs: AbstractFileSystem, call: Callable[[], _Answer]) -> _Answer:
    """A question to a filesystem; an object store that is busy is asked for about half a minute.
    Its own client takes a refusal without a body, as of HEAD, for an answer. Blocks.
    """
    pauses_s = () if isinstance(fs, LocalFileSystem) else PAUSES_S
    return _again(call, lambda error: getattr(error, "errno", None) in _BUSY, pauses_s)


def write_object(
    fs: AbstractFileSystem,
    path: str,
    content: bytes | pa.Buffer,
    sleep: Callable[[float], None] = time.sleep,
    patience_s: float = PUT_S,
) -> None:
    """Put if absent, again and again while the store is busy. Busy is 503, 409, a reply that never
    came, or silence for `patience_s` and what so many bytes take. A put that came through although
    its reply was lost shows as "exists" (412) on the next try, with equal bytes: success.
    """
    data = bytes(memoryview(content))
    try:
        _patiently(
            lambda: _pipe(fs, path, data, patience_s, mode="create"),
            f"cannot store {path}",
            sleep=sleep,
        )
    except FileExistsError:
        fs.invalidate_cache()
        stored = _patiently(lambda: fs.cat_file(path), f"cannot read {path}", sleep=sleep)
        check_same(bytes(stored), memoryview(content), path)
    except FileNotFoundError as error:
        raise _error(f"cannot store {path}", error) from error


def _pipe(fs: Any, path: str, data: bytes, patience_s: float, **how: str) -> None:
    """One try of a put. Raises OSError, TimeoutError. Bounded here, because a client need not be:
    s3fs waits without end for a server that takes the connection and never says "100 Continue" (its
    read timeout begins after the body).
    """
    if not getattr(fs, "async_impl", False):
        return fs.pipe_file(path, data, **how)  # type: ignore[no-any-return]
    put = asyncio.wait_for(fs._pipe_file(path, data, **how), patience_s + len(data) / SLOW_LINK)
    asyncio.run_coroutine_threadsafe(put, fs.loop).result()


def _error(operation: str, cause: Exception) -> StorageError:
    return StorageError(getattr(cause, "errno", None), f"{operation}: {cause}")


def remove(fs: AbstractFileSystem, path: str) -> bool:
    """Returns whether it was there. An object store that is busy is asked again. Raises
    StorageError.
    """
    pauses_s = () if isinstance(fs, LocalFileSystem) else PAUSES_S
    try:
        _patiently(lambda: fs.rm_file(path), f"cannot remove {path}", pauses_s)
    except FileNotFoundError:
        return False
    return True


def check_same(stored: bytes, ours: memoryview, path: str) -> None:
    """Raises NameConflictError where other content stands under a name than ours. An Arrow buffer's
    bytes have a sign, and those above 127 would differ from equal ones.
    """
    if stored != ours.cast("B"):
        raise NameConflictError(
            f"{path} exists with other content: does another service write to this directory?"
        )


class ObjectFiles(pafs.FSSpecHandler):  # type: ignore[misc]
    """An fsspec filesystem whose files never raise."""

    def open_input_file(self, path: str) -> pa.PythonFile:
        """One that cannot be opened has no bytes."""
        opened = _tried(lambda: self.fs.open(path, mode="rb"), path, io.BytesIO())
        return pa.PythonFile(_Quiet(opened, path), mode="r")


class _Quiet:
    """The part of a file that `pa.PythonFile` needs."""

    def __init__(self, file: Any, path: str) -> None:
        self._file, self._path = file, path

    def read(self, size: int = -1) -> bytes:
        return bytes(_tried(lambda: self._file.read(size), self._path, b""))

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    @property
    def closed(self) -> bool:
        return bool(self._file.closed)

    def close(self) -> None:
        self._file.close()


def _tried(call: Callable[[], Any], path: str, otherwise: Any) -> Any:
    """Never raises; a file that is not there is not asked for again."""
    try:
        return _again(call, lambda error: not isinstance(error, FileNotFoundError), _SCAN_PAUSES_S)
    except FileNotFoundError:
        return otherwise
    except failures() as error:
        log.warning("cannot read %s: %s: %s", path, type(error).__name__, error)
        return otherwise
