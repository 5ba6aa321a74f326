"""Our own rows: the fields of `prorl.types.Task`."""

from __future__ import annotations

from prorl.task_json import task_from_row
from prorl.tasks.formats import Format, Row
from prorl.types import Task


def read(row: Row, index: int) -> Task:
    """task_id, env, prompt [, data, data_source]."""
    return task_from_row(row)


FORMAT = Format("prorl", ("task_id", "env", "prompt"), read)
