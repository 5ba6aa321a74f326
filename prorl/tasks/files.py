"""Reads task files: lines -> rows -> tasks, with the place of every mistake.

Invariants: task ids of one file are unique; a file gives at least one task. All tasks are held in
memory (2,000 GSM8K rows are 1 MiB).
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import orjson

from prorl.errors import TaskError
from prorl.plugins import absolute
from prorl.tasks.formats import Format, Row, detect
from prorl.tasks.generated import from_spec, is_generated
from prorl.types import Task

_GZIP_MAGIC = b"\x1f\x8b"


class _Line(NamedTuple):
    number: int
    row: Row


def load_tasks(path: str | Path, env: str = "auto", limit: int | None = None) -> list[Task]:
    """Tasks of a JSON Lines file, plain or gzipped, in file order; the first `limit` of them.

    Or of a generated set: `arith:train?n=100`.

    `env`: `auto` takes the format's own (math for GSM8K, code for HumanEval, swe for SWE-bench, the
    row's for ours), any other name replaces it. `file.py:attr` is sought beside the task file, or
    in the working folder where `env` says so. Raises TaskError.
    """
    if limit is not None and limit < 1:
        raise TaskError(f"limit {limit}", "a positive number of tasks")
    if is_generated(str(path)):
        return [_with_env(task, env, Path.cwd()) for task in from_spec(str(path))[:limit]]
    path = Path(path)
    tasks: list[Task] = []
    seen: dict[str, int] = {}
    layout: Format | None = None
    for line in _lines(path):
        with _at(path, line.number):
            layout = layout or detect(line.row)
            task = layout.read(line.row, len(tasks))
            if task.task_id in seen:
                first = seen[task.task_id]
                raise TaskError(
                    f"task_id {task.task_id!r} is also on line {first}",
                    "unique ids",
                    "rename or remove one",
                )
        seen[task.task_id] = line.number
        tasks.append(_with_env(task, env, path.parent))
        if len(tasks) == limit:
            break
    if not tasks:
        raise TaskError(f"{path} holds no tasks", "one JSON object a line")
    return tasks


def _with_env(task: Task, env: str, folder: Path) -> Task:
    """With the env that was asked for; a file of one's own is found from where it was named."""
    name = absolute(task.env, folder) if env == "auto" else absolute(env, Path.cwd())
    return task if name == task.env else replace(task, env=name)


@contextmanager
def _at(path: Path, number: int) -> Iterator[None]:
    """Add file and line to a TaskError that passes."""
    try:
        yield
    except TaskError as error:
        raise TaskError(
            f"{path}, line {number}: {error.given}", error.expected, error.mend
        ) from None


def _lines(path: Path) -> Iterator[_Line]:
    for number, line in enumerate(_text(path).splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as cause:
            shown = line.strip()[:60].decode("utf-8", "replace")
            raise TaskError(
                f"{path}, line {number}: {shown!r} is not valid JSON ({cause})",
                "one JSON object a line",
            ) from cause
        if not isinstance(row, dict):
            raise TaskError(
                f"{path}, line {number}: found {type(row).__name__}", "one JSON object a line"
            )
        yield _Line(number, row)


def _text(path: Path) -> bytes:
    """The file's bytes, unpacked, without a byte order mark.

    JSON lines are split as bytes: text may hold U+2028.
    """
    try:
        content = path.read_bytes()
        if content.startswith(_GZIP_MAGIC):
            content = gzip.decompress(content)
    except FileNotFoundError as cause:
        near = (
            sorted(other.name for other in path.parent.glob("*.jsonl*"))[:5]
            if path.parent.is_dir()
            else []
        )
        raise TaskError(
            f"no file {path}", "a task file", f"beside it: {', '.join(near)}" if near else ""
        ) from cause
    except IsADirectoryError as cause:
        raise TaskError(
            f"{path} is a directory", "a JSON Lines file", "name a file in it"
        ) from cause
    except (EOFError, zlib.error, gzip.BadGzipFile) as cause:
        raise TaskError(
            f"{path} is not a whole gzip file ({cause})", "an intact file", "fetch it again"
        ) from cause
    except OSError as cause:
        raise TaskError(f"cannot read {path}: {cause.strerror}", "a readable file") from cause
    return content.removeprefix(b"\xef\xbb\xbf")
