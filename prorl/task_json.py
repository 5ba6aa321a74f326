"""`Task` <-> JSON text: in task files, on edges, in the control log and in run directories.

Keys are sorted, so that equal tasks have equal digests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from math import isfinite

import orjson

from prorl import exact_json
from prorl.errors import TaskError
from prorl.types import Json, Task

_FIELDS = {field.name: str if field.name != "data" else dict for field in fields(Task)}
_REQUIRED = frozenset({"task_id", "env", "prompt"})


def check_values(task_id: str, *values: Json) -> None:
    """Raise TaskError for what JSON or a name of a file cannot hold: NUL, NaN, infinities."""
    if "\0" in task_id:
        raise TaskError(f"task_id {task_id!r} holds NUL", "text without it")
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, float) and not isfinite(value):
            raise TaskError(
                f"task {task_id!r}: {value} in its data",
                "finite numbers",
                "null says that none is known",
            )
        if isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)


def task_to_json(task: Task) -> str:
    """Canonical JSON text of a task.

    >>> task_to_json(Task(task_id="a/1", env="math", prompt="6*7?", data={"answer": "42"}))
    '{"data":{"answer":"42"},"data_source":"","env":"math","prompt":"6*7?","task_id":"a/1"}'
    """
    try:
        values = {name: getattr(task, name) for name in _FIELDS} | {"data": dict(task.data)}
        return exact_json.dumps(values, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as cause:
        raise TaskError(
            f"task {task.task_id!r}: its data is not JSON ({cause})",
            "JSON values of at most 254 levels",
        ) from cause


def task_from_json(text: str) -> Task:
    """The task that `task_to_json` wrote. Raises TaskError."""
    try:
        value: Json = exact_json.loads(text)
    except orjson.JSONDecodeError as cause:
        raise TaskError(f"a task is not valid JSON: {cause}", "what task_to_json writes") from cause
    return task_from_row(value)


def task_from_row(row: Json) -> Task:
    """A task from a parsed JSON object with the fields of `Task`. Raises TaskError."""
    if not isinstance(row, dict):
        raise TaskError(f"a task is {type(row).__name__}", "a JSON object")
    if not _REQUIRED <= row.keys() <= _FIELDS.keys():
        raise _other_keys(row)
    for name, value in row.items():
        if not isinstance(value, _FIELDS[name]):
            raise TaskError(
                f"{name} is {type(value).__name__}", "an object" if name == "data" else "a string"
            )
    if not row["task_id"]:
        raise TaskError("task_id is empty", "a name that is unique in its source")
    check_values(row["task_id"], row.get("data"))
    return Task(**row)


def _other_keys(row: dict[str, Json]) -> TaskError:
    if missing := [name for name in _FIELDS if name in _REQUIRED and name not in row]:
        return TaskError(
            f"a task lacks {', '.join(missing)}; it has {', '.join(row) or 'nothing'}",
            "task_id, env and prompt",
        )
    unknown = sorted(set(row) - set(_FIELDS))
    return TaskError(
        f"a task has unknown keys {', '.join(unknown)}",
        ", ".join(_FIELDS),
        "move what is the env's own into `data`",
    )
