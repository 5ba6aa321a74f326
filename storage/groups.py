"""Finds a group's sequences in the parts: which row groups of which files hold it, and the rows as
one batch.

The index holds a few numbers per group, read from the key columns only. Rows come sorted by
(sample_index, segment), which makes the batch of a group the same whatever parts its members lie in
and however often it is read. A bounded cache keeps rows that were just committed, since a group is
mostly streamed right after its last member was written.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from prorl.errors import NotFoundError
from prorl.schema import SEQUENCES
from prorl.storage.layout import PartFile, RunDir
from prorl.storage.parts import PartReader, row_groups

CACHE_BYTES = 32 << 20


class Place(NamedTuple):
    """Row groups of one file in which a group has rows."""

    file: int
    row_groups: tuple[int, ...]


@dataclass(slots=True)
class GroupIndex:
    """Where each group of one run lies."""

    run: RunDir
    cache_bytes: int = CACHE_BYTES
    _files: list[PartFile] = field(default_factory=list)
    _places: dict[int, list[Place]] = field(default_factory=dict)
    _cache: OrderedDict[tuple[int, int], pa.Table] = field(default_factory=OrderedDict)
    cached_bytes: int = 0

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._places

    def add_written(self, file: PartFile, rows: pa.Table) -> None:
        """Index a `sequences` part that was just written from `rows`, and remember the rows while
        there is room.
        """
        ids = rows.column("group_id").to_numpy()
        number = self._place(file, [ids[start:stop] for start, stop in row_groups(rows)])
        for group_id in np.unique(ids).tolist():
            start, stop = np.searchsorted(ids, [group_id, group_id + 1])
            self._remember((group_id, number), rows.slice(start, stop - start))

    def add_stored(self, file: PartFile) -> None:
        """Index a `sequences` part on disk by its key column."""
        with PartReader(self.run, file) as part:
            ids = [
                part.read([i], ["group_id"]).column("group_id").to_numpy()
                for i in range(part.num_row_groups)
            ]
        self._place(file, ids)

    def _place(self, file: PartFile, ids_by_row_group: list[np.ndarray[Any, Any]]) -> int:
        number = len(self._files)
        self._files.append(file)
        found: dict[int, list[int]] = {}
        for row_group, ids in enumerate(ids_by_row_group):
            for group_id in np.unique(ids).tolist():
                found.setdefault(group_id, []).append(row_group)
        for group_id, numbers in found.items():
            self._places.setdefault(group_id, []).append(Place(number, tuple(numbers)))
        return number

    def _remember(self, key: tuple[int, int], rows: pa.Table) -> None:
        self._cache[key] = rows
        self.cached_bytes += rows.nbytes
        while self.cached_bytes > self.cache_bytes and self._cache:
            _, dropped = self._cache.popitem(last=False)
            self.cached_bytes -= dropped.nbytes

    def forget(self, group_ids: Iterable[int]) -> None:
        """Drop cached rows of groups that will not be read soon (dropped, or served); the index
        stays.
        """
        for group_id in group_ids:
            for place in self._places.get(group_id, ()):
                if (rows := self._cache.pop((group_id, place.file), None)) is not None:
                    self.cached_bytes -= rows.nbytes

    def read(self, group_id: int) -> pa.RecordBatch:
        """All sequences of a group, sorted by (sample_index, segment).

        Raises NotFoundError when no part has any.
        """
        places = self._places.get(group_id)
        if not places:
            raise NotFoundError(f"group {group_id} has no sequences in {self.run.root}")
        rows = pa.concat_tables([self._rows(group_id, place) for place in places])
        order = pc.sort_indices(
            rows, sort_keys=[("sample_index", "ascending"), ("segment", "ascending")]
        ).to_pylist()
        slices = [rows.slice(i, 1) for i in order]
        ((batch,)) = pa.concat_tables(slices).combine_chunks().to_batches()
        return batch.replace_schema_metadata(SEQUENCES.metadata)

    def _rows(self, group_id: int, place: Place) -> pa.Table:
        cached = self._cache.get((group_id, place.file))
        if cached is not None:
            return cached
        with PartReader(self.run, self._files[place.file]) as part:
            rows = part.read(list(place.row_groups))
        ids = rows.column("group_id").to_numpy()
        start, stop = np.searchsorted(ids, [group_id, group_id + 1])
        return rows.slice(start, stop - start)
