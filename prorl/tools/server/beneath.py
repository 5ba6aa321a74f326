"""put and get: regular files below the workspace, never through a link, never blocking.

Each path component is opened with O_NOFOLLOW relative to the one before, so a link planted by the
agent is an error, not a detour.
"""

from __future__ import annotations

import os
import stat

DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
VIRTUAL_ROOT = "/workspace/"
"""Absolute paths may start with this whatever the workspace is called in this sandbox."""


def parts_of(path: str, workspace: str) -> list[str]:
    """Components below the workspace. Raises ValueError for anything that could leave it."""
    for root in (workspace.rstrip("/") + "/", VIRTUAL_ROOT):
        if path.startswith(root):
            path = path[len(root) :]
            break
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or not parts or ".." in parts or "\0" in path:
        raise ValueError(f"path {path!r} is not below the workspace")
    return parts


def _open_parent(workspace: str, parts: list[str], create: bool) -> int:
    fd = os.open(workspace, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    for part in parts[:-1]:
        try:
            if create:
                try:
                    os.mkdir(part, 0o755, dir_fd=fd)
                except FileExistsError:
                    pass
            child = os.open(part, DIRECTORY, dir_fd=fd)
        finally:
            os.close(fd)
        fd = child
    return fd


def put(workspace: str, path: str, content: bytes, mode: int, offset: int) -> None:
    """Write a chunk at `offset`; offset 0 starts the file anew. Raises OSError, ValueError."""
    parts = parts_of(path, workspace)
    parent = _open_parent(workspace, parts, create=True)
    try:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        if offset == 0:
            try:
                os.unlink(parts[-1], dir_fd=parent)
            except FileNotFoundError:
                pass
            flags |= os.O_CREAT | os.O_EXCL
        fd = os.open(parts[-1], flags, mode, dir_fd=parent)
        with open(fd, "wb") as file:
            file.seek(offset)
            file.write(content)
            os.fchmod(fd, mode)
    finally:
        os.close(parent)


def get(workspace: str, path: str, offset: int, max_bytes: int) -> tuple[int, bytes]:
    """Size of a regular file and its bytes from `offset`. Raises OSError, ValueError."""
    parts = parts_of(path, workspace)
    parent = _open_parent(workspace, parts, create=False)
    try:
        fd = os.open(
            parts[-1], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=parent
        )
    finally:
        os.close(parent)
    with open(fd, "rb"):
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode):
            raise ValueError(f"{path} is not a regular file")
        return about.st_size, os.pread(fd, max_bytes, offset)
