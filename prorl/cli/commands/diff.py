"""`prorl diff`: two stored runs side by side, and the tasks whose reward moved."""

from __future__ import annotations

from collections.abc import Mapping

from prorl.cli.options import JsonObject, RunsRoot
from prorl.cli.output import say, say_json, table
from prorl.cli.runs import run_directory
from prorl.cli.summary import summarise
from prorl.storage.opened import open_runs
from prorl.types import Json

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
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
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
    """
    places = [run_directory(name, root) for name in (a, b)]
    first, second = (summarise(place) for place in places)
    figures = {name: [first[name], second[name]] for name in FIGURES}
    before, after = map(_rewards, places)
    num_shared, moved = len(before.keys() & after.keys()), _moved(before, after)
    if json:
        say_json({"figures": figures, "shared_tasks": num_shared, "moved": moved[:limit]})
        return 0
    table(("", a, b), [(name, *pair) for name, pair in figures.items()])
    say(f"{num_shared:,} tasks in both, {len(moved):,} with another mean reward")
    if moved:
        table(("task", a, b), [tuple(row.values()) for row in moved[:limit]])
    return 0


def _rewards(place: str) -> dict[str, float]:
    """Task -> mean reward of its valid rollouts."""
    return {row["task_id"]: row["reward"] for row in open_runs(place).sql(_TASKS).rows()}


def _moved(a: Mapping[str, float], b: Mapping[str, float]) -> list[dict[str, Json]]:
    """Tasks of both whose reward is another one, the largest move first.

    >>> _moved({"t": 0.5, "u": 1.0, "v": 0.0}, {"t": 0.25, "u": 0.0, "v": 0.0})[0]
    {'task_id': 'u', 'a': 1.0, 'b': 0.0}
    """
    shared = sorted(a.keys() & b.keys(), key=lambda task: -abs(b[task] - a[task]))
    return [{"task_id": task, "a": a[task], "b": b[task]} for task in shared if a[task] != b[task]]
