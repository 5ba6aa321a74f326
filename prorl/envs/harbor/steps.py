"""Harbor's tasks of several steps, played one after the other in the agent's sandbox.

    agent: step 1 --tests 1, where the agent works--> step 2 --...--> step N --EVAL--> tests N

Each step is a turn of the env's: the policy's answer ends a step, its tests run, and the next
instruction is the next message of the same conversation. Between two steps the tests are removed.
The last step that was played is graded by EVAL, in a fresh sandbox as a task of one step is; the
tests of the steps before it run where the agent works, as Harbor's do, so what pays there pays here
(docs/harbor.md).

The state of a rollout is `rewards`, a table for each step whose tests have run in RUN, and why no
further step is played: `below` where the last of them is below its step's `min_reward`, `lacking`
where the next step's tests left none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from prorl.env_state import EnvState, current_state
from prorl.envs.harbor import (
    STEP_S,
    HarborEnv,
    grade_in_sandbox,
    inside,
    is_solution,
    put_files,
    solve_command,
    wait_until_healthy,
)
from prorl.envs.harbor.reward import TRAINS, NoRewardError
from prorl.envs.tools import Solution, field_error
from prorl.errors import NoReferenceError
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import Message, RewardPart, Score, Task

SOLVE_S = 900.0
"""For the reference solution of a step behind the first one."""


class HarborStepsEnv(HarborEnv):
    name = "harbor_steps"
    system = HarborEnv.system + (
        " The task may have several steps: when you are done with one, you get the next."
    )

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        await super().prepare(task, sandbox)
        assert sandbox is not None
        await _begin(task, 0, sandbox)

    async def respond(
        self,
        task: Task,
        messages: Sequence[Message],
        state: EnvState,
        sandbox: Sandbox | None,
    ) -> str | None:
        """Run the tests of a step and return the next one's instruction; None behind the last one,
        which EVAL grades, and where a step's reward is too small.
        """
        assert sandbox is not None
        rewards = state.setdefault("rewards", [])
        step = step_of(task, len(rewards))
        if await is_solution(step, messages[-1].content):
            await self.solve(step, sandbox, SOLVE_S)
        if len(rewards) + 1 == len(task.data["steps"]):
            return None
        try:
            limit_s = float(step.data["verifier"]["timeout_s"])
            parts, _ = await grade_in_sandbox(step, b"", sandbox, Deadline(limit_s + STEP_S))
        except NoRewardError as error:
            state["lacking"] = str(error)
            return None
        rewards.append({part.name: part.value for part in parts})
        if problem := _too_small(rewards[-1], step.data["min_reward"]):
            state["below"] = problem
            return None
        await sandbox.exec(["bash", "-c", inside.FORGET], STEP_S)
        await _begin(task, len(rewards), sandbox)
        return str(task.data["steps"][len(rewards)]["instruction"])

    async def verify(self, task: Task, sandbox: Sandbox, deadline: Deadline) -> None:
        """Run the tests of each step on the untouched image."""
        for number in range(len(task.data["steps"])):
            await super().verify(step_of(task, number), sandbox, deadline)
            await sandbox.exec(["bash", "-c", inside.FORGET], STEP_S)

    async def score(
        self, task: Task, artifact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        if (score := self._score_of_ended(task)) is None:
            step = step_of(task, len(_rewards()))
            score = await super().score(step, artifact, sandbox, deadline)
        return _combined(task, score)

    async def score_in_place(
        self, task: Task, sandbox: Sandbox, fresh: Sandbox, deadline: Deadline
    ) -> Score:
        if (score := self._score_of_ended(task)) is None:
            step = step_of(task, len(_rewards()))
            score = await super().score_in_place(step, sandbox, fresh, deadline)
        return _combined(task, score)

    def _score_of_ended(self, task: Task) -> Score | None:
        """Returns the score of a rollout that ended with a step's tests in RUN; None for others.
        Raises GraderError.
        """
        state = current_state()
        if "below" in state:
            return Score(parts=(), log=str(state["below"]))
        if "lacking" in state:
            error = NoRewardError(str(state["lacking"]))
            return self.without_reward(step_of(task, len(_rewards())), error)
        return None

    def reference(self, task: Task) -> Solution:
        """The first step's solution as a call, and for each further one an answer that stands for
        it (`respond`). Raises NoReferenceError.
        """
        steps = [step_of(task, number) for number in range(len(task.data["steps"]))]
        if lacking := [step.task_id for step in steps if not step.data["solution"]]:
            raise NoReferenceError(f"no solution/solve.sh for {', '.join(lacking)}")
        first = super().reference(steps[0])
        return first._replace(replies=tuple(solve_command(step) for step in steps[1:]))


def step_of(task: Task, number: int) -> Task:
    """A step as a task of its own."""
    step: dict[str, Any] = task.data["steps"][number]
    verifier = {**task.data["verifier"], **step["verifier"]}
    return replace(
        task,
        task_id=f"{task.task_id}/{step['name']}",
        data={**task.data, **step, "verifier": verifier},
    )


async def _begin(task: Task, number: int, sandbox: Sandbox) -> None:
    """Bring the files of a step, run its setup, and wait until it is healthy. Raises TaskError."""
    step = step_of(task, number)
    await put_files(step, sandbox, step.data["workdir_files"], ".")
    if step.data["has_setup"]:
        done = await sandbox.exec(["bash", "setup.sh"], STEP_S)
        if done.exit_code != 0 or done.timed_out:
            raise field_error(step, f"its setup.sh failed: {done.output[-200:]}", "exit code 0")
    await wait_until_healthy(step, sandbox, step.data.get("healthcheck"))


def _rewards() -> list[dict[str, float]]:
    rewards: list[dict[str, float]] = current_state().get("rewards", [])
    return rewards


def _too_small(rewards: Mapping[str, float], least: Mapping[str, float]) -> str:
    """Returns the reward that is below its step's `min_reward`; empty where none is."""
    for name, threshold in least.items():
        if (reward := rewards.get(name, float("-inf"))) < threshold:
            return f"{name} = {reward:g} is below min_reward {threshold:g}"
    return ""


def _combined(task: Task, score: Score) -> Score:
    """The rewards of a trial by those of its steps: their means, or the last step's own."""
    steps = [
        *_rewards(),
        *([{part.name: part.value for part in score.parts}] if score.parts else []),
    ]
    if task.data["reward_strategy"] == "final":
        steps = steps[-1:]
    names = dict.fromkeys(name for rewards in steps for name in rewards)
    means = {name: sum(each.get(name, 0.0) for each in steps) / len(steps) for name in names}
    parts = tuple(
        RewardPart(name=name, value=value, weight=float(name == TRAINS))
        for name, value in means.items()
    )
    return replace(score, parts=parts)
