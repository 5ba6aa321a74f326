"""Snapshots: the workspace as a tar, packed and unpacked inside the sandbox with the agent's own rights.

The host moves the bytes and never looks into them, so a hostile archive meets only the sandbox that it came from or a sibling's.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tarfile


class Archive:
    """At most one archive at a time, in memory."""

    def __init__(self, workspace: str) -> None:
        self._workspace = workspace
        self._fd = -1

    def pack(self, max_bytes: int) -> int:
        """Make the archive; its size. Raises ValueError when it is larger than `max_bytes`."""
        import tarfile

        self._fresh()
        with open(self._fd, "wb", closefd=False) as file, tarfile.open(fileobj=file, mode="w") as tar:
            for name in sorted(os.listdir(self._workspace)):
                tar.add(os.path.join(self._workspace, name), arcname=name, filter=_without_owner)
                if file.tell() > max_bytes:
                    raise ValueError(f"the workspace has more than {max_bytes} bytes")
        return os.fstat(self._fd).st_size

    def read(self, offset: int, max_bytes: int) -> bytes:
        """A piece of what was packed."""
        return os.pread(self._fd, max_bytes, offset)

    def unpack(self, content: bytes, offset: int, last: bool) -> None:
        """Take a piece; after the last, extract over the workspace."""
        import tarfile

        if offset == 0:
            self._fresh()
        os.pwrite(self._fd, content, offset)
        if last:
            os.lseek(self._fd, 0, os.SEEK_SET)
            with open(self._fd, "rb", closefd=False) as file, tarfile.open(fileobj=file, mode="r") as tar:
                if hasattr(tarfile, "data_filter"):
                    tar.extractall(self._workspace, filter="tar")
                else:
                    tar.extractall(self._workspace)
            self._drop()

    def _fresh(self) -> None:
        self._drop()
        self._fd = os.memfd_create("snapshot", os.MFD_CLOEXEC)

    def _drop(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member
