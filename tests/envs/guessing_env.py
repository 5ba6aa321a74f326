"""An env with turns of its own: it says higher or lower, until its number is named."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Mapping, Sequence
from typing import ClassVar

from prorl.env_state import EnvState
from prorl.envs.base import BaseEnv, Solution, tool
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import Message, Task, ToolCall, ToolSpec


@reward("won")
def won(task: Task, artifact: bytes, state: EnvState) -> float:
    """A win is worth less with each wrong number; a hint costs nothing."""
    right = artifact.decode().strip() == str(task.data["number"])
    return float(right) / float(1 + state.get("wrong", 0))


class Guessing(BaseEnv):
    """`task.data`: the `number`; `log`: a file for what each hook is called with; `pause` in s."""

    name = "guessing"
    rubric = Rubric((won, 1.0))
    partial_credit = True
    repeatable = ("hint",)

    @tool("A hint.", about={"type": "string"})
    def hint(self, task: Task, about: str, state: EnvState) -> str:
        """Says whether the number is even, and which hint this is."""
        state["hints"] = state.get("hints", 0) + 1
        return f"hint {state['hints']}: {'even' if task.data['number'] % 2 == 0 else 'odd'}"

    def respond(
        self, task: Task, messages: Sequence[Message], state: EnvState, sandbox: Sandbox | None
    ) -> str | None:
        """Higher or lower, and a number that no second call would draw again."""
        word = messages[-1].content.strip()
        if path := task.data.get("log"):
            with open(path, "a") as log:
                print(os.getpid(), state.seed, len(messages), word, dict(state), file=log)
        time.sleep(task.data.get("pause", 0.0))
        if word == str(task.data["number"]):
            return None
        state["wrong"] = state.get("wrong", 0) + 1
        side = "higher" if word.isdigit() and int(word) < task.data["number"] else "lower"
        return f"{state['wrong']}: {side} {random.random()}"

    def reference(self, task: Task) -> Solution:
        """A hint, one number too low, and the right one."""
        number = task.data["number"]
        hint = ToolCall("hint", {"about": "x"})
        return Solution((hint,), str(number - 1), (str(number),))


class Silent(Guessing):
    """It has no tool."""

    own_tools: ClassVar[Mapping[str, ToolSpec]] = {}

    def reference(self, task: Task) -> Solution:
        """One number too low, and the right one."""
        return super().reference(task)._replace(calls=())
