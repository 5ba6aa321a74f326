"""A rubric: a weighted sum of named judgements of an artefact, for envs that score by more than one
thing.

Invariants: functions run one after the other in the given order, since they share a sandbox and a
deadline; a function that raises or gives what is not a finite number raises GraderError, which
masks the rollout and never scores it 0.

>>> import asyncio
>>> from prorl.types import Task
>>> @reward("short")
... def short(task, artefact):
...     return float(len(artefact) < 10)
>>> rubric = Rubric((short, 0.5))
>>> score = asyncio.run(rubric.score(Task(task_id="t", env="e", prompt=""), b"42", None, Deadline(1.0)))
>>> score.reward, score.log
(0.5, 'short = 1 (weight 0.5)')
"""

from __future__ import annotations

import math
from collections.abc import Callable

from prorl.errors import ConfigError, GraderError, boundary
from prorl.limits import Deadline
from prorl.protocols import RewardFn, Sandbox
from prorl.types import FailureCode, RewardPart, Score, Task


class Rubric:
    """Weighted reward functions -> `Score`."""

    def __init__(self, *rewards: tuple[RewardFn, float]) -> None:
        names = [function.name for function, _ in rewards]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ConfigError(
                f"two rewards are named {', '.join(twice)}", "names that differ", "rename one"
            )
        if wrong := [
            f"{function.name}={weight}" for function, weight in rewards if not math.isfinite(weight)
        ]:
            raise ConfigError(f"weights {', '.join(wrong)}", "finite numbers")
        self._rewards = rewards

    async def score(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """Every function's value. Raises GraderError."""
        parts = []
        for function, weight in self._rewards:
            if deadline.expired:
                raise GraderError(FailureCode.GRADER_ERROR, f"no time was left for {function.name}")
            with boundary(GraderError, FailureCode.GRADER_ERROR, function.name):
                value = float(await function(task, artefact, sandbox, deadline))
            if not math.isfinite(value):
                raise GraderError(FailureCode.GRADER_ERROR, f"{function.name} gave {value}")
            parts.append(RewardPart(name=function.name, value=value, weight=weight))
        return Score(
            parts=tuple(parts),
            log="\n".join(
                f"{part.name} = {part.value:g} (weight {part.weight:g})" for part in parts
            ),
        )


class _PlainReward:
    """A plain function of (task, artefact) as a `RewardFn`."""

    def __init__(self, name: str, function: Callable[[Task, bytes], float]) -> None:
        self.name, self._function = name, function

    async def __call__(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> float:
        return self._function(task, artefact)


def reward(name: str) -> Callable[[Callable[[Task, bytes], float]], RewardFn]:
    """Make a plain, quick function of (task, artefact) a named reward function."""
    return lambda function: _PlainReward(name, function)
