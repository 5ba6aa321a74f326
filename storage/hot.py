"""The hot copy: kept groups as record batches in Arrow IPC stream files, for trainers on this host to map and for `do_get` to read.

One batch per group, in the SEQUENCES schema, at a known (path, offset, length). Files only grow and are never truncated: a mapping of one
stays valid after it is unlinked. The whole is bounded: when it is over its budget the oldest file goes, and its groups are written
again from the parts when somebody asks. Nothing here is fsynced, and all of it is removed at start and at `close`: it is disposable.
"""

from __future__ import annotations

import shutil
from collections import OrderedDict
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from prorl.schema import SEQUENCES, check_schema

FILES = 8
"""Into how many files the budget is divided: what is thrown away at once is an eighth of it."""


Key = tuple[str, int]
"""(run, group)."""


class Location(NamedTuple):
    """Where a group's batch lies: one encapsulated IPC message."""

    path: str
    offset: int
    length: int


class HotCopy:
    """The hot files of one store. Not thread-safe."""

    def __init__(self, directory: Path, max_bytes: int) -> None:
        self._directory, self._max_bytes = directory, max_bytes
        self._locations: dict[Key, Location] = {}
        self._files: OrderedDict[str, int] = OrderedDict()
        self._maps: dict[str, pa.MemoryMappedFile] = {}
        """Of each file as long as it was when it was mapped; what was read keeps its pages."""
        self._next = 0
        self._sink: pa.NativeFile | None = None
        self._writer: pa.ipc.RecordBatchStreamWriter | None = None
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True, mode=0o700)

    @property
    def num_bytes(self) -> int:
        """Of all files."""
        return sum(self._files.values())

    def find(self, key: Key) -> Location | None:
        """Where the group lies, if it is here."""
        return self._locations.get(key)

    def read(self, key: Key) -> pa.RecordBatch | None:
        """The group's batch, mapped: no byte is read before it is touched. None when it is not here."""
        place = self._locations.get(key)
        if place is None:
            return None
        source = self._maps.get(place.path)
        if source is None or source.size() < place.offset + place.length:
            source = self._maps[place.path] = pa.memory_map(place.path)
        source.seek(place.offset)
        return pa.ipc.read_record_batch(pa.ipc.read_message(source.read_buffer(place.length)), SEQUENCES)

    def write(self, key: Key, batch: pa.RecordBatch) -> Location:
        """Append a group; the oldest file goes when there is no room."""
        check_schema(batch.schema, SEQUENCES, "hot copy")
        path = self._room_for(batch.nbytes)
        assert self._sink is not None
        assert self._writer is not None
        offset = self._sink.tell()
        self._writer.write_batch(batch)
        self._sink.flush()
        end = self._sink.tell()
        self._files[path] = end
        location = self._locations[key] = Location(path, offset, end - offset)
        return location

    def _room_for(self, num_bytes: int) -> str:
        newest = next(reversed(self._files), "")
        if not newest or (self._files[newest] and self._files[newest] + num_bytes > self._max_bytes // FILES):
            newest = self._start_file()
        while len(self._files) > 1 and self.num_bytes + num_bytes > self._max_bytes:
            self._drop_oldest()
        return newest

    def _start_file(self) -> str:
        self._finish_file()
        path = str(self._directory / f"{self._next:06d}.arrows")
        self._next += 1
        self._sink = pa.OSFile(path, "wb")
        self._writer = pa.ipc.new_stream(self._sink, SEQUENCES)
        # The schema is written with the first batch: an empty one, so that a group's message stands alone at its offset.
        self._writer.write_batch(pa.RecordBatch.from_pylist([], schema=SEQUENCES))
        self._files[path] = 0
        return path

    def _finish_file(self) -> None:
        if self._writer is not None and self._sink is not None:
            self._writer.close()
            self._sink.close()
            self._writer = self._sink = None

    def _drop_oldest(self) -> None:
        path, _ = self._files.popitem(last=False)
        self._maps.pop(path, None)
        Path(path).unlink(missing_ok=True)
        self._locations = {key: location for key, location in self._locations.items() if location.path != path}

    def close(self) -> None:
        """Remove everything; idempotent."""
        self._finish_file()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._files.clear()
        self._maps.clear()
        self._locations.clear()
