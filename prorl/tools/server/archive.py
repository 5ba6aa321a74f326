"""Snapshots: the workspace as a tar.

It is packed and unpacked inside the sandbox with the agent's own rights.

By the image's `tar` where it has one, which takes an eighth of the time, else by Python. The host
moves the bytes and never looks into them, so a hostile archive meets only the sandbox that it came
from or a sibling's.
"""

from __future__ import annotations

import os
import time

from prorl.tools.server.execute import execute_from
from prorl.tools.server.light import TYPE_CHECKING

if TYPE_CHECKING:
    import tarfile

    from prorl.tools.server.place import Place

TAR_S = 100.0
"""For a whole workspace; the host waits 120 s."""
ABSENT = (126, 127)


class Archive:
    """Packs and unpacks the workspace; holds one archive at a time, in memory."""

    def __init__(self, place: Place) -> None:
        self._place, self._workspace = place, place.cwd
        self._fd = -1

    def pack(self, max_bytes: int) -> int:
        """Make the archive; its size. Raises ValueError when it is larger than `max_bytes`."""
        self._fresh()
        if not self._tar("-cf", "/proc/self/fd/0", "."):
            self._pack_by_python(max_bytes)
        size = os.fstat(self._fd).st_size
        if size > max_bytes:
            self._drop()
            raise ValueError(f"the workspace has more than {max_bytes} bytes")
        return size

    def read(self, offset: int, max_bytes: int) -> bytes:
        """Read at most `max_bytes` of the archive from `offset` on; empty at its end."""
        return os.pread(self._fd, max_bytes, offset)

    def unpack(self, content: bytes, offset: int, last: bool) -> None:
        """Take a piece of an archive; after the last one, extract it over the workspace."""
        if offset == 0:
            self._fresh()
        os.pwrite(self._fd, content, offset)
        if last:
            os.lseek(self._fd, 0, os.SEEK_SET)
            if not self._tar("-xpf", "-"):
                self._unpack_by_python()
            self._drop()

    def _tar(self, *words: str) -> bool:
        """Run `tar` on the archive; False when there is none.

        Raises ValueError with what it says.
        """
        done = execute_from(self._place, ["tar", *words], self._fd, time.monotonic() + TAR_S)
        if done["exit_code"] in ABSENT:
            return False
        if done["exit_code"] != 0:
            text = done["output"].value().decode("utf-8", "replace")
            raise ValueError(
                "tar ended with exit status {}: {}".format(done["exit_code"], text[-500:])
            )
        return True

    def _pack_by_python(self, max_bytes: int) -> None:
        import tarfile

        file = open(self._fd, "wb", closefd=False)  # noqa: SIM115 - the descriptor is kept
        with file, tarfile.open(fileobj=file, mode="w") as tar:
            for name in sorted(os.listdir(self._workspace)):
                tar.add(os.path.join(self._workspace, name), arcname=name, filter=_without_owner)
                if file.tell() > max_bytes:
                    raise ValueError(f"the workspace has more than {max_bytes} bytes")

    def _unpack_by_python(self) -> None:
        import tarfile

        os.lseek(self._fd, 0, os.SEEK_SET)
        try:
            file = open(self._fd, "rb", closefd=False)  # noqa: SIM115 - the descriptor is kept
            with file, tarfile.open(fileobj=file, mode="r:") as tar:
                if hasattr(tarfile, "data_filter"):
                    tar.extractall(self._workspace, filter="tar")
                else:
                    tar.extractall(self._workspace)
        except tarfile.TarError as error:
            raise ValueError(f"no snapshot: {error}") from error

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
