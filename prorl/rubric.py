"""A rubric: a weighted sum of named measures of an artifact.

Envs score by one.

Invariants: functions run one after the other in the given order, since they share a sandbox and a
deadline; a function that raises, or gives what is not a finite number (`bad_task`: it will again),
raises GraderError, which masks the rollout and never scores it 0. One that waits for ever is ended;
a plain function that computes for ever is ended with its helper, where it is a user's
(`prorl/envs/users.py`).

>>> import asyncio
>>> from prorl.types import Task
>>> @reward("short")
... def short(task, artifact):
...     return float(len(artifact) < 10)
>>> rubric = Rubric((short, 0.5))
>>> task = Task(task_id="t", env="e", prompt="")
>>> score = asyncio.run(rubric.score(task, b"42", None, Deadline(1.0)))
>>> score.reward, score.log
(0.5, 'short = 1 (weight 0.5)')
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from typing import SupportsFloat

from prorl.env_state import state_argument
from prorl.errors import ConfigError, GraderError, boundary
from prorl.limits import Deadline
from prorl.protocols import RewardFn, Sandbox
from prorl.types import FailureCode, Grade, Json, RewardPart, Score, Task
from prorl.waits import wait_limit_s

HANG_S = wait_limit_s("rubric.grace")


class Rubric:
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
        self.rewards = rewards

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """Every function's value; the log has a line or more of each. Raises GraderError."""
        parts, logs = [], []
        for function, weight in self.rewards:
            if deadline.expired:
                raise GraderError(FailureCode.GRADER_ERROR, f"no time was left for {function.name}")
            with boundary(GraderError, FailureCode.GRADER_ERROR, function.name):
                async with asyncio.timeout(deadline.remaining_s + HANG_S):
                    outcome = await function(task, artifact, sandbox, deadline)
            number, log = outcome if isinstance(outcome, Grade) else (outcome, "")
            value = float(number) if isinstance(number, SupportsFloat) else math.nan
            if not math.isfinite(value):
                problem = f"{function.name} gave {number!r:.100}; expected a finite number"
                raise GraderError(FailureCode.BAD_TASK, problem)
            parts.append(RewardPart(name=function.name, value=value, weight=weight))
            logs.append(log or f"{function.name} = {value:g} (weight {weight:g})")
        return Score(parts=tuple(parts), log="\n".join(logs))


class _Reward:
    """A function of (task, artifact), or of these and (sandbox, deadline), as a `RewardFn`; an
    argument named `state` comes on top.
    """

    def __init__(self, name: str, function: Callable[..., Json]) -> None:
        parameters = inspect.signature(function).parameters.values()
        names = [each.name for each in parameters if each.default is each.empty]
        num_arguments = sum(name != "state" for name in names)
        if num_arguments not in (2, 4):
            raise ConfigError(
                f"the reward function {name!r} takes {num_arguments} arguments",
                "(task, artifact) or (task, artifact, sandbox, deadline), and `state` besides",
            )
        self.name, self._function, self._is_short = name, function, num_arguments == 2

    async def __call__(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> float | Grade:
        rest = () if self._is_short else (sandbox, deadline)
        outcome: Json = self._function(task, artifact, *rest, **state_argument(self._function))
        value: float | Grade = await outcome if inspect.isawaitable(outcome) else outcome
        return value


def reward(name: str) -> Callable[[Callable[..., Json]], RewardFn]:
    """Make a function a named reward function: plain or `async`. It takes (task, artifact), or
    (task, artifact, sandbox, deadline), besides `state` where it reads what the env remembers of
    the rollout, and gives a number or a `Grade`. Raises ConfigError for another signature.
    """
    return lambda function: _Reward(name, function)
