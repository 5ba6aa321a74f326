"""Gym-style environments (`reset`, `step`) as an env: the policy acts by a tool, one call a step.

    {"task_id": "lake/7", "env": "gym", "prompt": "Reach the goal.",
     "data": {"gym": "FrozenLake-v1", "arguments": {"is_slippery": false}, "seed": 7}}

| `task.data` | |
|---|---|
| gym | id that `gymnasium.make` knows, or `module:ID` for a package that registers it |
| arguments | keyword arguments of `make` |
| seed | of `reset` (0); one seed, one course of the game |
| max_steps | calls that count (200) |
| target | return at which the reward is 1 (1.0); the reward is return / target, within 0 and 1 |
| solution | actions, for the oracle |

An action is JSON: a number for Discrete, a list for Box and MultiDiscrete, a text for Text. The
artefact is the list of actions, which the tool keeps in the sandbox; EVAL plays them again from
`reset` and takes the rewards from the game alone, so nothing that the policy writes is believed.
The game must follow from its seed; one that cannot be made or played again is a grader error. Games
run in helpers, as users' envs do.
"""

from __future__ import annotations

import json
import reprlib
from importlib.util import find_spec
from typing import NamedTuple

import anyio.to_thread

from prorl.envs.base import BaseEnv, Solution
from prorl.envs.resources import spec_of
from prorl.envs.tools import BAD_CALL, call_problem, make_spec
from prorl.errors import GraderError, RolloutError, TaskError, boundary
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import (
    FailureCode,
    Json,
    Judgement,
    Message,
    SandboxSpec,
    Stage,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)

HISTORY = ".gym-actions.json"
MAX_STEPS = 200
_SHOWN_CHARS = 4000
_STEP = make_spec(
    "step",
    "Act once in the environment; says what is seen then, the reward, and whether it is over.",
    ("action",),
    action={"description": "The action, as the task describes it."},
)


class Played(NamedTuple):
    """A game after its actions."""

    observation: str
    last_reward: float
    total: float
    is_over: bool
    problem: str
    """Why the last action was not taken; empty when it was."""


@reward("return")
async def game_return(
    task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
) -> Judgement:
    """The game's return over the target, within 0 and 1. Raises GraderError."""
    actions = _actions(artefact)
    if actions is None:
        return Judgement(0.0, f"{HISTORY} was spoilt: {artefact[:200]!r} is no list of actions")
    with boundary(GraderError, FailureCode.GRADER_ERROR, "the game, played again"):
        with anyio.fail_after(deadline.remaining_s):
            played = await anyio.to_thread.run_sync(_play, task, actions, abandon_on_cancel=True)
    target = float(task.data.get("target", 1.0))
    value = min(1.0, max(0.0, played.total / target))
    return Judgement(value, f"return {played.total:g} of {target:g} in {len(actions)} steps")


