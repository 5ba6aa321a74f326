"""One table of one part as Parquet bytes: the settings, the columns, the hashes.

Settings and their reasons (each measured): zstd level 1 is the knee of the curve; token ids and
logprobs are byte-stream-split and never dictionary-encoded; row groups of `sequences` hold 8-64
rows (up to 4,096 short ones in a large file) and end where a group ends, so that one group is read
with few neighbours (`row_groups.py`); page checksums on both sides, since Parquet reads a flipped
byte as data without them (`part_reader.py`). A part is built in memory (the writer bounds it by its
flush size), so that its hash and its file come from the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prorl.errors import SchemaError
from prorl.rows import row_hashes
from prorl.schema import SCORED, TABLES, check_schema
from prorl.storage.layout import PartFile
from prorl.storage.row_groups import cut_by_size, row_groups

ROWS_DIGEST = b"prorl.rows_sha256"
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
        for start, stop in row_groups(rows) if sequences else cut_by_size(rows):
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
