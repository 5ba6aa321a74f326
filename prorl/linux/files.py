"""Files and folders that are there after a power cut, and the room on their disk."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Final


def sync_directory(path: Path) -> None:
    """Make renames and new names in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path, mode: int = 0o777) -> list[Path]:
    """Make a folder and what is above it, each name durable; which ones, outermost first."""
    path = path.absolute()
    missing = [above for above in [*reversed(path.parents), path] if not above.exists()]
    path.mkdir(mode=mode, parents=True, exist_ok=True)
    for folder in missing:
        sync_directory(folder.parent)
    return missing


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600, durably and atomically.

    Readers see the old text or the new one, also after a power cut.
    """
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.replace(name, path)
        sync_directory(path.parent)
    except OSError:
        os.unlink(name)
        raise


FULL_BYTES: Final = 1 << 20
"""A file system with less room than this is full: nobody is to blame for failing there."""


def disk_full(path: Path) -> str:
    """Returns what is wrong with the room where a path lies; empty when there is some."""
    filesystem = os.statvfs(path)
    if filesystem.f_bavail * filesystem.f_frsize >= FULL_BYTES:
        return ""
    return f"the disk of {path} is full"
