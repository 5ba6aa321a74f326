"""Task files -> `Task` records, and `Task` <-> JSON, the form in which a task travels and is
stored.

`load_tasks` makes the tasks of a generated set (`arith:train?n=100&seed=1`, see
`prorl.tasks.generated`) or reads JSON Lines, plain or gzipped, in one of the formats of
`prorl/tasks/formats.py`, told apart by the first row's keys. Whatever is wrong with a file or a row
ends in one TaskError that names the file, the line, what was found, what was expected and how to
mend it. It does not ask an env whether it can use the task: that is `Env.check`.
"""

from prorl.tasks.codec import task_from_json, task_to_json
from prorl.tasks.files import load_tasks

__all__ = ["load_tasks", "task_from_json", "task_to_json"]
