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
    """One row of EDGE_BACK: credit or an ack that goes upstream."""

    kind: str
    rows: int = 0
    num_bytes: int = 0
    key: AttemptKey = NO_KEY


_STRUCT = pa.struct(list(EDGE_BACK))


def encode(said: Sequence[Back]) -> pa.RecordBatch:
    """The rows as one record batch.

    >>> decode(encode([Back(CREDIT, 2, 100)])) == [Back(CREDIT, 2, 100)]
    True
    """
    rows = [(kind, rows, num_bytes, *key) for kind, rows, num_bytes, key in said]
    return pa.RecordBatch.from_arrays(pa.array(rows, _STRUCT).flatten(), schema=EDGE_BACK)


def decode(batch: pa.RecordBatch) -> list[Back]:
    columns = (column.to_pylist() for column in batch.columns)
    return [
        Back(kind, rows, num_bytes, AttemptKey(run_id, rollout_id, attempt))
        for kind, rows, num_bytes, run_id, rollout_id, attempt in zip(*columns, strict=True)
    ]
