"""`Task` <-> JSON text.

The only place where the two meet; keys are sorted, so that equal tasks have equal digests.
"""

from __future__ import annotations

from dataclasses import asdict, fields

import orjson

from prorl.errors import TaskError
from prorl.types import Json, Task

_FIELDS = {field.name: str if field.name != "data" else dict for field in fields(Task)}
_REQUIRED = ("task_id", "env", "prompt")


def task_to_json(task: Task) -> str:
    """Canonical JSON text of a task.

    >>> task_to_json(Task(task_id="a/1", env="math", prompt="6*7?", data={"answer": "42"}))
    '{"data":{"answer":"42"},"data_source":"","env":"math","prompt":"6*7?","task_id":"a/1"}'
    """
    try:
        return orjson.dumps(
            asdict(task) | {"data": dict(task.data)}, option=orjson.OPT_SORT_KEYS
        ).decode()
    except TypeError as cause:
        raise TaskError(
            f"task {task.task_id!r}: its data is not JSON ({cause})", "JSON values only"
        ) from cause


def task_from_json(text: str) -> Task:
    """The task that `task_to_json` wrote. Raises TaskError."""
    try:
        value: Json = orjson.loads(text)
    except orjson.JSONDecodeError as cause:
        raise TaskError(f"a task is not valid JSON: {cause}", "what task_to_json writes") from cause
    return task_from_row(value)


def task_from_row(row: Json) -> Task:
    """A task from a parsed JSON object with the fields of `Task`. Raises TaskError."""
    if not isinstance(row, dict):
        raise TaskError(f"a task is {type(row).__name__}", "a JSON object")
    if missing := [name for name in _REQUIRED if name not in row]:
        raise TaskError(
            f"a task lacks {', '.join(missing)}; it has {', '.join(row) or 'nothing'}",
            "task_id, env and prompt",
        )
    if unknown := sorted(set(row) - set(_FIELDS)):
        raise TaskError(
            f"a task has unknown keys {', '.join(unknown)}",
            ", ".join(_FIELDS),
            "move what is the env's own into `data`",
        )
    for name, value in row.items():
        if not isinstance(value, _FIELDS[name]):
            raise TaskError(
                f"{name} is {type(value).__name__}", "an object" if name == "data" else "a string"
            )
    if not row["task_id"]:
        raise TaskError("task_id is empty", "a name that is unique in its source")
    return Task(**row)
