"""Files of an object store: puts that give a name once, and a busy store asked again and again."""

from __future__ import annotations

import asyncio
import errno
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fsspec.implementations.local import LocalFileSystem

from prorl.errors import StorageError

if TYPE_CHECKING:
    import pyarrow as pa
    from fsspec import AbstractFileSystem


def failures() -> tuple[type[Exception], ...]:
    """What a filesystem raises when it cannot: OSError, and what AWS's client has besides.

    That is: no connection, no credentials.
    """
    boto = sys.modules.get("botocore.exceptions")
    return (OSError,) if boto is None else (OSError, boto.BotoCoreError)


def _error(what: str, cause: Exception) -> StorageError:
    return StorageError(getattr(cause, "errno", None), f"{what}: {cause}")


class NameTakenError(StorageError):
    """A name that is given once holds something else."""


def replace_object(fs: AbstractFileSystem, path: str, content: bytes | pa.Buffer) -> None:
    """Put in the place of what is there, again and again while the store is busy."""
    for wait_s in (*PAUSES_S, None):
        try:
            _pipe(fs, path, bytes(memoryview(content)), PUT_S)
            return
        except failures() as error:
            if wait_s is None or isinstance(error, PermissionError | FileNotFoundError):
                raise _error(f"cannot store {path}", error) from error
        time.sleep(wait_s)


PUT_S = 30.0
"""How long one try of a put may take, besides the time for its bytes."""


SLOW_LINK = 1 << 20
"""Bytes a second that any network to an object store has."""


def _pipe(fs: Any, path: str, data: bytes, patience_s: float, **how: str) -> None:
    """One try of a put. Raises OSError, TimeoutError.

    Bounded here, because a client need not be: s3fs waits without end for a server that takes the
    connection and never says "100 Continue" (its read timeout begins after the body).
    """
    if not getattr(fs, "async_impl", False):
        return fs.pipe_file(path, data, **how)  # type: ignore[no-any-return]
    put = asyncio.wait_for(fs._pipe_file(path, data, **how), patience_s + len(data) / SLOW_LINK)
    asyncio.run_coroutine_threadsafe(put, fs.loop).result()


def write_object(
    fs: AbstractFileSystem,
    path: str,
    content: bytes | pa.Buffer,
    sleep: Callable[[float], None] = time.sleep,
    patience_s: float = PUT_S,
) -> None:
    """Put if absent, again and again while the store is busy.

    Busy is 503, 409, a reply that never came, or silence for `patience_s` and what so many bytes
    take.

    A put that came through although its reply was lost shows as "exists" (412) on the next try,
    with equal bytes: success.
    """
    data = bytes(memoryview(content))
    for wait_s in (*PAUSES_S, None):
        try:
            _pipe(fs, path, data, patience_s, mode="create")
            return
        except FileExistsError:
            fs.invalidate_cache()
            check_same(_read_back(fs, path, sleep), memoryview(content), path)
            return
        except failures() as error:
            if wait_s is None or isinstance(error, PermissionError | FileNotFoundError):
                raise _error(f"cannot store {path}", error) from error
        sleep(wait_s * random.uniform(0.5, 1.5))


PAUSES_S = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
"""Between tries at an object store, about: half a minute in all, then the process starts again."""


def _read_back(fs: AbstractFileSystem, path: str, sleep: Callable[[float], None]) -> bytes:
    for wait_s in (*PAUSES_S, None):
        try:
            return bytes(fs.cat_file(path))
        except failures() as error:
            if wait_s is None:
                raise _error(f"cannot read {path}", error) from error
        sleep(wait_s)
    raise AssertionError("the last try returns or raises")


def _patiently(call: Callable[[], Any], what: str, pauses_s: Sequence[float] = PAUSES_S) -> Any:
    """What a call gives, tried again while the store is busy.

    Raises FileNotFoundError at once, and StorageError with `what` where it may not or cannot in the
    end.
    """
    for wait_s in (*pauses_s, None):
        try:
            return call()
        except FileNotFoundError:
            raise
        except failures() as error:
            if wait_s is None or isinstance(error, PermissionError):
                raise _error(what, error) from error
        time.sleep(wait_s)
    raise AssertionError("the last try returns or raises")


_Answer = TypeVar("_Answer")

_BUSY = {errno.EBUSY, errno.EREMOTEIO, errno.EIO}
"""What a store's client makes of 503 and 409, of 500, and of the rest of 5xx."""


def ask(fs: AbstractFileSystem, call: Callable[[], _Answer]) -> _Answer:
    """What a question to a filesystem gives: whether a file is there, its size, its bytes.

    An object store that is busy is asked again for about half a minute: its own client takes a
    refusal without a body, as of HEAD, for an answer. Blocks. Raises what the call raises.
    """
    for wait_s in () if isinstance(fs, LocalFileSystem) else PAUSES_S:
        try:
            return call()
        except OSError as error:
            if error.errno not in _BUSY:
                raise
        time.sleep(wait_s)
    return call()


def open_object(fs: AbstractFileSystem, path: str) -> Any:
    """A file of an object store, open for reading; a store that is busy is asked again.

    Its own client may take a refusal without a body, as of HEAD, for an answer. Raises
    FileNotFoundError, and StorageError where the store cannot be read.
    """
    return _patiently(lambda: fs.open(path, "rb"), f"cannot open {path}")


def remove(fs: AbstractFileSystem, path: str) -> bool:
    """Remove a file; whether it was there. An object store that is busy is asked again and again.

    Raises StorageError.
    """
    pauses_s = () if isinstance(fs, LocalFileSystem) else PAUSES_S
    try:
        _patiently(lambda: fs.rm_file(path), f"cannot remove {path}", pauses_s)
    except FileNotFoundError:
        return False
    return True


def check_same(found: bytes, ours: memoryview, path: str) -> None:
    """Raises NameTakenError where other content stands under a name than ours."""
    if found != ours:
        raise NameTakenError(
            f"{path} exists with other content: does another service write to this directory?"
        )
