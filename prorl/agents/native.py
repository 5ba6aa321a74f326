"""The native tool loop: sample, parse, run the calls, append their output, again.

It ends when the policy answers or a budget is used up:

    prompt -> [completion -> calls -> tool output]* -> completion without calls -> artefact

Invariants: within a segment the ids of each prompt are all earlier ids plus the bridge, never
rendered again; a new segment begins only where the template or `shorten` tells the past anew;
nothing is retried here. How it ends: `ending.py`. Tokens of a model call that was cut short count
as far as its backend told of them (`sampler.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from prorl.agents.calls import ToolCalls, spent_s
from prorl.agents.ending import ARTEFACT_S, End, concluded, end_with
from prorl.agents.sampler import Sampler
from prorl.agents.shorten import Room, Shorten, drop_outputs, stop, summarise
from prorl.errors import BudgetError, RolloutError, boundary
from prorl.journal import Answer
from prorl.protocols import AgentContext, TalksBack
from prorl.types import (
    Completion,
    Failure,
    FailureCode,
    FinishReason,
    Message,
    StopReason,
    ToolCall,
    Trajectory,
)

USER_TURN_S = 120.0
"""Longest wait for what the env's user says."""
USER = -1
"""The place of the user's words among a turn's tool calls, in the journal."""


class NativeAgent:
    """Implements `prorl.protocols.Agent`; holds no state of an attempt.

    `shorten` says what becomes of a conversation whose next message does not fit.
    """

    def __init__(self, shorten: Shorten = stop, artefact_s: float = ARTEFACT_S) -> None:
        self._shorten, self._artefact_s = shorten, artefact_s

    async def run(self, context: AgentContext) -> Trajectory:
        """Drive one attempt to its end.

        Raises only CancelledError, and only when `context.cancelled()` is false.
        """
        attempt = _Attempt(context, self._shorten)
        return await concluded(context, attempt.record, attempt.drive(), self._artefact_s)


def native_drop() -> NativeAgent:
    """Make the agent `native-drop`, which leaves out the oldest tool outputs."""
    return NativeAgent(drop_outputs)


def native_summary() -> NativeAgent:
    """Make the agent `native-summary`, whose policy sums up what went before."""
    return NativeAgent(summarise)


