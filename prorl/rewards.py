"""Reward functions by name, which a task may add to its env's own rubric:

    {"task_id": ..., "data": {"answer": "42", "rewards": {"format": 0.1, "mine.py:polite": 0.2}}}

| name | value |
|---|---|
| format | 1 when the answer is marked: a last line `#### answer`, or a `\\boxed{}` |
| length | 1 up to `data.length_chars` characters (2000), then falling to 0 at twice as many |
| judge | what a language model says (`prorl/envs/llm_judge.py`) |

Yours is an entry point of the group `prorl.rewards`, or `module:attr` or `file.py:attr`
(`prorl/plugins.py`), whose value is what `prorl.rubric.reward` makes of a function. Each part is
stored with its value and weight beside the others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import cast

from prorl import plugins
from prorl.errors import TaskError
from prorl.protocols import RewardFn
from prorl.rubric import Rubric, reward
from prorl.types import Json, Task

GROUP = "prorl.rewards"
BUILT_IN: Mapping[str, str] = {
    "format": "prorl.rewards:format_",
    "length": "prorl.rewards:length",
    "judge": "prorl.envs.llm_judge:judge",
}
LENGTH_CHARS = 2000

_MARKED = re.compile(r"(?:^|\n)####[ \t]*\S[^\n]*\s*\Z|\\boxed\{[^\n]+\}")


@reward("format")
def format_(task: Task, artefact: bytes) -> float:
    """Whether the final answer is marked as one."""
    return float(_MARKED.search(artefact.decode("utf-8", "replace")) is not None)


@reward("length")
def length(task: Task, artefact: bytes) -> float:
    """1 for a short text, 0 for one twice as long as it may be."""
    limit = float(task.data.get("length_chars", LENGTH_CHARS))
    return max(0.0, min(1.0, 2.0 - len(artefact.decode("utf-8", "replace")) / limit))


def rubric_of(task: Task, own: Rubric) -> Rubric:
    """An env's rubric with the parts that `data.rewards` adds. Raises TaskError."""
    asked: Json = task.data.get("rewards")
    if not asked:
        return own
    if not isinstance(asked, Mapping):
        raise TaskError(f"task {task.task_id!r}: data.rewards is {asked!r}"[:300], "name -> weight")
    names = {function.name for function, _ in own.rewards}
    more: list[tuple[RewardFn, float]] = []
    for name, weight in asked.items():
        function = _part(task, name, weight)
        if function.name in names:
            raise TaskError(
                f"task {task.task_id!r}: two rewards are named {function.name!r}", "different names"
            )
        names.add(function.name)
        more.append((function, float(weight)))
    return Rubric(*own.rewards, *more)


def _part(task: Task, name: str, weight: Json) -> RewardFn:
    """The function of a name that a task gives a weight. Raises TaskError for either."""
    is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
    if not is_number or not math.isfinite(weight):
        raise TaskError(
            f"task {task.task_id!r}: the weight of {name!r} is {weight!r}", "a finite number"
        )
    function = plugins.load(GROUP, name, TaskError, BUILT_IN)
    if not callable(function) or not isinstance(getattr(function, "name", None), str):
        raise TaskError(f"reward {name!r} is {function!r}"[:300], "made by prorl.rubric.reward")
    return cast("RewardFn", function)
