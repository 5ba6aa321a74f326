"""Tool calls of an attempt and the env's own turns: run once each, whatever becomes of the worker.

When a worker dies in the middle of a call, the next incarnation finds no answer of it in the
journal and makes it again (`_run_once`), which is safe where the call runs in the sandbox: it has
an id, by which the sandbox knows it and gives the result that it had. A call that acts outside the
sandbox is made again only if the env says that it may be (`DeclaresRepeatableTools`); else the
policy is told that it may have run, or the attempt fails, as the run wants it
(`on_lost_tool_call`).

An env's turn (`prorl.protocols.Responds`) is recorded with the state that it left, and is asked for
again, from the state before it, where the worker died before that.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, runtime_checkable

from prorl.agents.context import AttemptContext
from prorl.agents.record import AttemptRecord
from prorl.agents.sampler import within
from prorl.env_state import bound, checked_response
from prorl.errors import RolloutError, SandboxError, boundary
from prorl.journal import UNKNOWN, CallId, SupportsCallIds, ToolAnswer
from prorl.protocols import Responds
from prorl.types import FailureCode, Message, ToolCall, ToolResult
from prorl.waits import wait_limit_s

TOOL_GRACE_S = wait_limit_s("agent.tool_grace")


@runtime_checkable
class DeclaresRepeatableTools(Protocol):
    """Optional part of an Env: which of its calls may run again."""

    def repeats(self, call: ToolCall) -> bool | Awaitable[bool]:
        """Returns whether the call changes nothing outside the sandbox, which remembers calls
        itself.
        """


class ToolCalls:
    def __init__(self, context: AttemptContext) -> None:
        self._context, self._journal = context, context.journal
        self._clock = context.deadline.clock
        self.recorded_s = 0.0
        """Seconds of calls that an earlier worker has made."""
        self.state = context.state
        self.state.clear()
        self.state.seed, self.state.committed = context.seed, ""

    async def run(self, turn: int, number: int, call: ToolCall) -> str:
        """Returns the text that the policy reads of a call, which was recorded before or runs
        now.
        """
        context = self._context
        if (answer := self._recorded(turn, number)) is not None:
            return answer.text or ""
        self._check_open("tool calls")
        began = self._clock()
        limit_s = min(context.limits.tool_s, context.deadline.remaining_s)
        text = tool_text(await self._run_once(turn, number, call, limit_s), limit_s)
        self._record_answer(turn, number, text, self._clock() - began)
        return text

    async def respond(
        self, turn: int, number: int, messages: Sequence[Message], record: AttemptRecord
    ) -> str | None:
        """Returns the env's reply to an answer of the policy, which was recorded before or is
        computed now. None: it has no turns of its own, or ends the rollout.
        """
        context, env = self._context, self._context.env
        if not isinstance(env, Responds):
            return None
        if (answer := self._recorded(turn, number)) is not None:
            record.add_tool_calls(answer.tool_s, 0)
            return answer.text
        self._check_open("the env's turns")
        began = self._clock()
        try:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, f"{env.name}.respond"):
                response = env.respond(context.task, messages, self.state, context.sandbox)
                if inspect.isawaitable(response):
                    with self._marked(turn, number):
                        response = await within(context.deadline, response, "the env's turn")
        finally:
            record.add_tool_calls(self._clock() - began, 0)
        text = checked_response(response, env.name)
        self._record_answer(turn, number, text, self._clock() - began)
        return text

    def _recorded(self, turn: int, number: int) -> ToolAnswer | None:
        """Returns the recorded result of a call of an earlier worker; the env restores the state
        that it had then.
        """
        answer = self._journal.recorded_answer(turn, number)
        if answer is not None:
            self.recorded_s += answer.tool_s
            if answer.state is not None:
                self.state.load(answer.state)
                self.state.committed = answer.state
        return answer

    def _check_open(self, action: str) -> None:
        if self._context.cancelled():
            raise RolloutError(FailureCode.CANCELLED, "")
        self._context.deadline.check(FailureCode.DEADLINE, action)

    def _record_answer(self, turn: int, number: int, text: str | None, tool_s: float) -> None:
        """Record an answer in the journal, and the env's state where it has changed."""
        before, after = self.state.committed, self.state.text
        self.state.committed = after
        self._journal.record_answer(
            ToolAnswer(
                turn=turn,
                index=number,
                text=text,
                tool_s=tool_s,
                spent_s=self._context.spent_s,
                state=None if after == before else after,
            )
        )

    @contextmanager
    def _marked(self, turn: int, number: int) -> Iterator[None]:
        """Marks what the sandbox is asked for in the block as belonging to this call."""
        sandbox = self._context.sandbox
        if not isinstance(sandbox, SupportsCallIds):
            yield
            return
        sandbox.mark(CallId(self._journal.resumes, turn, number))
        try:
            yield
        finally:
            sandbox.mark(None)

    async def _run_once(self, turn: int, number: int, call: ToolCall, limit_s: float) -> ToolResult:
        doubtful = self._journal.begin_call()
        if doubtful and not await self._repeats(call):
            return self._unknown(f"{call.name} may have run when its worker died")
        try:
            with self._marked(turn, number):
                return await self._call(call, limit_s)
        except SandboxError as error:
            if error.code is not FailureCode.CALL_UNKNOWN:
                raise
            return self._unknown(error.message)

    async def _repeats(self, call: ToolCall) -> bool:
        env = self._context.env
        if not isinstance(env, DeclaresRepeatableTools):
            return False
        repeats = env.repeats(call)
        return await repeats if inspect.isawaitable(repeats) else repeats

    def _unknown(self, message: str) -> ToolResult:
        if self._journal.on_lost_tool_call == "fail":
            raise SandboxError(FailureCode.CALL_UNKNOWN, message)
        return ToolResult(output=UNKNOWN)

    async def _call(self, call: ToolCall, limit_s: float) -> ToolResult:
        context = self._context
        try:
            async with asyncio.timeout(limit_s + TOOL_GRACE_S) as guard:
                with bound(self.state):
                    return await context.env.call(context.task, context.sandbox, call, limit_s)
        except TimeoutError as cause:
            if not guard.expired():
                raise
            message = f"no answer to {call.name} {TOOL_GRACE_S:g} s after its limit"
            raise SandboxError(FailureCode.SANDBOX_LOST, message) from cause


def tool_text(result: ToolResult, limit_s: float) -> str:
    """Returns the text that the policy reads of a call: its output, and what went wrong.

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
