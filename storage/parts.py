"""One table of one part as Parquet bytes and back: the settings, the row groups, the hashes.

Settings and their reasons (each measured): zstd level 1 is the knee of the
curve; token ids and logprobs are byte-stream-split and never dictionary-encoded; row groups of
`sequences` hold 8-64 rows (up to 4,096 short ones in a large file) and end where a group ends, so
that one group is read with few neighbours; page checksums on both sides, since Parquet reads a
flipped byte as data without them. A part is built in memory (the writer bounds it by its flush
size), so that its hash and its file come from the same bytes.
"""

from __future__ import annotations

import base64
import errno
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prorl.errors import SchemaError, StorageError
from prorl.rows import row_hashes
from prorl.schema import SCORED, SEQUENCES, TABLES, check_schema, check_version
from prorl.storage.durable import open_object
from prorl.storage.layout import PartFile, RunDir

ROWS_DIGEST = b"prorl.rows_sha256"
_NOTHING: Mapping[bytes, bytes] = {}

MIN_GROUP_ROWS = 8
MAX_GROUP_ROWS = 64
ROW_GROUP_BYTES = 1 << 20
WIDE_ROW_GROUP_BYTES = 2 << 20
WIDE = 32
"""Columns of a table whose footer grows fast with its row groups."""
LARGE_ROWS = 1024
LARGE_GROUP_ROWS = 4096
SMALL_ROW_GROUP_BYTES = 1 << 20

_SPLIT = {
    "token_ids.list.element": "BYTE_STREAM_SPLIT",
    "logprobs.list.element": "BYTE_STREAM_SPLIT",
}
_NESTED_SPLIT = {
    f"sequences.list.element.{column}": encoding for column, encoding in _SPLIT.items()
}

_SCALARS = {
    name: [f.name for f in schema if not pa.types.is_nested(f.type)]
    for name, schema in TABLES.items()
}
_TEXT = {
    name: [f.name for f in schema if pa.types.is_string(f.type)] for name, schema in TABLES.items()
}


def encode(table: str, rows: pa.Table, run_id: str, part: str) -> pa.Buffer:
    """Parquet bytes of one table of a part; the column `run_id` is filled in."""
    rows = conform(rows, table, run_id)
    sequences = table == "sequences"
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink,
        _footer(TABLES[table], run_id, part),
        compression="zstd",
        compression_level=1,
        use_dictionary=False if sequences else _TEXT[table],
        column_encoding=_SPLIT if sequences else None,
        write_statistics=_SCALARS[table],
        write_page_checksum=True,
    ) as writer:
        for start, stop in row_groups(rows) if sequences else _by_size(rows):
            if stop > start:
                writer.write_table(rows.slice(start, stop - start), row_group_size=stop - start)
    return sink.getvalue()


def conform(rows: pa.Table, table: str, run_id: str) -> pa.Table:
    """Rows of an older file with all columns of today; `run_id` is the run's.

    Others are null, or empty text where null is not allowed. Raises SchemaError for columns that
    this table does not have, or lacks and cannot make up.
    """
    schema = TABLES[table]
    columns = {name: rows.column(name) for name in rows.column_names}
    for field in schema:
        if field.name == "run_id":
            columns[field.name] = pa.repeat(pa.scalar(run_id, pa.utf8()), rows.num_rows)
        elif field.name not in columns and (field.nullable or pa.types.is_string(field.type)):
            columns[field.name] = blank(field, rows.num_rows)
    if set(columns) != set(schema.names):
        check_schema(rows.schema, schema, f"a part of {table}")
    return pa.Table.from_arrays([columns[name] for name in schema.names], schema=schema)


def blank(field: pa.Field, rows: int) -> pa.Array:
    """What a column holds in rows from before it was: null, or empty text.

    Raises SchemaError for a column that can be neither.
    """
    if field.nullable:
        return pa.nulls(rows, field.type)
    if not pa.types.is_string(field.type):
        raise SchemaError(f"rows without {field.name}", f"a column {field.name}")
    return pa.repeat(pa.scalar("", field.type), rows)


def is_of_today(run: RunDir, file: PartFile) -> bool:
    """Whether a part has the columns that are written now. Raises StorageError."""
    with PartReader(run, file) as part:
        names: list[str] = TABLES[file.table].names
        return part.columns == names


