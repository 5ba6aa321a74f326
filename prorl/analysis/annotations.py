"""Annotations: labels, numbers and comments of people and scripts on rollouts, append-only."""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime

import pyarrow as pa

from prorl.errors import UserError
from prorl.schema import ANNOTATIONS
from prorl.storage.files.appended import AppendedTable
from prorl.storage.read.catalog import StoredRun
from prorl.types import Json

_COLUMNS = ("rollout_id", "label", "attempt", "turn", "value", "comment")


def annotation_rows(rows: Iterable[Mapping[str, Json]], *, author: str, run_id: str) -> pa.Table:
    """Rows of ANNOTATIONS from dictionaries with `rollout_id` and `label`. `attempt`, `turn`,
    `value` and `comment` may be given as well. Raises UserError, which counts rows from 1.
    """
    now = datetime.now(UTC)
    annotations = []
    for number, row in enumerate(rows, 1):
        unknown = sorted(set(row) - set(_COLUMNS))
        missing = [name for name in ("rollout_id", "label") if row.get(name) in (None, "")]
        if unknown or missing:
            wrong = f"has {', '.join(unknown)}" if unknown else f"lacks {', '.join(missing)}"
            raise UserError(f"annotation {number} {wrong}", ", ".join(_COLUMNS))
        fixed = {
            "run_id": run_id,
            "annotation_id": uuid.uuid4().hex,
            "author": author,
            "created_at": now,
        }
        annotations.append({"comment": "", **row, **fixed})
    try:
        return pa.Table.from_pylist(annotations, ANNOTATIONS)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise UserError(f"annotations: {error}", "whole ids, a number as value, text") from None


def annotate(stored: StoredRun, rows: Iterable[Mapping[str, Json]], *, author: str) -> int:
    """Append annotations to a stored run, all or none; returns how many. Raises UserError
    for rows that are none or name rollouts that the run does not have.
    """
    table = annotation_rows(rows, author=author, run_id=stored.run_id)
    rollout_ids = set(stored.read("rollouts", ["rollout_id"]).column("rollout_id").to_pylist())
    for rollout_id in table.column("rollout_id").to_pylist():
        if rollout_id not in rollout_ids:
            raise UserError(
                f"rollout {rollout_id}", f"one of the {len(rollout_ids):,} of {stored.run_id}"
            )
    if table.num_rows:
        key = str(table.column("annotation_id")[0].as_py())
        AppendedTable(stored.directory, "annotations").append(table, key)
    return int(table.num_rows)
