"""How bytes become a file that a reader can trust: whole or absent, whatever dies in between.

One function per kind of filesystem.

Local: a temporary name in the same directory, fsync, rename, fsync of the directory. Object stores:
one put that fails when the key exists (`If-None-Match: *`), which fsspec calls mode "create".
Publishing equal bytes under a name twice is success; other bytes under a name that is taken raise
StorageError, because then two writers believe they own the directory.

It does not promise that a name is free of temporary files after a crash: `layout.RunDir.sweep`
removes them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsspec.implementations.local import LocalFileSystem

from prorl.errors import StorageError

if TYPE_CHECKING:
    import pyarrow as pa
    from fsspec import AbstractFileSystem

TEMP_MARK = ".tmp-"
"""A file whose name starts with it was being written when its writer died."""

WriteDurably = Callable[["AbstractFileSystem", str, "bytes | pa.Buffer"], None]
"""(filesystem, path, content): durable and visible when it returns."""


def write_durably(fs: AbstractFileSystem, path: str, content: bytes | pa.Buffer) -> None:
    """Make `content` durable under `path`.

    Raises StorageError when it cannot, or when the name holds something else.
    """
    if isinstance(fs, LocalFileSystem):
        write_local(Path(path), content)
    else:
        write_object(fs, path, content)


def write_local(path: Path, content: bytes | pa.Buffer) -> None:
    """The local rule (Pillai et al., OSDI 2014): rename without fsync can leave an empty file after
    a crash.
    """
    view = memoryview(content)
    if path.exists():
        return _same(path.read_bytes(), view, str(path))
    temp = path.with_name(f"{TEMP_MARK}{os.getpid()}-{path.name}")
    try:
        _write_synced(temp, view)
        temp.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        temp.unlink(missing_ok=True)
        raise StorageError(error.errno, f"cannot store {path}: {error.strerror}") from error


def _write_synced(path: Path, view: memoryview) -> None:
    with path.open("wb", buffering=0) as file:
        written = 0
        while written < len(view):
            written += file.write(view[written:])
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_object(fs: AbstractFileSystem, path: str, content: bytes | pa.Buffer) -> None:
    """Put if absent.

    A reply that was lost shows as "exists" on the second try, with equal bytes.
    """
    try:
        fs.pipe_file(path, bytes(memoryview(content)), mode="create")
    except FileExistsError:
        fs.invalidate_cache()
        _same(fs.cat_file(path), memoryview(content), path)
    except OSError as error:
        raise StorageError(error.errno, f"cannot store {path}: {error}") from error


def _same(found: bytes, ours: memoryview, path: str) -> None:
    if found != ours:
        raise StorageError(
            f"{path} exists with other content: does another service write to this directory?"
        )
