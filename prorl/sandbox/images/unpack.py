"""A layer's archive becomes a folder that overlayfs can stack. What it holds is foreign.

Nothing is written outside the folder: every path is walked name by name, links of the archive are
followed inside the folder as its root, `..` is refused. Devices, pipes and sockets are left out,
all belongs to whoever unpacks, setuid and setgid bits go: in a sandbox one uid means anything, and
on the host they would be a hole. Bounded by bytes and entries.

A file that a layer takes away (`.wh.NAME`, OCI image specification) becomes overlayfs's own mark,
a device 0:0; a folder that hides what is below it gets the attribute `user.overlay.opaque`. Both
need no root (Linux 5.8). Where they cannot be made, `marks` is false: the names stay as they are in
the archive and `stack.merge` obeys them.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import importlib
import os
import stat
import tarfile
from pathlib import Path
from typing import IO, Any, cast

from prorl.errors import UserError
from prorl.sandbox.trees import remove_tree

WHITEOUT, OPAQUE = ".wh.", ".wh..wh..opq"
OPAQUE_ATTRIBUTE = "user.overlay.opaque"
MAX_ENTRIES = 4_000_000
MAX_LAYER_BYTES = 1 << 38
"""The limit of a layer, packed or not: 256 GiB. Larger ones are no images of tasks."""
HEADER_BYTES = 4 << 20
"""The limit of one entry's headers, long names and attributes included: tarfile keeps them in
memory.
"""
MAX_LINKS = 40
"""Followed on the way to one entry, as the kernel does."""


def unpack(blob: Path, target: Path, diff_id: str, limit_bytes: int, *, marks: bool) -> None:
    """Unpack a blob to a new folder. Raises UserError where the archive is at fault, OSError."""
    target.mkdir()
    with open(blob, "rb") as file:
        stream = _Counted(plain_stream(file))
        try:
            _Unpacking(target, limit_bytes, marks).run(stream)
            while stream.read(1 << 20):
                pass  # padding counts for the digest
        except (tarfile.TarError, EOFError, gzip.BadGzipFile, ValueError) as error:
            raise UserError(f"layer {diff_id}: {error}", "a whole tar archive") from None
        if f"sha256:{stream.digest.hexdigest()}" != diff_id:
            raise UserError(f"layer {diff_id} holds something else", "what the image says it holds")


def plain_stream(file: IO[bytes]) -> IO[bytes]:
    """Opens the content of a blob: as it is, or compressed by gzip or zstd."""
    magic = file.read(4)
    file.seek(0)
    if magic[:2] == b"\x1f\x8b":
        return cast("IO[bytes]", gzip.open(file))
    if magic == b"\x28\xb5\x2f\xfd":
        # by name: sandboxd knows this module, and starts without Arrow
        arrow: Any = importlib.import_module("pyarrow")
        return cast("IO[bytes]", arrow.CompressedInputStream(arrow.PythonFile(file, "r"), "zstd"))
    return file


def compress(source: Path, target: Path) -> None:
    """Compresses a file by zstd, at the level that costs least."""
    arrow: Any = importlib.import_module("pyarrow")
    with open(source, "rb") as file, arrow.CompressedOutputStream(str(target), "zstd") as packed:
        while piece := file.read(1 << 20):
            packed.write(piece)


def is_mark(about: os.stat_result) -> bool:
    """Returns whether this entry removes what lower layers have here."""
    return stat.S_ISCHR(about.st_mode) and about.st_rdev == 0


class _Counted:
    """Counts and digests what is read, and reads no further than `allowed`."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._count = file, 0
        self.allowed = HEADER_BYTES
        self.digest = hashlib.sha256()

    def read(self, size: int = -1) -> bytes:
        try:
            data = self._file.read(size)
        except OSError as error:
            raise ValueError(str(error)) from None  # of the archive: a cut or broken stream
        self._count += len(data)
        if self._count > self.allowed:
            raise ValueError(f"more than {HEADER_BYTES} bytes of headers")
        self.digest.update(data)
        return data


