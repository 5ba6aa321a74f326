"""An env whose calls leave marks: what ran twice, or in another shell, is seen."""

from __future__ import annotations

from prorl.envs.base import BaseEnv, Solution
from prorl.envs.tools import BASH
from prorl.protocols import Sandbox
from prorl.rubric import Rubric, reward
from prorl.types import Task, ToolCall

STEP = (
    "n=$((n+1)); echo {turn} >> counter; sleep {pause}; "
    "(sleep 60 & echo $! > victim); kill $(cat victim) && echo killed >> kills; "
    "echo n=$n lines=$(wc -l < counter) kills=$(wc -l < kills)"
)
"""Appends, counts in a variable of the shell, starts and kills a process of its own."""


def turn_text(turn: int) -> str:
    """Returns the text of a step when it and each before it ran once, in one shell."""
    return f"n={turn + 1} lines={turn + 1} kills={turn + 1}"


@reward("exact")
def exact(task: Task, artifact: bytes) -> float:
    """Returns 1 if the sandbox's files agree."""
    turns = int(task.data.get("expected", task.data["turns"]))
    lines = "".join(f"{turn}\n" for turn in range(turns)) + "killed\n" * turns
    return float(artifact.decode() == lines)


class Counting(BaseEnv):
    """`task.data`: `turns`, `pause` in seconds, and `expected` turns where not all of them do."""

    name = "counting"
    offers = (BASH,)
    rubric = Rubric((exact, 1.0))

    async def artifact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """Both files."""
        assert sandbox is not None
        return await sandbox.get("counter") + await sandbox.get("kills")

    def reference(self, task: Task) -> Solution:
        """The steps in order."""
        steps = range(int(task.data["turns"]))
        pause = task.data.get("pause", 0.05)
        calls = [ToolCall("bash", {"command": STEP.format(turn=t, pause=pause)}) for t in steps]
        return Solution(tuple(calls), "done")
