"""One open part, and what is read of it.

Page checksums are verified, since Parquet reads a damaged page without a word.
"""

from __future__ import annotations

import base64
import errno
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prorl.errors import StorageError
from prorl.schema import ARROW_ERRORS, SEQUENCES, TABLES, check_version
from prorl.storage.files.layout import PartFile, RunDir
from prorl.storage.files.objects import open_object


class PartReader:
    """One open part; page checksums are verified.

    Raises StorageError for a damaged file, SchemaError for another version.
    """

    def __init__(self, run: RunDir, file: PartFile, footer: pq.FileMetaData | None = None) -> None:
        """`footer`: of this very file, from an earlier reader; to decode it takes longest."""
        self._where, self._table = run.path(file.path), file.table
        try:
            # Arrow's own file reads without Python's lock.
            self._file = pa.OSFile(self._where) if run.local else open_object(run.fs, self._where)
        except FileNotFoundError:
            raise StorageError(errno.ENOENT, f"{self._where} is gone") from None
        try:
            self._parquet = pq.ParquetFile(
                self._file, metadata=footer, page_checksum_verification=True, pre_buffer=False
            )
            about = self._parquet.schema_arrow.metadata or {}
            check_version(about.get(b"prorl.schema_version", b"").decode() or None, self._where)
        except ARROW_ERRORS as error:
            self._file.close()
            raise StorageError(f"{self._where}: {error}") from None

    @property
    def footer(self) -> pq.FileMetaData:
        """The Parquet footer, for the next reader of this file."""
        return self._parquet.metadata

    @property
    def columns(self) -> list[str]:
        return list(self._parquet.schema_arrow.names)

    @property
    def num_row_groups(self) -> int:
        return int(self._parquet.num_row_groups)

    @property
    def row_group_sizes(self) -> list[int]:
        about = self._parquet.metadata
        return [about.row_group(i).num_rows for i in range(about.num_row_groups)]

    def row_groups_with(self, rollout_id: int) -> list[int]:
        """Row groups that hold rows of a rollout.

        Found by their statistics, and where these name several by their keys.
        """
        about = self._parquet.metadata
        place = self._parquet.schema.names.index("rollout_id")
        found = []
        for i in range(about.num_row_groups):
            said = about.row_group(i).column(place).statistics
            if said is None or not said.has_min_max or said.min <= rollout_id <= said.max:
                found.append(i)
        return found if len(found) < 2 else [i for i in found if self._has(i, rollout_id)]

    def _has(self, row_group: int, rollout_id: int) -> bool:
        ids = self.read([row_group], ["rollout_id"]).column("rollout_id")
        return bool(pc.index(ids, rollout_id).as_py() >= 0)

    @property
    def raw_bytes(self) -> int:
        """The bytes of all of its columns, not compressed."""
        about = self._parquet.metadata
        return sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))

    def read(
        self, row_groups: list[int] | None = None, columns: list[str] | None = None
    ) -> pa.Table:
        """Rows in the table's schema (all row groups, all columns unless named)."""
        wanted = list(range(self.num_row_groups)) if row_groups is None else row_groups
        try:
            rows = self._parquet.read_row_groups(wanted, columns=columns, use_threads=False)
        except ARROW_ERRORS as error:
            raise StorageError(f"{self._where}: {error}") from None
        return rows.replace_schema_metadata(TABLES[self._table].metadata)

    def close(self) -> None:
        self._parquet.close()
        self._file.close()

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def read_part(run: RunDir, file: PartFile, columns: list[str] | None = None) -> pa.Table:
    with PartReader(run, file) as part:
        return part.read(columns=columns)


def read_file(run: RunDir, path: str, columns: list[str] | None = None) -> pa.Table:
    """All rows of a file of a run that no commit names, and its footer's metadata.

    On this thread alone: Arrow's threads would call Python for the bytes, and a process that ends
    while they do is aborted. Raises what Arrow and the filesystem raise, and ArrowInvalid when the
    types are not those that were written: no page and no digest of rows holds these.
    """
    with (
        run.open(path) as source,
        pq.ParquetFile(source, page_checksum_verification=True, pre_buffer=False) as file,
    ):
        rows = file.read(columns=columns, use_threads=False)
        written = _written_types(file)
    if written and any(written.get(field.name) != field.type for field in rows.schema):
        raise pa.ArrowInvalid("columns have other types than were written")
    return rows if columns is None else rows.select(columns)


def _written_types(file: pq.ParquetFile) -> dict[str, pa.DataType]:
    said = (file.metadata.metadata or {}).get(b"ARROW:schema")
    if said is None:
        return {}
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(said)))
    except ValueError as error:  # Arrow's own is one, too
        raise pa.ArrowInvalid(f"the written types cannot be read: {error}") from None
    return {field.name: field.type for field in schema}


def raw_bytes(run: RunDir, file: PartFile) -> int:
    """How many bytes a file's rows are when they are not compressed, from its footer."""
    with PartReader(run, file) as part:
        return part.raw_bytes


SEQUENCE_KEYS = [
    name
    for name in SEQUENCES.names
    if name in ("sequence_id", "rollout_id", "group_id", "sample_index", "attempt", "segment")
]
"""Columns of `sequences` that cost next to nothing to read."""