class _Attempt:
    """One run of the loop; its state is the record."""

    def __init__(self, context: AgentContext, shorten: Shorten) -> None:
        self._context, self._shorten = context, shorten
        self._sampler = Sampler(context)
        self.record = self._sampler.record
        self._live = list(context.messages)
        """The conversation as the policy sees it now."""
        self._clock = context.deadline.clock
        self._journal = context.journal
        self._calls = ToolCalls(context)

    async def drive(self) -> End:
        """Turns until one ends the loop."""
        if (end := self._begin()) is not None:
            return end
        while (end := await self._turn(len(self.record.turns))) is None:
            pass
        return end

    def _begin(self) -> End | None:
        """Render what is live into a sequence that holds nothing yet."""
        context, record = self._context, self.record
        prompt = self._journal.context(len(record.turns), record.segment)
        if prompt is None:
            prompt = context.renderer.prompt(self._live, context.tools)
        if (limit := context.limits.max_tokens) <= len(prompt):
            text = f"a prompt of {len(prompt)} tokens does not fit in limits.max_tokens = {limit}"
            code = FailureCode.MAX_TOKENS if record.turns else FailureCode.BAD_TASK
            return End(StopReason.CONTEXT, Failure(code=code, message=text))
        record.sequence.context(prompt, turn=len(record.turns))
        return None

    async def _turn(self, turn: int) -> End | None:
        context, record = self._context, self.record
        prompt_ids_L = record.sequence.ids_L
        completion = await self._sampler.sample(record.sequence, turn)
        message = replace(
            context.renderer.parse(completion.token_ids_C, prompt_ids_L, context.tools), turn=turn
        )
        self._said(message)
        record.final = message.content
        if not message.tool_calls:
            if completion.finish_reason is FinishReason.LENGTH:
                return end_with(FailureCode.MAX_TOKENS, "cut off in the answer")
            outputs = await self._user_turn(turn)
            if not outputs:
                return End(StopReason.DONE)
            self._said(*outputs)
        else:
            outputs = await self._call_tools(turn, message.tool_calls)
        if turn + 1 >= context.limits.max_turns:
            return end_with(FailureCode.MAX_TURNS, f"{turn + 1} turns without an answer")
        return await self._extend(completion, outputs)

    def _said(self, *messages: Message) -> None:
        self.record.messages += messages
        self._live += messages

    async def _user_turn(self, turn: int) -> list[Message]:
        """What the user says, recorded or asked now; nothing ends the conversation.

        The policy does not pay for it: the deadline stands still. An env that fails is our fault.
        """
        context = self._context
        if not isinstance(context.env, TalksBack):
            return []
        if (answer := context.journal.answer(turn, USER)) is not None:
            return [Message(role="user", content=answer.text, turn=turn)]
        context.deadline.pause()
        try:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, f"{context.env.name}.user_turn"):
                async with asyncio.timeout(USER_TURN_S):
                    text = await context.env.user_turn(context.task, tuple(self._live))
        finally:
            context.deadline.resume()
        if text is None:
            return []
        told = Answer(turn=turn, index=USER, text=text, tool_s=0.0, spent_s=spent_s(context))
        return [Message(role="user", content=context.journal.tell(told), turn=turn)]

    # ---- what fits

    async def _extend(self, completion: Completion, new: Sequence[Message]) -> End | None:
        """Append the bridge; where it does not fit, or the run wants it so, a new segment."""
        context, record = self._context, self.record
        if context.renderer.starts_segment(new):
            record.new_segment()
            return self._begin()
        bridge = self._journal.context(len(record.turns), record.segment)
        if bridge is None:
            bridge = context.renderer.bridge(completion.token_ids_C, new)
        room = context.limits.max_tokens - len(record.sequence)
        if len(bridge) < room:
            record.sequence.context(bridge, turn=len(record.turns))
            return None
        shorter = await self._shorten(tuple(self._live), Room(self._fits, self._ask))
        if shorter is None:
            names = ", ".join(sorted({message.name for message in new} - {""})) or "tools"
            text = f"the output of {names}, {len(bridge)} tokens, does not fit: {room} are left"
            return End(StopReason.CONTEXT, Failure(code=FailureCode.MAX_TOKENS, message=text))
        self._live = list(shorter)
        record.new_segment()
        return self._begin()

    def _fits(self, messages: Sequence[Message]) -> bool:
        """Whether a conversation leaves a quarter of the context to go on with."""
        prompt = self._context.renderer.prompt(messages, self._context.tools)
        return 4 * len(prompt) <= 3 * self._context.limits.max_tokens

    async def _ask(self, messages: Sequence[Message]) -> str:
        """The policy's answer to a conversation, as a turn in a segment of its own."""
        record, before = self.record, self._live
        turn = len(record.turns)
        record.new_segment()
        self._live = list(messages)
        if (end := self._begin()) is not None:
            raise BudgetError(end.failure.code, end.failure.message)
        prompt_ids_L = record.sequence.ids_L
        completion = await self._sampler.sample(record.sequence, turn)
        said = self._context.renderer.parse(completion.token_ids_C, prompt_ids_L)
        record.messages += (replace(messages[-1], turn=turn), replace(said, turn=turn))
        self._live = before
        return said.content

    async def _call_tools(self, turn: int, calls: Sequence[ToolCall]) -> list[Message]:
        """Run the calls in order; what the policy is told of each."""
        outputs, began = list[Message](), self._clock()
        earlier_s = self._calls.recorded_s
        try:
            for number, call in enumerate(calls):
                text = await self._calls.run(turn, number, call)
                outputs.append(
                    Message(role="tool", content=text, name=call.name, call_id=call.id, turn=turn)
                )
        finally:
            self._said(*outputs)
            tool_s = self._clock() - began + self._calls.recorded_s - earlier_s
            self.record.tools(tool_s, len(calls))
        return outputs
