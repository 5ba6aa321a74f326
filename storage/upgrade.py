"""A run directory of an older prorl with everything that today's code writes.

    parts       packs with today's columns; what an old row has no value for is null or empty
    commits     a range that names these packs, in place of all before it
    partial/    attempts that did not commit, in today's shape, with a digest of their rows
    TABLE/empty.parquet   today's columns, so that plain globs have them
    manifest    a digest of itself; nothing that it says of the run changes

Parts go through a compaction (`compact.py`), which compares the rows before and after by value and
leaves the old files to `collect`; every other file is replaced by one rename (in an object store by
one put). So a run that is killed at any moment is the run as it was or with some files of today,
both of which are read, and a second upgrade ends what the first one began.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from prorl.errors import StorageError
from prorl.schema import SCORED, TABLES
from prorl.storage.collect import clear_replaced
from prorl.storage.compact import Step, alone, compact
from prorl.storage.durable import TEMP_MARK, WriteDurably, replace_durably, write_durably
from prorl.storage.layout import EMPTY, MANIFEST, PARTIAL, RunDir, manifest_digest
from prorl.storage.objects import remove
from prorl.storage.part_reader import read_file
from prorl.storage.parts import ROWS_DIGEST, empties, encode_partial


@dataclass(frozen=True, slots=True, kw_only=True)
class Upgraded:
    """What an upgrade wrote anew; nothing where the directory was of today."""

    parts: int
    """Files that packs stand for now."""
    files: tuple[str, ...]
    """Replaced ones, relative to the run."""

    def __bool__(self) -> bool:
        return bool(self.parts or self.files)


def upgrade(
    run: RunDir,
    *,
    write: WriteDurably = write_durably,
    replace: WriteDurably = replace_durably,
    step: Step = lambda name: None,
) -> Upgraded:
    """Bring a run directory up. No service may write to it meanwhile. Idempotent.

    Raises NotFoundError and SchemaError as `StoredRun`, StorageError, ConflictError while it is
    being compacted.
    """
    run.manifest()
    done = compact(run, renew=True, write=write, step=step)
    with alone(run):
        _clear(run)
        old = [*_empties(run), *_partials(run), *_manifest(run)]
        for path, content in old:
            replace(run.fs, run.path(path), content())
            step(path)
    return Upgraded(parts=done.num_before if done else 0, files=tuple(path for path, _ in old))


def _clear(run: RunDir) -> None:
    """What a killed upgrade, or a dead store, had half written; nobody writes to the run now."""
    list(clear_replaced(run))
    for name in list(run.names(PARTIAL)) if run.local else ():
        if name.startswith(TEMP_MARK):
            remove(run.fs, run.path(PARTIAL, name))


_Content = Callable[[], "bytes | pa.Buffer"]


def _empties(run: RunDir) -> list[tuple[str, _Content]]:
    made = empties(run.name)
    old: list[tuple[str, _Content]] = []
    for table, schema in TABLES.items():
        path = f"{table}/{EMPTY}"
        if run.has(path) and _footer(run, path).names != schema.names:
            old.append((path, partial(made.__getitem__, table)))
    return old


def _partials(run: RunDir) -> list[tuple[str, _Content]]:
    names = [f"{PARTIAL}/{name}" for name in sorted(run.names(PARTIAL)) if name[0].isdigit()]
    return [(path, partial(_partial, run, path)) for path in names if _is_old(run, path)]


def _is_old(run: RunDir, path: str) -> bool:
    found = _footer(run, path)
    fits = found.remove_metadata().equals(SCORED.remove_metadata())
    return not fits or ROWS_DIGEST not in (found.metadata or {})


def _partial(run: RunDir, path: str) -> pa.Buffer:
    rows = read_file(run, path).combine_chunks()
    columns = [
        fit(rows.column(field.name).combine_chunks(), field.type)
        if field.name in rows.column_names
        else nothing(field, rows.num_rows)
        for field in SCORED
    ]
    (row,) = pa.Table.from_arrays(columns, schema=SCORED).to_batches()
    return encode_partial(row, run.name)


def nothing(field: pa.Field, rows: int) -> pa.Array:
    """What an attempt holds of something that was not there then: null, none, zero or empty."""
    if field.nullable:
        return pa.nulls(rows, field.type)
    if pa.types.is_list(field.type):
        empty = pa.array([], field.type.value_type)
        offsets = pa.array(np.zeros(rows + 1, np.int32))
        return pa.ListArray.from_arrays(offsets, empty, type=field.type)
    zero: Any = "" if pa.types.is_string(field.type) else 0
    if pa.types.is_boolean(field.type) or pa.types.is_binary(field.type):
        zero = False if pa.types.is_boolean(field.type) else b""
    return pa.repeat(pa.scalar(zero, field.type), rows)


def fit(values: pa.Array, wanted: pa.DataType) -> pa.Array:
    """Values of an older type: fields that a struct lacks are null or empty."""
    if values.type == wanted:
        return values
    if pa.types.is_struct(wanted):
        had = {field.name for field in values.type}
        children = [
            fit(values.field(field.name), field.type)
            if field.name in had
            else nothing(field, len(values))
            for field in wanted
        ]
        return pa.StructArray.from_arrays(children, fields=list(wanted))
    if pa.types.is_list(wanted):
        inner = fit(values.flatten(), wanted.value_type)
        offsets = pc.subtract(values.offsets, values.offsets[0])
        return pa.ListArray.from_arrays(offsets, inner, type=wanted)
    return values.cast(wanted)


def _manifest(run: RunDir) -> list[tuple[str, _Content]]:
    values = run.manifest()
    if "digest" in values:
        return []
    said: dict[str, Any] = {**values, "digest": manifest_digest(values)}
    return [(MANIFEST, lambda: orjson.dumps(said, option=orjson.OPT_INDENT_2) + b"\n")]


def _footer(run: RunDir, path: str) -> pa.Schema:
    try:
        with run.open(path) as source:
            return pq.read_schema(source)
    except (pa.ArrowException, OSError) as error:
        raise StorageError(f"{run.path(path)}: {error}") from None
