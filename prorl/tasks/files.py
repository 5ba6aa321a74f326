"""Reads task files: rows -> tasks, with the place of every mistake.

Invariants: task ids of one file are unique; a file gives at least one task. All tasks are held in
memory (2,000 GSM8K rows are 1 MiB).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

import orjson

from prorl import env_settings, exact_json
from prorl.env_settings import AUTO
from prorl.errors import TaskError
from prorl.plugins import absolute
from prorl.pluralize import pluralize
from prorl.tasks.formats import Format, detect
from prorl.tasks.generated import from_spec, is_generated
from prorl.tasks.rows import read_rows
from prorl.types import Json, Task

Check = Callable[[Task], None]
"""Raises TaskError for a task that its env cannot run."""

_LISTED_BAD_ROWS = 5
_BAD_ROW_CHARS = 300
_LISTED_TASKS = 3


@dataclass(slots=True, kw_only=True)
class TaskSet:
    source: str
    format: str
    """Name of the format that was found by looking."""
    tasks: list[Task] = field(default_factory=list)
    bad: list[TaskError] = field(default_factory=list)
    """Rows that were left out, with their places."""
    repeated: list[str] = field(default_factory=list)
    """Places of rows that say what an earlier one says, under another id."""

    @property
    def deviations(self) -> list[str]:
        """A line for each thing that tasks ask for and do not get, with how many they are."""
        tasks: dict[str, list[str]] = {}
        for task in self.tasks:
            for deviation in task.data.get("deviations") or ():
                tasks.setdefault(str(deviation), []).append(task.task_id)
        return [
            f"{len(ids)} of {pluralize(len(self.tasks), 'task')}: {deviation}"
            f" ({', '.join(ids[:_LISTED_TASKS])}{', ...' if len(ids) > _LISTED_TASKS else ''})"
            for deviation, ids in tasks.items()
        ]

    @property
    def bad_rows(self) -> list[str]:
        """A line for each of the first rows that were left out, with what was expected there."""
        more = ["left out: ..."] if len(self.bad) > _LISTED_BAD_ROWS else []
        rows = [f"left out: {error}"[:_BAD_ROW_CHARS] for error in self.bad[:_LISTED_BAD_ROWS]]
        return rows + more

    @property
    def about(self) -> str:
        """Says in one line what was read as what, for which env, and how many were left out."""
        envs = ", ".join(sorted({task.env for task in self.tasks}))
        summary = (
            f"{self.source}: {pluralize(len(self.tasks), 'task')}, read as {self.format},"
            f" for the env {envs}"
        )
        if self.repeated:
            repeated = pluralize(
                len(self.repeated), "row repeats an earlier one", "rows repeat an earlier one"
            )
            summary += f"; {repeated} ({self.repeated[0]})"
        if not self.bad:
            return summary
        return f"{summary}; {pluralize(len(self.bad), 'bad row is', 'bad rows are')} left out"


def load_tasks(
    path: str | Path, env: Json = "auto", limit: int | None = None, *, skip_invalid: bool = False
) -> list[Task]:
    """Tasks of a file, a folder or generated sets (`arith:train?n=100,shop:train`), in their order:
    what `prorl run --tasks` takes.

    `limit`: only the first so many of each.

    `env`: `auto` takes the format's own (math for GSM8K, code for HumanEval, swe for SWE-bench, the
    row's for ours), any other name replaces it. Settings may follow: `math?tools=none`, or the
    other forms of `prorl/env_settings.py`. `file.py:attr` is sought beside the task file, or in the
    working folder where `env` says so. `skip_invalid` leaves out rows that cannot be read. Raises
    TaskError with the place of the mistake, ConfigError for an `env` that cannot be read.
    """
    return [
        task
        for source in sources(path)
        for task in read_tasks(source, env, limit, skip_invalid=skip_invalid).tasks
    ]


def sources(path: str | Path) -> list[str]:
    """Returns what `--tasks` names: one file or folder, or generated sets with commas between.

    >>> sources("arith:train?n=9,shop:train"), sources("my,tasks.jsonl")
    (['arith:train?n=9', 'shop:train'], ['my,tasks.jsonl'])
    """
    parts = str(path).split(",")
    return parts if all(map(is_generated, parts)) else [str(path)]


def read_tasks(
    path: str | Path,
    env: Json = "auto",
    limit: int | None = None,
    *,
    skip_invalid: bool = False,
    check: Check | None = None,
) -> TaskSet:
    """Reads as `load_tasks` does, into a TaskSet; rows that `check` refuses are bad rows, too."""
    if limit is not None and limit < 1:
        raise TaskError(f"limit {limit}", "a positive number of tasks")
    here, settings = Path.cwd(), env_settings.read(env)
    settings = {absolute(name, here): values for name, values in settings.items()}
    name = env_settings.env_of_all(env)
    if is_generated(str(path)):
        task_set = TaskSet(source=str(path), format="a generated set")
        for task in from_spec(task_set.source)[:limit]:
            task = env_settings.merge(_with_env(task, name, here), settings)
            task_set.tasks.append(task)
            if check is not None:
                check(task_set.tasks[-1])
        return task_set
    path = Path(path)
    task_set = TaskSet(source=str(path), format="")
    layout: Format | None = None
    places: dict[str, str] = {}
    contents: set[bytes] = set()
    for index, (place, row) in enumerate(read_rows(path)):
        try:
            if isinstance(row, TaskError):
                raise row
            layout = layout or detect(row)
            folder = path if path.is_dir() else path.parent
            task = _with_env(layout.read(row, index), name, folder)
            task = env_settings.merge(task, settings)
            if task.task_id in places:
                where = places[task.task_id].rpartition(", ")[2]
                raise TaskError(
                    f"task_id {task.task_id!r} is also on {where}",
                    "unique ids",
                    "rename or remove one",
                )
            if check is not None:
                check(task)
        except TaskError as error:
            bad = TaskError(f"{place}: {error.problem}", error.expected, error.hint)
            if not skip_invalid or layout is None:  # whose format is unknown is no file of tasks
                raise bad from None
            task_set.bad.append(bad)
            continue
        places[task.task_id] = place
        task_set.tasks.append(task)
        content = exact_json.dumps([task.env, task.prompt, task.data], option=orjson.OPT_SORT_KEYS)
        digest = blake2b(content, digest_size=16).digest()
        if digest in contents:
            task_set.repeated.append(place)
        contents.add(digest)
        if len(task_set.tasks) == limit:
            break
    if layout is None or not task_set.tasks:
        reason = f" that can be used ({task_set.bad[0].problem})" if task_set.bad else ""
        raise TaskError(f"{path} holds no tasks{reason}", "one JSON object a line")
    task_set.format = layout.name
    return task_set


def _with_env(task: Task, env: str, folder: Path) -> Task:
    """A task with the env that was asked for; one's own file is found from where it is named."""
    name = absolute(task.env, folder) if env == AUTO else absolute(env, Path.cwd())
    return task if name == task.env else replace(task, env=name)
