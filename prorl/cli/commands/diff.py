"""`prorl diff`: two stored runs side by side, and the tasks whose reward moved."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter

from prorl.cli.output import say, say_json, table
from prorl.cli.runs import run_directory
from prorl.cli.summary import summarise
from prorl.storage.opened import open_runs

FIGURES = (
    "rollouts",
    "groups",
    "valid",
    "rewarded",
    "mean_reward",
    "model_calls",
    "tool_calls",
    "tokens",
    "sampled_tokens",
    "bytes",
)
_TASKS = """
select task_id, avg(reward) as reward, count(*) as n from rollouts where valid group by 1
"""


def diff(
    a: str,
    b: str,
    /,
    *,
    limit: int = 20,
    root: str = "prorl-runs",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """What is other in run B than in run A: figures, and tasks by how far their mean reward moved.

    Example: prorl diff before after

    Parameters
    ----------
    a
        Name of a run in the root, or path of a run directory.
    b
        Another.
    limit
        How many tasks.
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print one JSON object.
    """
    places = [run_directory(name, root) for name in (a, b)]
    first, second = (summarise(place) for place in places)
    tasks = [
        {row["task_id"]: row["reward"] for row in open_runs(place).sql(_TASKS).rows()}
        for place in places
    ]
    shared = sorted(
        tasks[0].keys() & tasks[1].keys(), key=lambda task: -abs(tasks[1][task] - tasks[0][task])
    )
    moved = [
        {"task_id": task, "a": tasks[0][task], "b": tasks[1][task]}
        for task in shared
        if tasks[0][task] != tasks[1][task]
    ]
    figures = {name: [first[name], second[name]] for name in FIGURES}
    if json:
        say_json({"figures": figures, "shared_tasks": len(shared), "moved": moved[:limit]})
        return 0
    table(("", a, b), [(name, *pair) for name, pair in figures.items()])
    say(f"{len(shared):,} tasks in both, {len(moved):,} with another mean reward")
    if moved:
        table(("task", a, b), [tuple(row.values()) for row in moved[:limit]])
    return 0
