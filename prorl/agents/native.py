"""The native tool loop: sample, parse, run the calls, append their output, again.

It ends when the policy answers or a budget is used up:

    prompt -> [completion -> calls -> tool output]* -> completion without calls -> artifact

An env with turns of its own (`prorl.protocols.Responds`) may reply to that completion; then the
loop goes on after the reply, as after tool output.

Invariants: the ids of each prompt are all earlier ids plus the bridge, never rendered again, but
where the template would rewrite its past for a user's message: that begins a sequence of its own;
nothing is retried here. How it ends: `ending.py`. Of a model call that was cut short, the tokens
that had arrived count (`sampler.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from prorl.agents.calls import ToolCalls
from prorl.agents.context import AttemptContext
from prorl.agents.ending import End, end_with, run_to_trajectory
from prorl.agents.record import SequenceRecord
from prorl.agents.sampler import Sampler
from prorl.errors import BudgetError
from prorl.pluralize import pluralize
from prorl.renderer.apart import Rendering, check_fits, check_room, text_bytes
from prorl.schema import MAX_SEGMENTS
from prorl.tokenizer import max_token_bytes
from prorl.types import (
    Completion,
    Failure,
    FailureCode,
    FinishReason,
    Lineage,
    Message,
    StopReason,
    ToolCall,
    Trajectory,
)


class NativeAgent:
    """Implements `prorl.agents.context.Agent`; holds no state of an attempt."""

    async def run(self, context: AttemptContext) -> Trajectory:
        attempt = _Attempt(context)
        return await run_to_trajectory(context, attempt.record, attempt.drive())


class _Attempt:
    """One run of the loop; its state is the record."""

    def __init__(self, context: AttemptContext) -> None:
        self._context, self._sampler = context, Sampler(context)
        self.record = self._sampler.record
        self._clock, self._journal = context.deadline.clock, context.journal
        self._calls = ToolCalls(context)
        self._segments: list[SequenceRecord] = []
        """Sequences behind the first; bounded by MAX_SEGMENTS."""
        self._rendering = Rendering(context.renderer, context.renderer_spec, context.deadline)

    async def drive(self) -> End:
        context, record = self._context, self.record
        prompt = self._journal.recorded_context(0, 0)
        if prompt is None:
            most = max_token_bytes(context.renderer)
            check_fits(text_bytes(context.messages), most, context.limits.max_tokens)
            prompt = await self._rendering.prompt(context.messages, context.tools)
        check_room(len(prompt), context.limits.max_tokens)
        record.sequence.append_context(prompt, turn=0)
        try:
            while (end := await self._turn(len(record.turns))) is None:
                pass
            return end
        finally:
            for sequence in self._segments:
                if sequence.lineage not in context.train:
                    sequence.untrain()

    async def _turn(self, turn: int) -> End | None:
        context, record = self._context, self.record
        prompt_ids_L = record.sequence.ids_L
        completion = await self._sampler.sample(record.sequence, turn)
        ids = completion.token_ids_C
        message = await self._rendering.parse(ids, prompt_ids_L, context.tools)
        message = replace(message, turn=turn)
        record.messages.append(message)
        record.final = message.content
        if not message.tool_calls:
            if completion.finish_reason is FinishReason.LENGTH:
                return end_with(FailureCode.MAX_TOKENS, "cut off in the answer")
            text = await self._calls.respond(turn, 0, tuple(record.messages), record)
            if text is None:
                return End(StopReason.DONE)
            outputs = [Message(role="user", content=text, turn=turn + 1)]
            record.messages += outputs
        else:
            outputs = await self._call_tools(turn, message.tool_calls)
        if turn + 1 >= context.limits.max_turns:
            return end_with(FailureCode.MAX_TURNS, f"{pluralize(turn + 1, 'turn')} without an end")
        return await self._extend(completion, outputs)

    async def _extend(self, completion: Completion, outputs: Sequence[Message]) -> End | None:
        context, record = self._context, self.record
        if outputs[0].role == "user" and await self._rendering.starts_segment(outputs):
            return await self._begin_segment()
        room = context.limits.max_tokens - len(record.sequence)
        num_bytes = text_bytes(outputs)
        size = f"{num_bytes:,} bytes"
        if num_bytes <= room * max_token_bytes(context.renderer):  # else it is not worth rendering
            bridge = self._journal.recorded_context(len(record.turns), record.sequence.segment)
            if bridge is None:
                bridge = await self._rendering.bridge(completion.token_ids_C, outputs)
            if len(bridge) < room:
                record.sequence.append_context(bridge, turn=len(record.turns))
                return None
            size = f"{len(bridge)} tokens"
        names = ", ".join(sorted({message.name for message in outputs} - {""})) or "tools"
        source = "the env's turn" if outputs[0].role == "user" else f"the output of {names}"
        text = f"{source}, {size}, does not fit: {room} tokens are left"
        return End(StopReason.CONTEXT, Failure(code=FailureCode.MAX_TOKENS, message=text))

    async def _begin_segment(self) -> End | None:
        """The conversation so far as a sequence of its own, rendered whole."""
        record, limits = self.record, self._context.limits
        turn, parent = len(record.turns), record.sequence.segment
        if parent + 1 >= MAX_SEGMENTS:
            raise BudgetError(FailureCode.MAX_TURNS, f"{MAX_SEGMENTS} sequences")
        prompt = self._journal.recorded_context(turn, parent + 1)
        if prompt is None:
            prompt = await self._rendering.prompt(record.messages, self._context.tools)
        if len(prompt) >= limits.max_tokens:
            text = f"the conversation, {len(prompt)} tokens, does not fit: {limits.max_tokens=}"
            return End(StopReason.CONTEXT, Failure(code=FailureCode.MAX_TOKENS, message=text))
        sequence = record.begin(Lineage.COMPACTED, parent)
        sequence.append_context(prompt, turn=turn)
        self._segments.append(sequence)
        return None

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
            self.record.messages += outputs
            tool_s = self._clock() - began + self._calls.recorded_s - earlier_s
            self.record.add_tool_calls(tool_s, len(calls))
        return outputs
