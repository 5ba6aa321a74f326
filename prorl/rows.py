"""`Row`, one row of a message on an edge, and `grow`, which gives rows the columns that a stage
adds.

A message holds up to hundreds of rows, and a call into Arrow costs more than the values of a small
row. So a row is a place in its message and is not cut out of it; what a stage adds stays Python
values until it is converted for many rows at once; and rows that are neighbours in one message go
on together without a copy. The price: a message stays in memory as long as one of its rows does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from prorl.schema import LEASED, RAN, READY, SCORED
from prorl.types import Json


class Row(NamedTuple):
    """One row of a batch."""

    batch: pa.RecordBatch
    place: int

    @property
    def alone(self) -> pa.RecordBatch:
        """As a batch of one row, sharing memory."""
        return self.batch.slice(self.place, 1)

    def value(self, name: str) -> Json:
        """One of its values."""
        return self.batch.column(name)[self.place].as_py()


def rows(batch: pa.RecordBatch) -> list[Row]:
    """All rows of a batch."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """What one edge has more than the edge before it."""

    schema: pa.Schema
    """Of the edge."""
    added: pa.StructType
    places: dict[str, int]
    """Of each added column among the added ones."""

    @classmethod
    def between(cls, before: pa.Schema, after: pa.Schema) -> Step:
        """From one edge's schema to the next one's."""
        fields = list(after)[len(before) :]
        return cls(after, pa.struct(fields), {field.name: i for i, field in enumerate(fields)})


TO_READY, TO_RAN, TO_SCORED = (
    Step.between(LEASED, READY),
    Step.between(READY, RAN),
    Step.between(RAN, SCORED),
)


class Added(NamedTuple):
    """What a stage adds to one row: values in the order of the step's columns, structs as tuples in
    the order of their fields.
    """

    step: Step
    values: tuple[Json, ...]

    def value(self, name: str) -> Json:
        """Of an added column."""
        return self.values[self.step.places[name]]

    @property
    def num_bytes(self) -> int:
        """About what it will weigh."""
        return _weight(self.values)


def grow(before: Sequence[Row], added: Sequence[Added]) -> pa.RecordBatch:
    """Rows of the next edge.

    Raises what Arrow raises for values that are not of their columns' types.
    """
    step = added[0].step
    columns = pa.array([one.values for one in added], step.added).flatten()
    return pa.RecordBatch.from_arrays([*stack(before).columns, *columns], schema=step.schema)


def _weight(values: Iterable[Json]) -> int:
    """Bytes of text, bytes and arrays; 8 for anything else."""
    total = 0
    for value in values:
        if isinstance(value, (str, bytes)):
            total += len(value)
        elif isinstance(value, (list, tuple)):
            total += _weight(value)
        else:
            total += value.nbytes if isinstance(value, np.ndarray) else 8
    return total
