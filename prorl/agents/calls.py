"""Tool calls of an attempt: run once each, whatever becomes of the worker.

A call has an id, and the sandbox remembers it; so a worker that takes the attempt over may ask it
again. What acts outside the sandbox may not be asked again, unless the env says that it may
(`Repeats`): when the worker died after such a call may have begun, the policy is told so, or the
attempt fails, as the run wants it (`on_lost_tool_call`).
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable
from typing import Protocol, runtime_checkable

from prorl.agents.context import AttemptContext
from prorl.errors import RolloutError, SandboxError
from prorl.journal import UNKNOWN, CallId, Marks, ToolAnswer
from prorl.types import FailureCode, ToolCall, ToolResult

TOOL_GRACE_S = 15.0
"""After a tool call's own limit; its sandbox has answered by then or is lost."""


@runtime_checkable
class Repeats(Protocol):
    """Optional part of an Env: which of its calls may run again."""

    def repeats(self, call: ToolCall) -> bool | Awaitable[bool]:
        """Whether the call changes nothing outside the sandbox, which remembers calls itself."""


class ToolCalls:
    def __init__(self, context: AttemptContext) -> None:
        self._context, self._journal = context, context.journal
        self._clock = context.deadline.clock
        self.recorded_s = 0.0
        """Seconds of calls that an earlier life has made."""

    async def run(self, turn: int, number: int, call: ToolCall) -> str:
        """What the policy is told of a call: recorded, or run now."""
        context = self._context
        if (answer := self._journal.answer(turn, number)) is not None:
            self.recorded_s += answer.tool_s
            return answer.text
        if context.cancelled():
            raise RolloutError(FailureCode.CANCELLED, "")
        context.deadline.check(FailureCode.DEADLINE, "tool calls")
        began = self._clock()
        limit_s = min(context.limits.tool_s, context.deadline.remaining_s)
        text = tool_text(await self._once(turn, number, call, limit_s), limit_s)
        tool_s = self._clock() - began
        return self._journal.tell(
            ToolAnswer(turn=turn, index=number, text=text, tool_s=tool_s, spent_s=spent_s(context))
        )

    async def _once(self, turn: int, number: int, call: ToolCall, limit_s: float) -> ToolResult:
        sandbox = self._context.sandbox
        doubtful = self._journal.begin()
        marked = sandbox if isinstance(sandbox, Marks) else None
        if doubtful and not await self._repeats(call):
            return self._unknown(f"{call.name} may have run when its worker died")
        try:
            if marked is not None:
                marked.mark(CallId(self._journal.epoch, turn, number))
            return await self._call(call, limit_s)
        except SandboxError as error:
            if error.code is not FailureCode.CALL_UNKNOWN:
                raise
            return self._unknown(error.message)
        finally:
            if marked is not None:
                marked.mark(None)

    async def _repeats(self, call: ToolCall) -> bool:
        env = self._context.env
        if not isinstance(env, Repeats):
            return False
        found = env.repeats(call)
        return await found if inspect.isawaitable(found) else found

    def _unknown(self, message: str) -> ToolResult:
        if self._journal.on_lost_tool_call == "fail":
            raise SandboxError(FailureCode.CALL_UNKNOWN, message)
        return ToolResult(output=UNKNOWN)

    async def _call(self, call: ToolCall, limit_s: float) -> ToolResult:
        context = self._context
        try:
            async with asyncio.timeout(limit_s + TOOL_GRACE_S) as guard:
                return await context.env.call(context.task, context.sandbox, call, limit_s)
        except TimeoutError as cause:
            if not guard.expired():
                raise
            message = f"no answer to {call.name} {TOOL_GRACE_S:g} s after its limit"
            raise SandboxError(FailureCode.SANDBOX_LOST, message) from cause


def spent_s(context: AttemptContext) -> float:
    """Seconds of the attempt's budget that are spent, in all of its lives."""
    return context.limits.run_s - context.deadline.remaining_s


def tool_text(result: ToolResult, limit_s: float) -> str:
    """What the policy is told of a call: its output, and what went wrong.

    >>> tool_text(ToolResult(output="no\\n", exit_code=1), 30.0)
    'no\\n[exit status 1]'
    """
    notes = []
    if result.truncated:
        notes.append("[output truncated]")
    if result.timed_out:
        notes.append(f"[stopped after {limit_s:.3g} s]")
    elif result.exit_code:
        notes.append(f"[exit status {result.exit_code}]")
    text = result.output.rstrip("\n")
    return "\n".join([*([text] if text else []), *notes]) or "[no output]"
