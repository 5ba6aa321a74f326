"""Locks of files and folders, by flock(2): they end with their holder, however it dies."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
FILE = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW


def take(path: str | Path, flags: int = FILE, *, wait: bool = False, shared: bool = False) -> int:
    """A descriptor that holds the lock until it is closed.

    Raises BlockingIOError when somebody has it and we shall not `wait`, OSError.
    """
    handle = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        how = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        fcntl.flock(handle, how if wait else how | fcntl.LOCK_NB)
    except BaseException:
        os.close(handle)
        raise
    return handle


@contextmanager
def locked(path: str | Path, *, wait: bool = False, shared: bool = False) -> Iterator[None]:
    """A block that has the lock of a file. Raises as `take`."""
    handle = take(path, wait=wait, shared=shared)
    try:
        yield
    finally:
        os.close(handle)
