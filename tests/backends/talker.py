"""An agent for models that know no tools: each answer counts as a call of one, so that a rollout
has as many turns as its limits allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from prorl.agents.context import AttemptContext
from prorl.agents.native import NativeAgent
from prorl.envs.noop import NoopEnv
from prorl.types import Message, Task, ToolCall, ToolResult, ToolSpec, Trajectory

if TYPE_CHECKING:
    from prorl.protocols import Renderer, Sandbox
    from prorl.types import Int32


class _Calls:
    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)

    def parse(
        self, ids: Int32, prompt_ids: Int32 | None = None, tools: Sequence[ToolSpec] = ()
    ) -> Message:
        said = self._renderer.parse(ids, prompt_ids, tools)
        return replace(said, tool_calls=(ToolCall("look", {}),))


class Talker(NativeAgent):
    """`run.agent=tests/backends/talker.py:Talker`, with `load_code`."""

    async def run(self, context: AttemptContext) -> Trajectory:
        assert isinstance(context, AttemptContext)
        renderer = cast("Renderer", _Calls(context.renderer))
        return await super().run(replace(context, renderer=renderer))


class Wordy(NoopEnv):
    name = "wordy"

    async def call(
        self, task: Task, sandbox: Sandbox | None, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        return ToolResult(output="x" * 700)
