"""Parts read: one that is open, whole ones, and several as a dataset.

Page checksums are verified, since Parquet reads a damaged page without a word.
"""

from __future__ import annotations

import base64
import errno
from collections.abc import Iterable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from prorl.errors import StorageError
from prorl.schema import ARROW_ERRORS, TABLES, check_version
from prorl.storage.files.layout import PartFile, RunDir
from prorl.storage.files.objects import failures
from prorl.storage.files.parts import aligned


class PartReader:
    """One open part. Raises StorageError for a damaged file, SchemaError for another version."""

    def __init__(self, run: RunDir, file: PartFile, footer: pq.FileMetaData | None = None) -> None:
        """`footer`: of this very file, from an earlier reader; to decode it takes longest."""
        self._where, self._schema = run.path(file.path), TABLES[file.table]
        try:
            # Arrow's own file reads without Python's lock.
            self._file = pa.OSFile(self._where) if run.local else run.open(file.path)
        except FileNotFoundError:
            raise StorageError(errno.ENOENT, f"{self._where} is gone") from None
        except failures() as error:
            raise StorageError(f"cannot open {self._where}: {error}") from error
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
        return self._parquet.metadata

    @property
    def num_row_groups(self) -> int:
        return int(self._parquet.num_row_groups)

    @property
    def row_group_sizes(self) -> list[int]:
        about = self._parquet.metadata
        return [about.row_group(i).num_rows for i in range(about.num_row_groups)]

    def read(
        self,
        row_groups: list[int] | None = None,
        columns: list[str] | None = None,
        *,
        keep_unknown: bool = False,
    ) -> pa.Table:
        """Rows in the columns of the table, as `aligned` says. Raises StorageError, SchemaError."""
        numbers = list(range(self.num_row_groups)) if row_groups is None else row_groups
        schema = self._schema
        if columns is not None:
            schema = pa.schema(map(schema.field, columns), metadata=schema.metadata)
        names = None if keep_unknown else schema.names
        try:
            rows = self._parquet.read_row_groups(numbers, columns=names, use_threads=False)
        except ARROW_ERRORS as error:
            raise StorageError(f"{self._where}: {error}") from None
        return aligned(rows, schema, self._where, keep_unknown=keep_unknown)

    def close(self) -> None:
        self._parquet.close()
        self._file.close()

    def __enter__(self) -> PartReader:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def read_part(
    run: RunDir,
    file: PartFile,
    columns: list[str] | None = None,
    *,
    keep_unknown: bool = False,
) -> pa.Table:
    with PartReader(run, file) as part:
        return part.read(columns=columns, keep_unknown=keep_unknown)


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
    return rows


def _written_types(file: pq.ParquetFile) -> dict[str, pa.DataType]:
    encoded = (file.metadata.metadata or {}).get(b"ARROW:schema")
    if encoded is None:
        return {}
    try:
        schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(encoded)))
    except ValueError as error:  # Arrow's own is one, too
        raise pa.ArrowInvalid(f"the written types cannot be read: {error}") from None
    return {field.name: field.type for field in schema}


def raw_bytes(run: RunDir, file: PartFile) -> int:
    """Returns how many bytes a file's rows are when they are not compressed, from its footer."""
    with PartReader(run, file) as part:
        about = part.footer
    return sum(about.row_group(i).total_byte_size for i in range(about.num_row_groups))


def dataset(run: RunDir, paths: Sequence[str], schema: pa.Schema) -> ds.Dataset:
    """Files as one table, lazily; a column that a file lacks is null."""
    if not paths:
        return ds.dataset(schema.empty_table())
    scan = ds.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=not run.local)
    # Nothing is asked of the filesystem before rows are read.
    return ds.FileSystemDataset.from_paths(
        [run.path(path) for path in paths],
        schema=schema,
        filesystem=run.arrow_filesystem,
        format=ds.ParquetFileFormat(default_fragment_scan_options=scan),
    )


def rows_of(run: RunDir, files: Iterable[PartFile], schema: pa.Schema, rollout: int) -> pa.Table:
    """A rollout's rows; files that their commits say not to hold it are not opened. Raises
    StorageError.
    """
    paths = [file.path for file in files if file.first <= rollout <= file.last]
    try:
        return dataset(run, paths, schema).to_table(filter=pc.field("rollout_id") == rollout)
    except ARROW_ERRORS as error:
        raise StorageError(getattr(error, "errno", None), f"{run.root}: {error}") from None
