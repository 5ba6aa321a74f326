"""Reads task files: rows -> tasks, with the place of every mistake.

Invariants: task ids of one file are unique; a file gives at least one task. All tasks are held in
memory (2,000 GSM8K rows are 1 MiB).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import orjson

from prorl.errors import TaskError
from prorl.plugins import absolute
from prorl.tasks.folders import find, is_task_folder, read_folder
from prorl.tasks.formats import Format, detect
from prorl.tasks.generated import from_spec, is_generated
from prorl.tasks.rows import Placed, read_rows
from prorl.types import Task

Check = Callable[[Task], None]
"""Raises TaskError for a task that its env cannot run."""

_SHOWN_BAD = 5


@dataclass(slots=True, kw_only=True)
class TaskSet:
    """Tasks and how they were read."""

    source: str
    format: str
    """Name of the format that was found by looking."""
    tasks: list[Task] = field(default_factory=list)
    bad: list[TaskError] = field(default_factory=list)
    """Rows that were left out, with their places."""
    repeated: list[str] = field(default_factory=list)
    """Places of rows that say what an earlier one says, under another id."""

    @property
    def about(self) -> str:
        """One line for people: what was read as what, for which env, and what was left out."""
        envs = ", ".join(sorted({task.env for task in self.tasks}))
        said = f"{self.source}: {len(self.tasks)} tasks, read as {self.format}, for the env {envs}"
        if self.repeated:
            said += f"; {len(self.repeated)} say what an earlier row says ({self.repeated[0]})"
        if not self.bad:
            return said
        more = "; ..." if len(self.bad) > _SHOWN_BAD else ""
        places = "; ".join(error.given[:200] for error in self.bad[:_SHOWN_BAD])
        return f"{said}; {len(self.bad)} bad rows left out: {places}{more}"


def load_tasks(
    path: str | Path, env: str = "auto", limit: int | None = None, *, skip_bad: bool = False
) -> list[Task]:
    """Tasks of a file, a folder or a generated set (`arith:train?n=100`), in their order.

    `limit`: only the first so many of them.

    `env`: `auto` takes the format's own (math for GSM8K, code for HumanEval, swe for SWE-bench, the
    row's for ours), any other name replaces it. `file.py:attr` is sought beside the task file, or
    in the working folder where `env` says so. `skip_bad` leaves out rows that cannot be read.
    Raises TaskError with the place of the mistake.
    """
    return read_tasks(path, env, limit, skip_bad=skip_bad).tasks


def read_tasks(
    path: str | Path,
    env: str = "auto",
    limit: int | None = None,
    *,
    skip_bad: bool = False,
    check: Check | None = None,
) -> TaskSet:
    """As `load_tasks`, with what was found; rows that `check` refuses are bad rows, too."""
    if limit is not None and limit < 1:
        raise TaskError(f"limit {limit}", "a positive number of tasks")
    check = check or _fine
    if is_generated(str(path)):
        spec = str(path)
        found = TaskSet(source=spec, format="a generated set")
        found.tasks = [_with_env(task, env, Path.cwd()) for task in from_spec(spec)[:limit]]
        for task in found.tasks:
            check(task)
        return found
    path = Path(path)
    if is_task_folder(path):
        return _folders(path, env, limit, check, skip_bad=skip_bad)
    return _rows(path, env, limit, check, skip_bad=skip_bad)


def _fine(task: Task) -> None:
    """Refuses no task."""


def _rows(path: Path, env: str, limit: int | None, check: Check, *, skip_bad: bool) -> TaskSet:
    """Rows of a file, or of a folder of files; before the first good one no row is left out."""
    found = TaskSet(source=str(path), format="")
    contents: set[bytes] = set()
    reader = _Reader(path if path.is_dir() else path.parent, env, check)
    for placed in read_rows(path):
        with _bad_row(found, placed.place, skip=lambda: skip_bad and reader.layout is not None):
            task = reader.task(placed)
            found.tasks.append(task)
            said = orjson.dumps([task.env, task.prompt, task.data], option=orjson.OPT_SORT_KEYS)
            digest = blake2b(said, digest_size=16).digest()
            if digest in contents:
                found.repeated.append(placed.place)
            contents.add(digest)
        if len(found.tasks) == limit:
            break
    if not found.tasks:
        what = f" that can be used ({found.bad[0].given})" if found.bad else ""
        raise TaskError(f"{path} holds no tasks{what}", "one JSON object a line")
    found.format = reader.layout.name if reader.layout else ""
    return found


def _folders(path: Path, env: str, limit: int | None, check: Check, *, skip_bad: bool) -> TaskSet:
    found = TaskSet(source=str(path), format="task folders")
    for folder in find(path):
        with _bad_row(found, str(folder), skip=lambda: skip_bad):
            task = _with_env(read_folder(folder), env, folder)
            check(task)
            found.tasks.append(task)
        if len(found.tasks) == limit:
            break
    if not found.tasks:
        raise TaskError(f"{path} holds no task that can be used ({found.bad[0].given})")
    return found


class _Reader:
    """Rows of one file -> tasks; remembers the format and the ids."""

    def __init__(self, folder: Path, env: str, check: Check) -> None:
        self._folder, self._env, self._check = folder, env, check
        self._places: dict[str, str] = {}
        self._num_rows = 0
        self.layout: Format | None = None

    def task(self, placed: Placed) -> Task:
        """Raises TaskError without a place."""
        index, self._num_rows = self._num_rows, self._num_rows + 1
        if isinstance(placed.row, TaskError):
            raise placed.row
        self.layout = self.layout or detect(placed.row)
        task = _with_env(self.layout.read(placed.row, index), self._env, self._folder)
        if task.task_id in self._places:
            where = self._places[task.task_id].rpartition(", ")[2]
            raise TaskError(
                f"task_id {task.task_id!r} is also on {where}",
                "unique ids",
                "rename or remove one",
            )
        self._check(task)
        self._places[task.task_id] = placed.place
        return task


def _with_env(task: Task, env: str, folder: Path) -> Task:
    """A task with the env that was asked for; one's own file is found from where it is named."""
    name = absolute(task.env, folder) if env == "auto" else absolute(env, Path.cwd())
    return task if name == task.env else replace(task, env=name)


@contextmanager
def _bad_row(found: TaskSet, place: str, skip: Callable[[], bool]) -> Iterator[None]:
    """Add its place to a TaskError; where bad rows may be left out, it is noted and ends here."""
    try:
        yield
    except TaskError as error:
        placed = TaskError(f"{place}: {error.given}", error.expected, error.hint)
        if not skip():
            raise placed from None
        found.bad.append(placed)
