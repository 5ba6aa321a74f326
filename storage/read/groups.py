"""Finds a group's sequences in the parts and gives the rows as one batch.

The index holds a few numbers per group, read from the key columns only. Rows come sorted by
(sample_index, segment), which makes the batch of a group the same whatever parts its members lie in
and however often it is read. A bounded cache keeps rows that were just committed, since a group is
mostly streamed right after its last member was written.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prorl.errors import NotFoundError, StorageError
from prorl.schema import ROUTING, SEQUENCES
from prorl.storage.files.layout import Commit, PartFile, RunDir
from prorl.storage.files.part_reader import PartReader, rows_of
from prorl.storage.files.parts import row_groups

CACHE_BYTES = 32 << 20

FOOTERS = 8
"""Decoded footers that are kept: of a large file it takes longer than to read one of its groups."""


class GroupRows(NamedTuple):
    """Row groups of one file in which a group has rows."""

    file: int
    row_groups: tuple[int, ...]


class GroupKeys(NamedTuple):
    """Holds which groups lie in each row group of a file."""

    file: PartFile
    commit_seq: int
    """The commit that names it, or the last one of the range that does."""
    groups: tuple[tuple[int, ...], ...]


class IndexUpdate(NamedTuple):
    """Holds what `GroupIndex.look` read: the commits, and the keys of files that are new."""

    commits: Sequence[Commit]
    new: tuple[GroupKeys, ...]


def read_keys(run: RunDir, file: PartFile, commit_seq: int) -> GroupKeys:
    with PartReader(run, file) as part:
        ids = part.read(columns=["group_id"]).column("group_id").to_numpy()
        sizes = part.row_group_sizes
    return GroupKeys(file, commit_seq, _by_row_group(ids, sizes))


def _by_row_group(ids: Any, sizes: Iterable[int]) -> tuple[tuple[int, ...], ...]:
    ends = np.cumsum(list(sizes))
    return tuple(tuple(np.unique(part).tolist()) for part in np.split(ids, ends[:-1]))


@dataclass(slots=True)
class GroupIndex:
    """Holds where each group of one run lies. Grows with the run's groups, about 0.4 kB each."""

    run: RunDir
    cache_bytes: int = CACHE_BYTES
    _files: list[GroupKeys] = field(default_factory=list)
    _where: dict[int, list[GroupRows]] = field(default_factory=dict)
    _tables: OrderedDict[tuple[str, int], pa.Table] = field(default_factory=OrderedDict)
    """Row groups that were just written or read, by file and number; at least the last one."""
    table_bytes: int = 0
    _footers: OrderedDict[str, pq.FileMetaData] = field(default_factory=OrderedDict)
    _routing: dict[str, tuple[PartFile, int]] = field(default_factory=dict)
    """Files of the table `routed_experts`, with the commit that names each."""

    def __contains__(self, group_id: int) -> bool:
        return group_id in self._where

    def add_written(
        self,
        file: PartFile,
        rows: pa.Table,
        commit_seq: int,
        routed_experts: PartFile | None = None,
    ) -> None:
        """Index a `sequences` part that was just written from `rows`, and its part of experts. The
        rows are remembered while there is room.
        """
        if routed_experts is not None:
            self._routing[routed_experts.path] = (routed_experts, commit_seq)
        ids, cuts = rows.column("group_id").to_numpy(), row_groups(rows)
        sizes = [stop - start for start, stop in cuts]
        self._add(GroupKeys(file, commit_seq, _by_row_group(ids, sizes)))
        for number, (start, stop) in enumerate(cuts):
            self._keep((file.path, number), rows.slice(start, stop - start))

    def _keep(self, key: tuple[str, int], rows: pa.Table) -> None:
        self._tables[key] = rows
        self.table_bytes += rows.nbytes
        while len(self._tables) > 1 and self.table_bytes > self.cache_bytes:
            self.table_bytes -= self._tables.popitem(last=False)[1].nbytes

    def _add(self, keys: GroupKeys) -> None:
        number = len(self._files)
        self._files.append(keys)
        by_group: dict[int, list[int]] = {}
        for row_group, ids in enumerate(keys.groups):
            for group_id in ids:
                by_group.setdefault(group_id, []).append(row_group)
        for group_id, numbers in by_group.items():
            self._where.setdefault(group_id, []).append(GroupRows(number, tuple(numbers)))

    def look(self, commits: Sequence[Commit] | None = None) -> IndexUpdate:
        """Reads the directory, or what `commits` name, with the keys of new files. Blocks; may
        run on any thread. Raises StorageError.
        """
        commits = self.run.commits() if commits is None else commits
        indexed = {keys.file.path for keys in self._files}
        new = tuple(
            read_keys(self.run, file, commit.commit_seq)
            for commit in commits
            for file in commit.files
            if file.table == "sequences" and file.rows and file.path not in indexed
        )
        return IndexUpdate(commits, new)

    def take_over(self, update: IndexUpdate) -> None:
        """Index the new files, a range in place of what it covers; younger files stay."""
        commits, new = update
        upto = max((commit.commit_seq for commit in commits if commit.first_seq), default=0)
        by_path = {keys.file.path: keys for keys in (*self._files, *new)}
        named = {
            file.path: commit.commit_seq
            for commit in commits
            for file in commit.files
            if file.path in by_path
        }
        files = [by_path[path]._replace(commit_seq=seq) for path, seq in named.items()]
        pending = [
            keys for keys in self._files if keys.commit_seq > upto and keys.file.path not in named
        ]
        last = max((commit.commit_seq for commit in commits), default=0)
        self._routing = {
            path: entry for path, entry in self._routing.items() if entry[1] > last
        } | {
            file.path: (file, commit.commit_seq)
            for commit in commits
            for file in commit.files
            if file.table == "routed_experts" and file.rows
        }
        self._files, self._where = [], {}
        for keys in (*files, *pending):
            self._add(keys)
        there = {keys.file.path for keys in self._files}
        for key in [key for key in self._tables if key[0] not in there]:
            self.table_bytes -= self._tables.pop(key).nbytes

    def read(self, group_id: int) -> pa.RecordBatch:
        """All sequences of a group, sorted by (sample_index, segment), without those of rollouts
        that could not be scored. Raises NotFoundError when no part has any.
        """
        rows = self._looking_again(lambda: self._read(group_id))
        if rows.column("reward").null_count:
            rows = rows.filter(pc.is_valid(rows.column("reward")))
            if not rows.num_rows:
                return pa.RecordBatch.from_pylist([], SEQUENCES)
        order = pc.sort_indices(
            rows, sort_keys=[("sample_index", "ascending"), ("segment", "ascending")]
        ).to_pylist()
        slices = [rows.slice(i, 1) for i in order]
        ((batch,)) = pa.concat_tables(slices).combine_chunks().to_batches()
        return batch.replace_schema_metadata(SEQUENCES.metadata)

    def routed_experts(self, group_id: int) -> pa.Table:
        """Rows of `routed_experts` for a group, in the order of `read`. Raises as `read`."""
        rollouts = self.read(group_id).column("rollout_id").unique().to_pylist()
        files = [file for file, _ in self._routing.values()]
        return self._looking_again(
            lambda: pa.concat_tables(
                [rows_of(self.run, files, ROUTING, rollout) for rollout in rollouts]
            )
        )

    def _looking_again(self, read: Callable[[], pa.Table]) -> pa.Table:
        try:
            return read()
        except StorageError as error:
            if error.errno != errno.ENOENT:
                raise
            # Compacted by somebody else, and the parts that we know are gone.
            self.take_over(self.look())
            return read()

    def _read(self, group_id: int) -> pa.Table:
        parts = self._where.get(group_id)
        if not parts:
            raise NotFoundError(f"group {group_id} has no sequences in {self.run.root}")
        return pa.concat_tables([self._rows(group_id, part) for part in parts])

    def _rows(self, group_id: int, where: GroupRows) -> pa.Table:
        file = self._files[where.file].file
        rows = pa.concat_tables([self._row_group(file, number) for number in where.row_groups])
        # A group's rows lie together in every file.
        (at,) = np.nonzero(rows.column("group_id").to_numpy() == group_id)
        return rows.slice(at[0], at[-1] + 1 - at[0])

    def _row_group(self, file: PartFile, number: int) -> pa.Table:
        if (rows := self._tables.get((file.path, number))) is not None:
            return rows
        with PartReader(self.run, file, self._footers.pop(file.path, None)) as part:
            self._footers[file.path] = part.footer
            if len(self._footers) > FOOTERS:
                self._footers.popitem(last=False)
            rows = part.read([number])
        self._keep((file.path, number), rows)
        return rows
