"""The env that does nothing: no tools, no sandbox, reward 1 for anything.

What remains is the cost of the service itself.
"""

from __future__ import annotations

from prorl.envs.tools import Solution, run_call
from prorl.limits import Deadline
from prorl.protocols import Sandbox
from prorl.types import (
    Message,
    RewardPart,
    SandboxSpec,
    Score,
    Stage,
    Task,
    ToolCall,
    ToolResult,
    ToolSpec,
)


class NoopEnv:
    """Implements `prorl.protocols.Env`; `task.data` is not read."""

    name = "noop"

    def check(self, task: Task) -> None:
        """Every task will do."""

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        """None."""
        return None

    def tools(self, task: Task) -> tuple[ToolSpec, ...]:
        """None."""
        return ()

    def messages(self, task: Task) -> tuple[Message, ...]:
        """The prompt as it is."""
        return (Message(role="user", content=task.prompt),)

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        """Nothing to put anywhere."""

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        """Tells the policy that there are no tools."""
        return await run_call((), sandbox, call, timeout_s)

    async def artefact(self, task: Task, final: str, sandbox: Sandbox | None) -> bytes:
        """The final answer."""
        return final.encode("utf-8", "replace")

    async def score(
        self, task: Task, artefact: bytes, sandbox: Sandbox | None, deadline: Deadline
    ) -> Score:
        """1."""
        return Score(parts=(RewardPart(name="done", value=1.0),))

    def reference(self, task: Task) -> Solution:
        """Saying anything solves it."""
        return Solution((), "done")
