"""SCORED rows taken apart: how each failed, its sequences, and whose they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from prorl.schema import MAX_SEGMENTS, SEQUENCES
from prorl.schema_fields import SEQUENCE
from prorl.types import FailureCode


def effective_codes(batch: pa.RecordBatch) -> list[FailureCode]:
    """Failure code of each SCORED row: EVAL's if it failed there, else RUN's."""
    eval_codes, run_codes = (
        batch.column("eval_failure_code").to_pylist(),
        batch.column("failure_code").to_pylist(),
    )
    return [
        FailureCode(eval_code or run_code)
        for eval_code, run_code in zip(eval_codes, run_codes, strict=True)
    ]


def parents_of(column: pa.ListArray) -> np.ndarray[Any, Any]:
    """The row that each element of a list column belongs to (slices included)."""
    return np.repeat(np.arange(len(column)), np.diff(column.offsets.to_numpy()))


def sequences_of(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray[Any, Any]]:
    """The sequences of all rows with their keys, and the row that each belongs to."""
    parents = parents_of(batch.column("sequences"))
    structs = batch.column("sequences").flatten()
    fields = {f.name: values for f, values in zip(SEQUENCE, structs.flatten(), strict=True)}
    for name in ("rollout_id", "group_id", "sample_index", "attempt", "reward"):
        fields[name] = batch.column(name).take(pa.array(parents))
    fields["sequence_id"] = pa.array(
        fields["rollout_id"].to_numpy() * MAX_SEGMENTS + fields["segment"].to_numpy()
    )
    return batch_of(fields, SEQUENCES), parents


def batch_of(columns: Mapping[str, Any], schema: pa.Schema) -> pa.RecordBatch:
    """The columns that a schema names, in its order."""
    return pa.RecordBatch.from_arrays([columns[name] for name in schema.names], schema=schema)


def lengths_of(lists: pa.ListArray) -> np.ndarray[Any, Any]:
    """How many elements each row of a list column has."""
    return np.diff(lists.offsets.to_numpy())
