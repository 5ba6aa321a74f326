"""`Row`, one row of a message on an edge, and `grow`, which adds columns to rows.

The columns are those that a stage adds.

A message holds up to hundreds of rows, and a call into Arrow costs more than the values of a small
row. So a row is a place in its message and is not cut out of it; what a stage adds stays Python
values until it is converted for many rows at once; and rows that are neighbours in one message go
on together without a copy. The price: a message stays in memory as long as one of its rows does.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import ClassVar, NamedTuple

import numpy as np
import pyarrow as pa

from prorl.types import NO_FAILURE, Failure, Json


class Row(NamedTuple):
    batch: pa.RecordBatch
    place: int

    @property
    def as_batch(self) -> pa.RecordBatch:
        """A batch of one row, sharing memory."""
        return self.batch.slice(self.place, 1)

    def value(self, name: str) -> Json:
        """The value of a column, as a Python object; not to be changed."""
        if self.batch.num_rows == 1:
            return self.batch.column(name)[0].as_py()
        return _decoded(self.batch, name)[self.place]


_DECODED = 4


class _Recent(threading.local):
    """The last messages of several rows that each thread has read, as Python objects.

    `_DECODED` of each thread, with those of their columns that were read.

    The rows of a message are read together, and asking Arrow for one value costs a hundred times
    what the value costs in its column.
    """

    def __init__(self) -> None:
        self.columns: dict[int, tuple[pa.RecordBatch, dict[str, list[Json]]]] = {}


_recent = _Recent()


def _decoded(batch: pa.RecordBatch, name: str) -> list[Json]:
    recent = _recent.columns
    decoded = recent.get(id(batch))  # its own while it is in here
    if decoded is None:
        decoded = recent[id(batch)] = (batch, {})
        if len(recent) > _DECODED:
            del recent[next(iter(recent))]
    values = decoded[1].get(name)
    if values is None:
        values = decoded[1][name] = batch.column(name).to_pylist()
    return values


def rows(batch: pa.RecordBatch) -> list[Row]:
    return [Row(batch, i) for i in range(batch.num_rows)]


def stack(parts: Sequence[Row]) -> pa.RecordBatch:
    """Rows as one batch, in this order; copies nothing if they are neighbours in one message."""
    slices: list[pa.RecordBatch] = []
    start = 0
    for i in range(1, len(parts) + 1):
        if (
            i == len(parts)
            or parts[i].place != parts[i - 1].place + 1
            or parts[i].batch is not parts[start].batch
        ):
            slices.append(parts[start].batch.slice(parts[start].place, i - start))
            start = i
    return slices[0] if len(slices) == 1 else pa.concat_batches(slices)


@dataclass(frozen=True, slots=True, kw_only=True)
class Added:
    """Holds what a stage adds to one row: a record with a field for each added column, of its name.
    Structs are records or tuples in the order of their fields.
    """

    schema: ClassVar[pa.Schema]
    """The schema of the edge that the stage gives: the columns that it takes, then those that it
    adds.
    """

    @property
    def failure(self) -> Failure:
        """Tells what this stage itself says went wrong."""
        return NO_FAILURE

    @property
    def is_committed(self) -> bool:
        """Tells whether the store makes the row the rollout's; else the attempt ends with its
        failure.
        """
        return self.failure.failure_class.trains

    @property
    def num_bytes(self) -> int:
        """Bytes that the values will take in Arrow, about."""
        return _weight(getattr(self, field.name) for field in fields(self))


def grow(before: Sequence[Row], added: Sequence[Added]) -> pa.RecordBatch:
    """Rows of the next edge. Raises what Arrow raises for values that are not of their columns'
    types.
    """
    stacked, edge = stack(before), added[0].schema
    struct = pa.struct(list(edge)[stacked.num_columns :])
    names = [field.name for field in struct]
    values = [tuple([getattr(record, name) for name in names]) for record in added]
    columns = pa.array(values, struct).flatten()
    return pa.RecordBatch.from_arrays([*stacked.columns, *columns], schema=edge)


def _weight(values: Iterable[Json]) -> int:
    """Returns the bytes of text, bytes and arrays; 8 for anything else."""
    total = 0
    for value in values:
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, (list, tuple)):
            total += _weight(value)
        else:
            total += value.nbytes if isinstance(value, np.ndarray) else 8
    return total


def row_hashes(batch: pa.RecordBatch) -> list[str]:
    """BLAKE2b-128 of each row by value: independent of slicing, chunking, offsets and IPC layout.

    >>> import pyarrow as pa
    >>> batch = pa.record_batch({"a": pa.array([1, 2]), "b": pa.array([[1], [2, 3]])})
    >>> row_hashes(batch)[1] == row_hashes(batch.slice(1))[0]
    True
    """
    columns = [_row_bytes(column) for column in batch.columns]
    digests = []
    for parts in zip(*columns, strict=True):
        digest = hashlib.blake2b(digest_size=16)
        for part in parts:
            digest.update(len(part).to_bytes(8, "little"))
            digest.update(part)
        digests.append(digest.hexdigest())
    return digests


def _row_bytes(column: pa.Array) -> list[bytes]:
    dtype = column.type
    if (
        pa.types.is_list(dtype)
        and pa.types.is_primitive(dtype.value_type)
        and not column.null_count
    ):
        offsets = (column.offsets.to_numpy() - column.offsets[0].as_py()).tolist()
        flat = np.ascontiguousarray(column.flatten().to_numpy(zero_copy_only=False))
        return [flat[a:b].tobytes() for a, b in pairwise(offsets)]
    if (pa.types.is_integer(dtype) or pa.types.is_floating(dtype)) and not column.null_count:
        flat = np.ascontiguousarray(column.to_numpy(zero_copy_only=False))
        return [value.tobytes() for value in flat]
    return [repr(value).encode() for value in column.to_pylist()]
