"""Writes bytes as a file that a reader can trust: whole or absent, whatever dies in between.

Local: a temporary name in the same directory, fsync, rename, fsync of the directory. Object stores:
one put that fails when the key exists (`If-None-Match: *`), which fsspec calls mode "create".
Publishing equal bytes under a name twice is success; other bytes under a name that is taken raise
StorageError, because then two writers believe they own the directory.

It does not promise that a name is free of temporary files after a crash: `layout.RunDir.sweep`
removes them.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fsspec.implementations.local import LocalFileSystem

from prorl.errors import ConfigError, StorageError
from prorl.linux.failpoints import failpoint
from prorl.linux.files import sync_directory
from prorl.storage.files.objects import (
    NameConflictError,
    check_same,
    remove,
    write_object,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from fsspec import AbstractFileSystem


TEMP_MARK = ".tmp-"
"""A file whose name starts with it was being written when its writer died."""

WriteDurably = Callable[["AbstractFileSystem", str, "bytes | pa.Buffer"], None]
"""(filesystem, path, content): durable and visible when it returns."""


def write_durably(fs: AbstractFileSystem, path: str, content: bytes | pa.Buffer) -> None:
    """Raises StorageError when it cannot, or when the name holds something else."""
    if isinstance(fs, LocalFileSystem):
        write_local(Path(path), content)
    else:
        write_object(fs, path, content)


def write_local(path: Path, content: bytes | pa.Buffer) -> None:
    """The local rule: write a temporary file, fsync it, rename it, fsync the folder. Rename without
    fsync can leave an empty file after a crash (Pillai et al., OSDI 2014).
    """
    if path.exists():
        return check_same(path.read_bytes(), memoryview(content), str(path))
    replace_local(path, content)


def replace_local(path: Path, content: bytes | pa.Buffer) -> None:
    """Writes as `write_local` does, over a name in use: readers see the old or the new, whole."""
    temp = path.with_name(f"{TEMP_MARK}{os.getpid()}-{path.name}")
    try:
        _write_synced(temp, memoryview(content))
        failpoint("file.synced")
        temp.rename(path)
        failpoint("file.renamed")
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


def check_conditional(fs: AbstractFileSystem, folder: str) -> None:
    """Raise ConfigError for a filesystem on which a name may be given twice."""
    if isinstance(fs, LocalFileSystem):
        return
    reason = "it let a second writer take a name that was taken"
    probe = f"{folder}/{TEMP_MARK}probe-{uuid.uuid4().hex}"
    try:
        write_object(fs, probe, b"first")
        try:
            write_object(fs, probe, b"second")
        except NameConflictError:
            return
        finally:
            remove(fs, probe)
    except (NotImplementedError, TypeError, ValueError) as error:
        reason = f"it knows no conditional put ({error})"
    except OSError as error:
        expected = "a bucket or folder that can be written to"
        raise ConfigError(f"{folder}: {error}", expected) from error
    raise ConfigError(
        f"{folder} cannot hold runs: {reason}",
        "a store with conditional puts (If-None-Match), as S3, GCS and MinIO have",
        "run on a local disk, and copy the directory afterwards",
    )
