"""A disk that keeps nothing but what was synced.

The strictest reading of POSIX: the content of a file is kept by fsync of the file, its name by
fsync of its directory. Whatever was not synced may be there or not; `Kept` says which.
"""

from __future__ import annotations

import enum
import random
from dataclasses import dataclass, field
from pathlib import Path


class Kept(enum.Enum):
    """The unsynced changes that are there after the cut."""

    NOTHING = enum.auto()
    NAMES = enum.auto()
    """Every name, but no content: what ext4 did to renamed files."""
    SOME = enum.auto()
    """Every name, and a random part of what was written: blocks go to the disk in any order."""
    EVERYTHING = enum.auto()
    """As after SIGKILL of all processes."""


@dataclass(slots=True)
class _File:
    synced: bytearray = field(default_factory=bytearray)
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    """(offset, data), or (length, None) for a truncation."""
    size: int = 0

    def change(self, offset: int, data: bytes | None) -> None:
        self.pending.append((offset, data))
        self.size = offset if data is None else max(self.size, offset + len(data))

    def sync(self) -> None:
        _apply(self.synced, self.pending)
        self.pending = []

    def content(self, kept: Kept, chance: random.Random) -> bytes:
        if kept in (Kept.NOTHING, Kept.NAMES):
            return bytes(self.synced)
        changes = self.pending
        if kept is Kept.SOME:
            changes = [change for change in changes if chance.random() < 0.5]
        content = bytearray(self.synced)
        _apply(content, changes)
        return bytes(content)


@dataclass(slots=True)
class _Folder:
    names: dict[str, _File | _Folder] = field(default_factory=dict)
    synced: dict[str, _File | _Folder] = field(default_factory=dict)


def _apply(content: bytearray, changes: list[tuple[int, bytes | None]]) -> None:
    for offset, data in changes:
        end = offset if data is None else offset + len(data)
        if data is None:
            del content[end:]
        if len(content) < end:
            content.extend(bytes(end - len(content)))
        if data is not None:
            content[offset:end] = data


class Disk:
    """The changes below one folder, which itself is taken to be durable. Paths are relative."""

    def __init__(self) -> None:
        self._top = _Folder()

    def _folder(self, path: Path) -> _Folder | None:
        node: _File | _Folder | None = self._top
        for name in path.parts:
            node = node.names.get(name) if isinstance(node, _Folder) else None
        return node if isinstance(node, _Folder) else None

    def _file(self, path: Path) -> _File | None:
        folder = self._folder(path.parent)
        entry = folder.names.get(path.name) if folder is not None else None
        return entry if isinstance(entry, _File) else None

    def size(self, path: Path) -> int:
        """Bytes of a file; 0 when there is none."""
        file = self._file(path)
        return file.size if file is not None else 0

    def create(self, path: Path, *, empty: bool) -> None:
        """Open a file for writing; `empty` truncates it."""
        folder = self._folder(path.parent)
        if folder is None or isinstance(folder.names.get(path.name), _Folder):
            return
        file = folder.names.setdefault(path.name, _File())
        if empty and isinstance(file, _File) and file.size:
            file.change(0, None)

    def make_folder(self, path: Path) -> None:
        """mkdir."""
        folder = self._folder(path.parent)
        if folder is not None:
            folder.names.setdefault(path.name, _Folder())

    def change(self, path: Path, offset: int, data: bytes | None) -> None:
        """Write, or with None truncate to `offset`."""
        file = self._file(path)
        if file is not None:
            file.change(offset, data)

    def sync(self, path: Path) -> None:
        """fsync of a file or of a folder."""
        folder = self._folder(path)
        if folder is not None:
            folder.synced = dict(folder.names)
        elif (file := self._file(path)) is not None:
            file.sync()

    def move(self, old: Path, new: Path) -> None:
        """rename."""
        source, target = self._folder(old.parent), self._folder(new.parent)
        if source is not None and target is not None and old.name in source.names:
            target.names[new.name] = source.names.pop(old.name)

    def link(self, old: Path, new: Path) -> None:
        """A second name for a file."""
        file, target = self._file(old), self._folder(new.parent)
        if file is not None and target is not None:
            target.names.setdefault(new.name, file)

    def remove(self, path: Path) -> None:
        """unlink and rmdir."""
        folder = self._folder(path.parent)
        if folder is not None:
            folder.names.pop(path.name, None)

    def after_a_cut(self, target: Path, kept: Kept, chance: random.Random) -> None:
        """Write what is there after a power cut into an empty folder."""
        _write(self._top, target, kept, chance)


def _write(folder: _Folder, target: Path, kept: Kept, chance: random.Random) -> None:
    target.mkdir(exist_ok=True)
    for name, node in (folder.synced if kept is Kept.NOTHING else folder.names).items():
        if isinstance(node, _Folder):
            _write(node, target / name, kept, chance)
        elif not name.endswith("-shm"):  # shared memory of SQLite: made anew at every start
            (target / name).write_bytes(node.content(kept, chance))
