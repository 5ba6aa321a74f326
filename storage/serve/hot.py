"""The hot copy: kept groups as record batches in Arrow IPC stream files, mapped by trainers.

One batch per group, in the STREAM schema (its delivery_seq never changes), at a known (path,
offset, length). Files only grow and are never truncated: a mapping of one stays valid after it is
unlinked. They grow by whole blocks, whose unused end is zeros. The whole is bounded: when it is
over its budget the oldest file goes, and its groups are written again from the parts when somebody
asks. Nothing here is fsynced, and all of it is removed at start and at `close`: it is disposable.
"""

from __future__ import annotations

import os
import shutil
import threading
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from prorl.schema import STREAM, check_schema

FILES = 8
"""Into how many files the budget is divided: what is thrown away at once is an eighth of it."""

BLOCK_BYTES = 2 << 20
"""A block that comes into being in one write lies in one huge page of the page cache, where the
filesystem has them (ext4, xfs): who maps the file then reads it with one page fault per block
instead of hundreds.
"""

Key = tuple[str, int]
"""(run, group)."""


class Location(NamedTuple):
    """Holds where a group's batch lies: one encapsulated IPC message."""

    path: str
    offset: int
    length: int


class HotCopy:
    """The hot files of one store, for the threads of all runs."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._lock = threading.Lock()
        """A lock for everything here: held for a copy into the page cache, never for a read of a
        part.
        """
        self._locations: dict[Key, Location] = {}
        self._files: OrderedDict[str, int] = OrderedDict()
        self._maps: dict[str, pa.Buffer] = {}
        """The mapping of each file as long as it was when it was mapped; what was read keeps its
        pages.
        """
        self._next = 0
        self._file = -1
        self._end = 0
        """The end of what was written to the newest file; zeros follow up to the end of its
        block.
        """
        self._zeros = memoryview(bytes(min(BLOCK_BYTES, max_bytes // FILES)))
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o700)

    @property
    def num_bytes(self) -> int:
        return sum(self._files.values())

    def find(self, key: Key) -> Location | None:
        with self._lock:
            return self._locations.get(key)

    def read(self, key: Key) -> pa.RecordBatch | None:
        """The group's batch if it is here, mapped: no byte is read before it is touched."""
        with self._lock:
            place = self._locations.get(key)
            if place is None:
                return None
            file = self._maps.get(place.path)
            if file is None or file.size < place.offset + place.length:
                with pa.memory_map(place.path) as source:
                    file = self._maps[place.path] = source.read_buffer()
        return pa.ipc.read_record_batch(file.slice(place.offset, place.length), STREAM)

    def write(self, key: Key, batch: pa.RecordBatch) -> Location:
        """Append a group; the oldest file goes when there is no room."""
        check_schema(batch.schema, STREAM, "hot copy")
        message = batch.serialize()
        with self._lock:
            path = self._room_for(message.size)
            place = Location(path, self._append(path, message), message.size)
            self._locations[key] = place
        return place

    def _append(self, path: str, content: pa.Buffer) -> int:
        """Returns where it lies; a block that begins here is written whole, zeros included."""
        offset, end = self._end, self._end + content.size
        parts = [memoryview(content)]
        if end > self._files[path]:
            parts.append(self._zeros[: -end % len(self._zeros)])
        self._files[path] = max(self._files[path], offset + sum(map(len, parts)))
        _write(self._file, parts, offset)
        self._end = end
        return offset

    def _room_for(self, num_bytes: int) -> str:
        newest = next(reversed(self._files), "")
        if not newest or (self._end and self._end + num_bytes > self._max_bytes // FILES):
            newest = self._start_file()
        while len(self._files) > 1 and self.num_bytes + num_bytes > self._max_bytes:
            self._drop_oldest()
        return newest

    def _start_file(self) -> str:
        self._finish_file()
        path = str(self._directory / f"{self._next:06d}.arrows")
        self._next += 1
        self._file, self._end = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o600), 0
        self._files[path] = 0
        self._append(path, STREAM.serialize())
        return path

    def _finish_file(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _drop_oldest(self) -> None:
        path, _ = self._files.popitem(last=False)
        self._maps.pop(path, None)
        Path(path).unlink(missing_ok=True)
        self._locations = {
            key: location for key, location in self._locations.items() if location.path != path
        }

    def close(self) -> None:
        self._finish_file()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._files.clear()
        self._maps.clear()
        self._locations.clear()


def _write(file: int, parts: list[memoryview], offset: int) -> None:
    """All of the parts at an offset, in one call unless the kernel takes less. Raises OSError."""
    while parts:
        written = os.pwritev(file, parts, offset)
        offset += written
        while parts and written >= len(parts[0]):
            written -= len(parts.pop(0))
        if parts:
            parts[0] = parts[0][written:]