def _by_size(rows: pa.Table) -> list[tuple[int, int]]:
    """Row groups of about the size at which footer and row group cost a reader the same.

    For a reader of a few rows of a large file.
    """
    size = WIDE_ROW_GROUP_BYTES if rows.num_columns >= WIDE else ROW_GROUP_BYTES
    each = max(1024, rows.num_rows * size // max(1, rows.nbytes))
    return [(i, min(i + each, rows.num_rows)) for i in range(0, rows.num_rows, each)]


def encode_partial(row: pa.RecordBatch, run_id: str) -> pa.Buffer:
    """Parquet bytes of an attempt that did not commit, in SCORED's shape."""
    sink = pa.BufferOutputStream()
    digest = rows_digest(pa.Table.from_batches([row]))
    with pq.ParquetWriter(
        sink,
        _footer(SCORED, run_id, "", {ROWS_DIGEST: digest.encode()}),
        compression="zstd",
        compression_level=1,
        use_dictionary=False,
        column_encoding=_NESTED_SPLIT,
        write_page_checksum=True,
    ) as writer:
        writer.write_batch(row)
    return sink.getvalue()


def _footer(
    schema: pa.Schema, run_id: str, part: str, more: Mapping[bytes, bytes] = _NOTHING
) -> pa.Schema:
    about = {b"prorl.run_id": run_id.encode(), b"prorl.part": part.encode()}
    return schema.with_metadata({**schema.metadata, **about, **more})


def rows_digest(rows: pa.Table) -> str:
    """SHA-256 of the rows by value, in their order.

    What a file that no commit names says of itself, as `ROWS_DIGEST` in its footer.
    """
    found = hashlib.sha256()
    for batch in rows.combine_chunks().replace_schema_metadata().to_batches():
        for each in row_hashes(batch):
            found.update(each.encode())
    return found.hexdigest()


def row_groups(rows: pa.Table) -> list[tuple[int, int]]:
    """Where to cut `sequences` rows that are sorted by group: at borders of groups, if possible.

    A row group has 8-64 rows. A group of more rows is cut inside; the last row group may be short.
    """
    least, most = _row_group_bounds(rows)
    ids = rows.column("group_id").to_numpy()
    borders = [*(np.flatnonzero(np.diff(ids)) + 1).tolist(), len(ids)]
    cuts, start = [], 0
    for border, following in zip(borders, [*borders[1:], None], strict=True):
        while border - start > most:
            cuts.append((start, start + most))
            start += most
        if following is None or border - start >= least or following - start > most:
            cuts.append((start, border))
            start = border
    return cuts


def _row_group_bounds(rows: pa.Table) -> tuple[int, int]:
    """Fewest and most rows of a row group.

    In a large file short rows stand more together, up to `SMALL_ROW_GROUP_BYTES` and 4,096: whoever
    opens it decodes a footer that grows with its row groups.
    """
    least, most = MIN_GROUP_ROWS, MAX_GROUP_ROWS
    if rows.num_rows > LARGE_ROWS:
        width = max(1, rows.nbytes // rows.num_rows)
        least = min(LARGE_GROUP_ROWS, max(least, SMALL_ROW_GROUP_BYTES // width))
        most = max(most, least)
    return least, most


def part_file(table: str, part: str, rows: pa.Table, content: pa.Buffer) -> PartFile:
    """The record by which a commit names a file with these rows and this content."""
    ids: dict[str, int] = {}
    if rows.num_rows and "rollout_id" in rows.column_names:
        found = pc.min_max(rows.column("rollout_id")).as_py()
        ids = {"first": found["min"], "last": found["max"]}
    return PartFile(
        table=table,
        path=f"{table}/{part}.parquet",
        rows=rows.num_rows,
        bytes=content.size,
        sha256=hashlib.sha256(content).hexdigest(),
        **ids,
    )


def empties(run_id: str) -> Mapping[str, pa.Buffer]:
    """The content of a part without rows, for each table."""
    return {name: encode(name, schema.empty_table(), run_id, "") for name, schema in TABLES.items()}


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
        except (pa.ArrowException, OSError) as error:
            self._file.close()
            raise StorageError(f"{self._where}: {error}") from None

    @property
    def footer(self) -> pq.FileMetaData:
        """The Parquet footer, for the next reader of this file."""
        return self._parquet.metadata

    @property
    def columns(self) -> list[str]:
        """Names of its columns, in order."""
        return list(self._parquet.schema_arrow.names)

    @property
    def num_row_groups(self) -> int:
        """How many row groups it has."""
        return int(self._parquet.num_row_groups)

    @property
    def row_group_sizes(self) -> list[int]:
        """Number of rows of each row group, in order."""
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
        except (pa.ArrowException, OSError) as error:
            raise StorageError(f"{self._where}: {error}") from None
        return rows.replace_schema_metadata(TABLES[self._table].metadata)

    def close(self) -> None:
        """Close the file; calling it again does nothing."""
        self._parquet.close()
        self._file.close()

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def read_part(run: RunDir, file: PartFile, columns: list[str] | None = None) -> pa.Table:
    """All rows of one file."""
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