class GymEnv(BaseEnv):
    """One tool `step`; the artefact is the list of actions."""

    name = "gym"
    system = "You act in an environment by the tool `step`. When it is over, say so in a word."
    rubric = Rubric((game_return, 1.0))

    def check(self, task: Task) -> None:
        super().check(task)
        if find_spec("gymnasium") is None:
            raise TaskError("the env 'gym'", "gymnasium", "pip install 'prorl[gym]'")
        steps, target = task.data.get("max_steps", MAX_STEPS), task.data.get("target", 1.0)
        if not isinstance(steps, int) or not 0 < steps <= 10_000:
            raise TaskError(f"task {task.task_id!r}: data.max_steps is {steps!r}", "1 to 10000")
        if isinstance(target, bool) or not isinstance(target, int | float) or not target > 0:
            raise TaskError(f"task {task.task_id!r}: data.target is {target!r}", "above 0")
        try:
            with boundary(RolloutError, FailureCode.BAD_TASK, "gymnasium"):
                _play(task, [])
        except RolloutError as cause:
            raise TaskError(
                f"task {task.task_id!r}: {cause.message}"[:500], "a game that `make` knows"
            ) from cause

    def tools(self, task: Task) -> tuple[ToolSpec, ...]:
        return (_STEP, *super().tools(task))

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        if stage is Stage.RUN:
            return spec_of(task, self._inside(task))
        return super().sandbox(task, stage)

    def messages(self, task: Task) -> tuple[Message, ...]:
        system, user = super().messages(task)
        first = f"{user.content}\n\n{_space(task)}\n\n{_play(task, []).observation}"
        return system, Message(role="user", content=first)

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        assert sandbox is not None
        await sandbox.put(HISTORY, b"[]")

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        if call.name != _STEP.name or call.error:
            return await super().call(task, sandbox, call, timeout_s)
        if problem := call_problem((_STEP,), call):
            return ToolResult(output=problem, exit_code=BAD_CALL)
        assert sandbox is not None
        return await _step(task, sandbox, call.arguments["action"])

    async def artefact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The actions that were taken."""
        assert sandbox is not None
        return await _history(sandbox)

    def reference(self, task: Task) -> Solution:
        """The actions of `data.solution`. Raises TaskError."""
        actions: Json = task.data.get("solution")
        if not isinstance(actions, list):
            return super().reference(task)  # type: ignore[return-value]
        calls = tuple(ToolCall(_STEP.name, {"action": action}) for action in actions)
        return Solution(calls, "It is over.")


async def _step(task: Task, sandbox: Sandbox, action: Json) -> ToolResult:
    """Play the actions so far and this one; one that the game takes is kept in the sandbox."""
    before = _actions(await _history(sandbox))
    if before is None:
        output = f"{HISTORY} was spoilt: it is no list of actions, and no step counts."
        return ToolResult(output=output, exit_code=BAD_CALL)
    actions = [*before, action]
    played = await anyio.to_thread.run_sync(_play, task, actions)
    if played.problem:
        return ToolResult(output=played.problem, exit_code=BAD_CALL)
    await sandbox.put(HISTORY, json.dumps(actions).encode())
    over = " The game is over." if played.is_over else ""
    return ToolResult(
        output=f"{played.observation}\nreward {played.last_reward:g}, in all"
        f" {played.total:g}.{over}"
    )


async def _history(sandbox: Sandbox) -> bytes:
    try:
        return await sandbox.get(HISTORY)
    except FileNotFoundError:
        return b"[]"


def _actions(artefact: bytes) -> list[Json] | None:
    """The actions of an artefact, which the agent may have written itself; None: it is no list."""
    try:
        found = json.loads(artefact)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, list) else None


def _make(task: Task) -> Json:
    import gymnasium

    return gymnasium.make(str(task.data.get("gym", "")), **task.data.get("arguments", {}))


def _space(task: Task) -> str:
    game = _make(task)
    try:
        return f"Actions: {game.action_space}. Observations: {game.observation_space}."
    finally:
        game.close()


def _play(task: Task, actions: list[Json]) -> Played:
    """A fresh game with these actions; ends at the first that is none, or that comes too late."""
    game = _make(task)
    try:
        seen, _ = game.reset(seed=int(task.data.get("seed", 0)))
        played = Played(_text(seen), 0.0, 0.0, False, "")
        for number, action in enumerate(actions):
            if played.is_over or number >= task.data.get("max_steps", MAX_STEPS):
                return played._replace(problem="The game is over: no further step counts.")
            fits, taken = _action(game.action_space, action)
            if not fits:
                shown = reprlib.repr(action)
                return played._replace(problem=f"{shown} is no action of {game.action_space}")
            seen, gained, ended, cut, _ = game.step(taken)
            total = played.total + float(gained)
            played = Played(_text(seen), float(gained), total, bool(ended or cut), "")
        return played
    finally:
        game.close()


def _action(space: Json, action: Json) -> tuple[bool, Json]:
    """(whether it is one of the space's, in the space's own type), whatever the agent wrote."""
    import numpy as np

    try:
        if isinstance(action, list):
            action = np.asarray(action, dtype=getattr(space, "dtype", None))
        elif isinstance(action, str) and not space.contains(action):
            action = int(action)  # models write numbers as texts
        return bool(not isinstance(action, bool) and space.contains(action)), action
    except (TypeError, ValueError, OverflowError, RecursionError):
        return False, None


def _text(seen: Json) -> str:
    return f"You see: {seen}"[:_SHOWN_CHARS]