class _Unpacking:
    def __init__(self, root: Path, limit_bytes: int, marks: bool) -> None:
        self._root, self._marks = str(root), marks
        self._limit_bytes, self._num_bytes, self._num_entries = limit_bytes, 0, 0
        self._folders: dict[tuple[str, ...], str] = {(): self._root}
        """Folders that were walked: names as the archive has them, where they really are."""
        self._modes: list[tuple[str, int, float]] = []

    def run(self, stream: _Counted) -> None:
        with tarfile.open(fileobj=cast("IO[bytes]", stream), mode="r|") as archive:
            for member in archive:
                rounded = -(-member.size // 512) * 512
                stream.allowed = member.offset_data + rounded + HEADER_BYTES
                self._num_entries += 1
                self._num_bytes += member.size if member.isreg() else 0
                if self._num_entries > MAX_ENTRIES or self._num_bytes > MAX_LAYER_BYTES:
                    bound = f"{MAX_ENTRIES} entries and {MAX_LAYER_BYTES} bytes"
                    raise UserError("a layer too large to unpack", f"at most {bound}")
                if self._num_bytes > self._limit_bytes:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                self._entry(archive, member)
                cast("Any", archive).members.clear()  # it keeps every header otherwise
            stream.allowed = 1 << 62
        # last: a folder may forbid its own filling
        for path, mode, mtime in reversed(self._modes):
            if os.path.isdir(path) and not os.path.islink(path):
                os.chmod(path, mode | 0o700)
                os.utime(path, (mtime, mtime))

    def _entry(self, archive: tarfile.TarFile, member: tarfile.TarInfo) -> None:
        names = self._names(member.name)
        if not names:
            return
        parent = self._folder(names[:-1])
        path = os.path.join(parent, names[-1])
        if names[-1].startswith(WHITEOUT):
            self._remove(parent, names[-1], path)
            return
        mode = member.mode & 0o1777
        if member.isdir():
            if not os.path.isdir(path) or os.path.islink(path):
                self._forget(names)
                self._make_folder(path)
            self._modes.append((path, mode, max(0, member.mtime)))
        elif member.issym():
            self._clear(path, names)
            os.symlink(member.linkname, path)
        elif member.islnk():
            aim = self._names(member.linkname)
            source = os.path.join(self._folder(aim[:-1]), aim[-1]) if aim else self._root
            about = os.lstat(source) if os.path.lexists(source) else None
            if about is None or stat.S_ISDIR(about.st_mode):
                raise ValueError(f"{member.name!r} is a link to {member.linkname!r}: no file of it")
            if source != path:
                self._clear(path, names)
                os.link(source, path, follow_symlinks=False)
        elif member.isreg():
            self._clear(path, names)
            self._write(archive, member, path, mode)

    def _write(
        self, archive: tarfile.TarFile, member: tarfile.TarInfo, path: str, mode: int
    ) -> None:
        content = archive.extractfile(member)
        assert content is not None
        with open(path, "xb") as file:
            remaining = member.size
            while remaining:
                piece = content.read(min(remaining, 1 << 20))
                if not piece:
                    raise ValueError(f"{member.name!r} is cut")
                file.write(piece)
                remaining -= len(piece)
            os.fchmod(file.fileno(), mode)
        mtime = max(0, member.mtime)
        os.utime(path, (mtime, mtime))

    def _remove(self, parent: str, name: str, path: str) -> None:
        target = name.removeprefix(WHITEOUT)
        if name != OPAQUE and (target in ("", ".", "..") or target.startswith(WHITEOUT)):
            return  # other marks of AUFS mean nothing here
        if not self._marks:
            open(path, "wb").close()
        elif name == OPAQUE:
            os.setxattr(parent, OPAQUE_ATTRIBUTE, b"y")
        elif not os.path.lexists(aim := os.path.join(parent, target)):
            os.mknod(aim, stat.S_IFCHR, 0)
        elif os.path.isdir(aim) and not os.path.islink(aim):
            os.setxattr(aim, OPAQUE_ATTRIBUTE, b"y")

    def _make_folder(self, path: str) -> None:
        """Make a folder; one that stands where lower layers' was taken away hides what it had."""
        replaces = os.path.lexists(path) and is_mark(os.lstat(path))
        remove_tree(path)
        os.mkdir(path, 0o755)
        if replaces:
            os.setxattr(path, OPAQUE_ATTRIBUTE, b"y")

    def _clear(self, path: str, names: tuple[str, ...]) -> None:
        remove_tree(path)
        self._forget(names)

    def _forget(self, names: tuple[str, ...]) -> None:
        if names in self._folders:
            self._folders = {(): self._root}

    @staticmethod
    def _names(name: str) -> tuple[str, ...]:
        names = tuple(part for part in name.split("/") if part not in ("", "."))
        if ".." in names or "\0" in name:
            raise ValueError(f"the name {name[:200]!r} climbs")
        return names

    def _folder(self, names: tuple[str, ...]) -> str:
        """Returns the real path of a folder; missing ones are made."""
        if names in self._folders:
            return self._folders[names]
        trail, pending, links = [self._root], list(reversed(names)), 0
        while pending:
            name = pending.pop()
            if name == "..":
                trail = trail[: max(1, len(trail) - 1)]
                continue
            path = os.path.join(trail[-1], name)
            if os.path.islink(path):
                links += 1
                if links > MAX_LINKS:
                    raise ValueError(f"{'/'.join(names)!r} leads in a circle")
                aim = os.readlink(path)
                trail = trail[:1] if aim.startswith("/") else trail
                pending += [part for part in reversed(aim.split("/")) if part not in ("", ".")]
                continue
            if not os.path.isdir(path):
                self._make_folder(path)
            trail.append(path)
        self._folders[names] = trail[-1]
        return trail[-1]


def free_bytes(path: Path) -> int:
    """Returns how many bytes may be unpacked on the file system of a path. Raises OSError when it
    is full.
    """
    room = os.statvfs(path)
    free = room.f_bavail * room.f_frsize * 9 // 10
    if free < 1 << 20:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    return free
