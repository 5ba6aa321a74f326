"""An agent for models that know no tools: each answer counts as a call of one, so that a rollout
has as many turns as its limits allow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl.agents.attempt import Attempt
from prorl.envs.noop import NoopEnv
from prorl.types import Task, ToolCall, ToolResult

if TYPE_CHECKING:
    from prorl.protocols import Sandbox


class TextOnlyAgent:
    """`run.agent=tests/backends/text_only_agent.py:TextOnlyAgent`, with `load_code`."""

    async def run(self, attempt: Attempt) -> str | None:
        await attempt.sample(attempt.messages)
        while True:  # until the budget of turns or tokens ends the rollout
            await attempt.sample([await attempt.call(ToolCall("look", {}))])


class Wordy(NoopEnv):
    name = "wordy"

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        return ToolResult(output="x" * 700)
