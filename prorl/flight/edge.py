"""What an edge says backwards: EDGE_BACK batches of credit and acks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa

from prorl.schema import EDGE_BACK
from prorl.types import AttemptKey

CREDIT = "credit"
ACK = "ack"

NO_KEY = AttemptKey("", -1, -1)


class Back(NamedTuple):
    """One row of EDGE_BACK."""

    kind: str
    rows: int = 0
    num_bytes: int = 0
    key: AttemptKey = NO_KEY


def encode(said: Sequence[Back]) -> pa.RecordBatch:
    """As one batch.

    >>> decode(encode([Back(CREDIT, 2, 100)]))
    [Back(kind='credit', rows=2, num_bytes=100, key=AttemptKey(run_id='', rollout_id=-1, attempt=-1))]
    """
    columns = (
        [back.kind for back in said],
        [back.rows for back in said],
        [back.num_bytes for back in said],
        [back.key.run_id for back in said],
        [back.key.rollout_id for back in said],
        [back.key.attempt for back in said],
    )
    arrays = [pa.array(column, f.type) for column, f in zip(columns, EDGE_BACK, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=EDGE_BACK)


def decode(batch: pa.RecordBatch) -> list[Back]:
    """The rows of a batch."""
    columns = (column.to_pylist() for column in batch.columns)
    return [
        Back(kind, rows, num_bytes, AttemptKey(run_id, rollout_id, attempt))
        for kind, rows, num_bytes, run_id, rollout_id, attempt in zip(*columns, strict=True)
    ]
