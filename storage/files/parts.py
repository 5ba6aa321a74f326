"""One table of one part as Parquet bytes: the settings, the columns, the hashes.

Settings and their reasons (each measured): zstd level 1 is the knee of the curve; token ids and
logprobs are byte-stream-split and never dictionary-encoded; row groups of `sequences` hold 8-64
rows (up to 4,096 short ones in a large file) and end where a group ends, so that one group is read
with few neighbours (`row_groups`); page checksums on both sides, since Parquet reads a flipped
byte as data without them (`part_reader.py`). A part is built in memory (the writer bounds it by its
flush size), so that its hash and its file come from the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prorl.errors import SchemaError
from prorl.schema import SCORED, TABLES, schema_name
from prorl.schema.rows import row_hashes
from prorl.storage.files.layout import PartFile

ROWS_DIGEST = b"prorl.rows_sha256"
COLUMNS_DIGEST = b"prorl.columns_sha256"
_NOTHING: Mapping[bytes, bytes] = {}

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


BY_GROUP = ("sequences", "routed_experts")
"""Tables that are read a group at a time."""


def encode(table: str, rows: pa.Table, run_id: str, part: str) -> pa.Buffer:
    """Parquet bytes of one table of a part; the column `run_id` is filled in."""
    rows = conform(rows, table, run_id)
    return _encode(table, rows, _footer(rows.schema, run_id, part))


def _encode(table: str, rows: pa.Table, schema: pa.Schema) -> pa.Buffer:
    sequences = table == "sequences"
    cuts = row_groups(rows) if table in BY_GROUP else cut_by_size(rows)
    return _parquet(
        schema,
        [rows.slice(start, stop - start) for start, stop in cuts],
        **(UNPACKED if rows.get_total_buffer_size() < SMALL_BYTES else PACKED),
        use_dictionary=False if sequences else _TEXT[table],
        column_encoding=_SPLIT if sequences else None,
        write_statistics=_SCALARS[table],
    )


SMALL_BYTES = 256 << 10
"""A smaller table is not compressed: zstd makes a context for each column, which costs more than
all else of a small file, and saves little on short pages. Compaction compresses what it merges.
"""

PACKED: dict[str, Any] = {"compression": "zstd", "compression_level": 1}
UNPACKED: dict[str, Any] = {"compression": "none", "compression_level": None}


def _parquet(schema: pa.Schema, row_groups: Iterable[pa.Table], **settings: Any) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    with pq.ParquetWriter(
        sink, schema, write_page_checksum=True, **{**PACKED, **settings}
    ) as writer:
        for rows in row_groups:
            if rows.num_rows:
                writer.write_table(rows, row_group_size=rows.num_rows)
    return sink.getvalue()


def conform(rows: pa.Table, table: str, run_id: str) -> pa.Table:
    """Rows as the table has them, `run_id` being the run's, then their further columns. Raises as
    `aligned`.
    """
    rows = aligned(rows, TABLES[table], f"a part of {table}", keep_unknown=True)
    if "run_id" not in rows.column_names:
        return rows
    ids = pa.chunked_array([pa.repeat(pa.scalar(run_id, pa.utf8()), rows.num_rows)])
    place = rows.column_names.index("run_id")
    return rows.set_column(place, rows.schema.field(place), ids)


def aligned(
    rows: pa.Table, schema: pa.Schema, where: str, *, keep_unknown: bool = False
) -> pa.Table:
    """Rows in the columns of a schema and in their order, whichever prorl wrote them.

    A nullable column that they lack is null: it is younger than they are. A column that the schema
    lacks is left out; with `keep_unknown` it follows the others, for those that write the rows
    anew. Raises SchemaError when a column without nulls is missing, or for another type.

    >>> young = pa.schema([pa.field("id", pa.int64(), nullable=False), ("note", pa.utf8())])
    >>> aligned(pa.table({"id": [7]}), young, "a part").to_pylist()
    [{'id': 7, 'note': None}]
    """
    columns, fields = [], list(schema)
    present = set(rows.column_names)
    for field in schema:
        column = rows.column(field.name) if field.name in present else None
        if column is None and field.nullable:
            column = pa.chunked_array([pa.nulls(rows.num_rows, field.type)])
        if column is None or column.type != field.type:
            raise SchemaError(
                f"{where} differs in {field.name}", f"the columns of {schema_name(schema)}"
            )
        columns.append(column)
    if keep_unknown:
        unknown = [field for field in rows.schema if field.name not in schema.names]
        fields += unknown
        columns += [rows.column(field.name) for field in unknown]
    return pa.Table.from_arrays(columns, schema=pa.schema(fields, metadata=schema.metadata))


def encode_partial(rows: pa.RecordBatch, run_id: str) -> pa.Buffer:
    table = pa.Table.from_batches([rows])
    schema = _footer(SCORED, run_id, "", {ROWS_DIGEST: rows_digest(table).encode()})
    return _parquet(schema, [table], use_dictionary=False, column_encoding=_NESTED_SPLIT)


def encode_by_itself(rows: pa.Table, about: Mapping[bytes, bytes]) -> pa.Buffer:
    """Parquet bytes of a file that no commit names: its footer says a digest of its rows, too."""
    metadata = {**about, ROWS_DIGEST: rows_digest(rows).encode()}
    return _parquet(rows.schema.with_metadata(metadata), [rows])


def _footer(
    schema: pa.Schema, run_id: str, part: str, more: Mapping[bytes, bytes] = _NOTHING
) -> pa.Schema:
    about = {b"prorl.run_id": run_id.encode(), b"prorl.part": part.encode()}
    return schema.with_metadata({**schema.metadata, **about, **more})


def rows_digest(rows: pa.Table) -> str:
    """Returns the SHA-256 of the rows by value, in order: `ROWS_DIGEST` of uncommitted files."""
    digest = hashlib.sha256()
    for batch in rows.combine_chunks().replace_schema_metadata().to_batches():
        for each in row_hashes(batch):
            digest.update(each.encode())
    return digest.hexdigest()


def columns_digest(schema: pa.Schema) -> str:
    """SHA-256 of names and types; `COLUMNS_DIGEST` of files without rows, which no commit names."""
    columns = "\n".join(f"{field.name} {field.type}" for field in schema)
    return hashlib.sha256(columns.encode()).hexdigest()


def part_file(table: str, part: str, rows: pa.Table, content: pa.Buffer) -> PartFile:
    ids: dict[str, int] = {}
    if rows.num_rows and "rollout_id" in rows.column_names:
        bounds = pc.min_max(rows.column("rollout_id")).as_py()
        ids = {"first": bounds["min"], "last": bounds["max"]}
    return PartFile(
        table=table,
        path=f"{table}/{part}.parquet",
        rows=rows.num_rows,
        bytes=content.size,
        sha256=hashlib.sha256(content).hexdigest(),
        **ids,
    )


def empties(run_id: str) -> Mapping[str, pa.Buffer]:
    return {
        name: _encode(
            name,
            schema.empty_table(),
            _footer(schema, run_id, "", {COLUMNS_DIGEST: columns_digest(schema).encode()}),
        )
        for name, schema in TABLES.items()
    }


MIN_GROUP_ROWS, MAX_GROUP_ROWS = 8, 64
LARGE_ROWS, LARGE_GROUP_ROWS = 1024, 4096
ROW_GROUP_BYTES, WIDE_ROW_GROUP_BYTES = 1 << 20, 2 << 20
WIDE = 32
"""Columns of a table whose footer grows fast with its row groups."""


def cut_by_size(rows: pa.Table) -> list[tuple[int, int]]:
    """Row groups of the size at which footer and row group cost who reads a few rows the same."""
    size = WIDE_ROW_GROUP_BYTES if rows.num_columns >= WIDE else ROW_GROUP_BYTES
    each = max(1024, rows.num_rows * size // max(1, rows.nbytes))
    return [(i, min(i + each, rows.num_rows)) for i in range(0, rows.num_rows, each)]


def row_groups(rows: pa.Table) -> list[tuple[int, int]]:
    """Returns where to cut `sequences` rows that are sorted by group: at borders of groups, if
    possible.

    A row group has 8-64 rows, of short rows in a large file up to `ROW_GROUP_BYTES` and 4,096 of
    them: whoever opens it decodes a footer that grows with its row groups. A group of more rows is
    cut inside; the last row group may be short.
    """
    least, most = MIN_GROUP_ROWS, MAX_GROUP_ROWS
    if rows.num_rows > LARGE_ROWS:
        width = max(1, rows.nbytes // rows.num_rows)
        least = min(LARGE_GROUP_ROWS, max(least, ROW_GROUP_BYTES // width))
        most = max(most, least)
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
