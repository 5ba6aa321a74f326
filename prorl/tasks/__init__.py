"""Task files -> `Task` records, and `Task` <-> JSON, the form in which it travels and is stored.

`load_tasks` makes the tasks of a generated set (`arith:train?n=100&seed=1`, `generated.py`), or
reads a file or folder (`rows.py`) in one of the formats of `formats/`, told apart by the first
row's keys (docs/tasks.md). It does not ask an env whether it can use the task: that is `Env.check`.
"""

from prorl.task_json import task_from_json, task_to_json
from prorl.tasks.files import TaskSet, load_tasks, read_tasks, sources

__all__ = ["TaskSet", "load_tasks", "read_tasks", "sources", "task_from_json", "task_to_json"]
