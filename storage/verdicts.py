"""What becomes of SCORED rows: which may be committed, and what is wrong with the others."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import pyarrow as pa

from prorl.errors import RolloutError, boundary
from prorl.schema import MAX_SEGMENTS
from prorl.sequences import validate_sequences
from prorl.storage.scored import effective_codes, sequences_of
from prorl.types import FAILURE_CLASS, FailureCode


class RowVerdict(NamedTuple):
    """What becomes of a SCORED row: committed, or kept in `partial/`.

    With a problem it is reported as invalid, too.
    """

    committable: bool
    problem: str


def judge(batch: pa.RecordBatch) -> list[RowVerdict]:
    """One verdict per SCORED row. Never raises for what is in a row."""
    try:
        with boundary(RolloutError, FailureCode.INVALID_ROW, "row"):
            wanted = [FAILURE_CLASS[code].trains for code in effective_codes(batch)]
            found = [
                problem if want else ""
                for want, problem in zip(wanted, problems(batch), strict=True)
            ]
            return [
                RowVerdict(want and not problem, problem)
                for want, problem in zip(wanted, found, strict=True)
            ]
    except RolloutError as error:
        if batch.num_rows == 1:
            return [RowVerdict(False, error.message)]
    return [verdict for i in range(batch.num_rows) for verdict in judge(batch.slice(i, 1))]


def problems(batch: pa.RecordBatch) -> list[str]:
    """One text per SCORED row: empty if it may be committed, else what is wrong with it."""
    if nulls := _nulls(batch):
        if batch.num_rows == 1:
            return [f"null in {nulls}"]
        return [problem for i in range(batch.num_rows) for problem in problems(batch.slice(i, 1))]
    found = _reward_problems(batch)
    sequences, parents = sequences_of(batch)
    segments = sequences.column("segment").to_numpy()
    expected = np.arange(len(parents)) - np.searchsorted(parents, parents)
    for parent, segment, wanted, text in zip(
        parents, segments, expected, validate_sequences(sequences), strict=True
    ):
        if text or segment != wanted or segment >= MAX_SEGMENTS:
            found[parent] = text or f"segment {segment} where {wanted} was expected"
    return found


def _reward_problems(batch: pa.RecordBatch) -> list[str]:
    """One text per row: what keeps its reward from being one, empty where it is sound."""
    unscored = np.array(
        [code is FailureCode.NONE for code in effective_codes(batch)]
    ) & ~batch.column("scored").to_numpy(False)
    infinite = ~np.isfinite(batch.column("reward").to_numpy())
    return [
        "neither scored nor failed" if a else "the reward is not finite" if b else ""
        for a, b in zip(unscored, infinite, strict=True)
    ]


def _nulls(batch: pa.RecordBatch) -> str:
    """Names of columns and struct children that hold nulls.

    Arrow's own validation lets them through.
    """

    def walk(name: str, array: pa.Array) -> Iterable[str]:
        if array.null_count:
            yield name
        elif pa.types.is_list(array.type) and pa.types.is_nested(array.type.value_type):
            yield from walk(name, array.flatten())
        elif pa.types.is_struct(array.type):
            for child, values in zip(array.type, array.flatten(), strict=True):
                yield from walk(f"{name}.{child.name}", values)

    return ", ".join(
        name
        for column, array in zip(batch.schema.names, batch.columns, strict=True)
        for name in walk(column, array)
    )
