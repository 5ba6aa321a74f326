"""`ConversationTree`: places each request of an attempt among the ids that exist already.

    request -> canonical messages -> chain of digests -> the call whose prompt it begins with
            -> recorded ids + bridge(what is new)           the same sequence, or a fork
    or, where nothing fits: rendered whole                  a sequence of its own

An agent is compared with itself, since agents repeat themselves exactly; only the one message that
echoes our reply is compared with the reply, by the ids of its calls, or by its text. It is never
rendered: recorded ids stand in its place, whatever the agent has made of it. Of a request that was
placed its digests and counts are kept, not its messages.

Requests are placed one after the other; what is long is rendered elsewhere meanwhile
(`prorl.renderer.apart`).

Invariants: a sampled id trains in one sequence only, behind the very ids that it was sampled
behind; an undelivered reply is replayed, not resampled; if a prompt was sampled several times, only
the replies that were continued train. Belongs to one loop; bounded by `limits.max_turns` calls.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from hashlib import blake2b
from typing import TYPE_CHECKING

import numpy as np

from prorl.agents.capture.canonical import (
    IMAGE,
    INVALID_CALL,
    ConversationRequest,
    RefusedError,
    Reply,
    canonical_arguments,
)
from prorl.errors import BudgetError, RolloutError, TaskError, boundary
from prorl.pluralize import pluralize
from prorl.renderer.apart import (
    LIGHT_BYTES,
    Rendering,
    check_fits,
    text_bytes,
)
from prorl.schema import MAX_SEGMENTS
from prorl.states import TASK_LINEAGES
from prorl.tokenizer import max_token_bytes
from prorl.types import EndpointCounts, FailureCode, Lineage, Message, ToolCall, ToolSpec

if TYPE_CHECKING:
    from prorl.agents.context import AttemptContext
    from prorl.agents.record import SequenceRecord
    from prorl.agents.sampler import Sampler
    from prorl.types import Int32

MAX_MESSAGE_BYTES = 16 << 20
"""The record keeps at most so many bytes of what an agent said, for people to read. An agent that
begins anew at each call says all of it again.
"""


@dataclass(slots=True, kw_only=True, eq=False)
class Call:
    number: int
    num_messages: int
    max_tokens: int | None
    has_tools: bool
    sequence: SequenceRecord
    start: int
    """The place where its sampled ids begin in the sequence."""
    has_client: Callable[[], bool]
    """True if a client is there to receive the reply."""
    parent: Call | None
    """The call that it goes on from; None for a conversation's first, or a repeated one."""
    task: asyncio.Task[Reply] = field(init=False)
    end: int = 0
    reply: Reply | None = None
    completion: Int32 = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    delivered: bool = False
    has_mismatch: bool = False
    """Rendering its prompt again would change what was sampled before."""
    continued: bool = False


class ConversationTree:
    def __init__(self, context: AttemptContext, sampler: Sampler) -> None:
        self._context, self._sampler, self._record = context, sampler, sampler.record
        self._renderer = context.renderer
        self._rendering = Rendering(context.renderer, context.renderer_spec, context.deadline)
        self._placing = asyncio.Lock()  # protects the record between a place and its ids
        self._message_bytes = 0
        self._calls: list[Call] = []
        self._by_prompt: defaultdict[bytes, list[Call]] = defaultdict(list)
        self._own_ids: dict[str, ToolCall] = {}
        """Calls as the policy wrote them, by the ids that agents know."""
        self._main = b""
        """Digest of the first message of the prompt that main began with."""
        self.counts: Counter[str] = Counter()
        self.ended: asyncio.Future[RolloutError] = asyncio.get_running_loop().create_future()
        """The reason why the attempt can sample nothing more, once it cannot."""

    @property
    def has_calls(self) -> bool:
        return bool(self._calls)

    async def call(
        self,
        conversation: ConversationRequest,
        digests: Sequence[bytes],
        has_client: Callable[[], bool],
    ) -> Call:
        """The model call of a request, `digests` its `chain`; its task gives the reply.

        Raises RefusedError, and RolloutError when the attempt has ended.
        """
        async with self._placing:
            return await self._call(conversation, digests, has_client)

    async def _call(
        self,
        conversation: ConversationRequest,
        digests: Sequence[bytes],
        has_client: Callable[[], bool],
    ) -> Call:
        if self.ended.done():
            raise self.ended.result()
        siblings = self._by_prompt[digests[-1]]
        for call in siblings:
            if (
                call.max_tokens == conversation.max_tokens
                and not call.delivered
                and not call.has_client()
            ):
                self.counts["replayed"] += 1
                call.has_client = has_client
                return call
        try:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, "a model call"):
                sequence, parent, has_mismatch = await self._place(conversation, digests, siblings)
        except TaskError as error:
            raise RefusedError(str(error)) from error
        except RolloutError as error:
            self._end(error)
            raise
        call = Call(
            number=len(self._calls),
            num_messages=len(conversation.messages),
            max_tokens=conversation.max_tokens,
            has_tools=bool(conversation.tools),
            sequence=sequence,
            start=len(sequence),
            has_client=has_client,
            parent=parent,
            has_mismatch=has_mismatch,
        )
        self._calls.append(call)
        siblings.append(call)
        call.task = asyncio.create_task(self._sample_reply(call, conversation.tools))
        return call

    async def count(self, conversation: ConversationRequest) -> int:
        """Ids of a request's prompt. Raises RefusedError for one that fits no sequence."""
        async with self._placing:
            try:
                self._check_bytes(conversation.messages)
                return len(await self._prompt(conversation))
            except (TaskError, BudgetError) as error:
                raise RefusedError(str(error)) from error

    def _end(self, error: RolloutError) -> None:
        if not self.ended.done():
            self.ended.set_result(error)

    # ---- placing

    async def _place(
        self, conversation: ConversationRequest, digests: Sequence[bytes], siblings: list[Call]
    ) -> tuple[SequenceRecord, Call | None, bool]:
        """Returns the sequence that holds the prompt and nothing behind it, the call whose reply it
        follows, and whether rendering it whole would change the ids of its past.
        """
        turn = len(self._calls)
        if turn >= self._context.limits.max_turns:
            raise BudgetError(FailureCode.MAX_TURNS, f"{pluralize(turn, 'call')} without an end")
        if self._record.sequence.segment + 1 >= MAX_SEGMENTS:
            raise BudgetError(FailureCode.MAX_TURNS, f"{MAX_SEGMENTS} sequences")
        if siblings:
            self.counts["forked_calls"] += 1
            first = siblings[0]
            sequence = self._record.fork(first.sequence.segment, first.start, turn)
            return sequence, None, first.has_mismatch
        parent = self._parent(conversation, digests)
        if parent is not None and parent.reply is not None:
            new = self._new_messages(conversation.messages[parent.num_messages + 1 :], parent.reply)
            self._check_bytes(new)
            bridge = await self._bridge(parent.completion, new)
            if bridge is not None:
                self._check_room(parent.end + len(bridge))
                has_mismatch = await self._has_mismatch(parent, conversation)
                return (
                    self._continue_sequence(parent, bridge, conversation, turn, has_mismatch),
                    parent,
                    has_mismatch,
                )
        self._check_bytes(conversation.messages)
        return (
            self._begin_sequence(await self._prompt(conversation), conversation, digests, turn),
            None,
            False,
        )

    def _parent(self, conversation: ConversationRequest, digests: Sequence[bytes]) -> Call | None:
        """The call whose prompt and reply the request begins with; the longest such prompt."""
        for length in range(len(conversation.messages) - 1, 0, -1):
            calls = self._by_prompt.get(digests[length], ())
            # The last reply that the agent has received, if several are equal.
            for call in sorted(calls, key=lambda call: (call.delivered, call.number), reverse=True):
                tail = conversation.messages[length + 1 :]
                if (
                    call.reply is not None
                    and is_echo(call.reply.message, conversation.messages[length])
                    and all(message.role != "assistant" for message in tail)
                ):
                    return call
        return None

    def _continue_sequence(
        self,
        parent: Call,
        bridge: Int32,
        conversation: ConversationRequest,
        turn: int,
        has_mismatch: bool,
    ) -> SequenceRecord:
        sequence = parent.sequence
        if len(sequence) != parent.end:
            self.counts["forked_calls"] += 1
            sequence = self._record.fork(sequence.segment, parent.end, turn)
        sequence.append_context(bridge, turn)
        assert parent.reply is not None
        place = parent.num_messages
        self.counts["continued_calls"] += 1
        self.counts["edited_replies"] += is_edited(
            parent.reply.message, conversation.messages[place]
        )
        self.counts["retokenization_mismatches"] += has_mismatch
        parent.continued = parent.delivered = True
        self._record_messages(conversation.messages[place + 1 :], turn)
        return sequence

    def _begin_sequence(
        self, ids: Int32, conversation: ConversationRequest, digests: Sequence[bytes], turn: int
    ) -> SequenceRecord:
        self._check_room(len(ids))
        lineage, parent = self._lineage(conversation, digests)
        if not self._calls:
            self._record.messages.clear()  # the agent's own first prompt stands for the env's
        sequence = self._record.begin(lineage, parent)
        sequence.append_context(ids, turn)
        self.counts["rendered_calls"] += 1
        self._record_messages(conversation.messages, turn)
        return sequence

    def _lineage(
        self, conversation: ConversationRequest, digests: Sequence[bytes]
    ) -> tuple[Lineage, int]:
        """Returns the lineage of a conversation that continues none, and the segment it comes from.

        The first with tools has the task; where no agent names tools, the first.
        """
        main = [call for call in self._calls if call.sequence.lineage in TASK_LINEAGES]
        if not main or (conversation.tools and not main[0].has_tools):
            for call in main:
                call.sequence.lineage = Lineage.AUXILIARY
            self._main = digests[1]
            return Lineage.MAIN, -1
        for length in range(len(conversation.messages) - 1, 0, -1):
            if calls := self._by_prompt.get(digests[length]):
                origin = calls[-1].sequence
                is_tasks = origin.lineage in TASK_LINEAGES
                return Lineage.COMPACTED if is_tasks else origin.lineage, origin.segment
        if digests[1] == self._main:
            return Lineage.COMPACTED, main[-1].sequence.segment
        return Lineage.SUBAGENT if conversation.tools else Lineage.AUXILIARY, -1

    def _check_bytes(self, messages: Sequence[Message]) -> None:
        """Raise BudgetError for what is not worth rendering: no ids can hold so much."""
        try:
            most = self._context.limits.max_tokens
            check_fits(text_bytes(messages), max_token_bytes(self._renderer), most)
        except TaskError as error:
            code = FailureCode.MAX_TOKENS if self._record.turns else FailureCode.BAD_TASK
            raise BudgetError(code, str(error)) from None

    def _check_room(self, length: int) -> None:
        if length < self._context.limits.max_tokens:
            return
        text = (
            f"a prompt of {length} tokens does not fit in limits.max_tokens ="
            f" {self._context.limits.max_tokens}"
        )
        code = FailureCode.MAX_TOKENS if self._record.turns else FailureCode.BAD_TASK
        raise BudgetError(code, text)

    # ---- ids

    def _new_messages(self, tail: Sequence[Message], reply: Reply) -> list[Message]:
        """Returns the messages that are new to the template: results in the order of their
        calls.
        """
        order = {call.id: index for index, call in enumerate(reply.message.tool_calls)}
        results = 0
        while results < len(tail) and tail[results].role == "tool":
            results += 1
        first = sorted(tail[:results], key=lambda m: order.get(m.call_id, len(order)))
        return [self._as_written(message) for message in (*first, *tail[results:])]

    def _as_written(self, message: Message) -> Message:
        """A message with the policy's own ids of calls, and the name of the tool that answers."""
        if message.role == "tool" and (own := self._own_ids.get(message.call_id)):
            return replace(message, call_id=own.id, name=own.name)
        calls = tuple(
            call._replace(id=self._own_ids[call.id].id) if call.id in self._own_ids else call
            for call in message.tool_calls
        )
        return replace(message, tool_calls=calls)

    async def _bridge(self, completion: Int32, new: list[Message]) -> Int32 | None:
        """None where the template would rewrite the history, or takes no such messages."""
        if await self._rendering.starts_segment(new):
            return None
        for messages in (new, _as_users(new)):
            try:
                return await self._rendering.bridge(completion, messages)
            except TaskError:
                continue
        return None

    async def _has_mismatch(self, parent: Call, conversation: ConversationRequest) -> bool:
        """Returns whether rendering a request whole would change the ids that its past was sampled
        as.

        It is what a server's own chat endpoint would do, and the only reason why it is done here.
        A mismatch is inherited. A long conversation is looked at when its calls have
        doubled: to render each of them would cost more than all else here.
        """
        if parent.has_mismatch:
            return True
        turn = len(self._calls)
        if text_bytes(conversation.messages) > LIGHT_BYTES and turn & (turn - 1):
            return False
        recorded = parent.sequence.ids_L[: parent.end].copy()
        try:
            return not np.array_equal((await self._prompt(conversation))[: len(recorded)], recorded)
        except TaskError:
            return True

    async def _prompt(self, conversation: ConversationRequest) -> Int32:
        messages = [self._as_written(message) for message in conversation.messages]
        try:
            return await self._rendering.prompt(messages, conversation.tools)
        except TaskError:
            return await self._rendering.prompt(join_system(messages), conversation.tools)

    # ---- sampling

    async def _sample_reply(self, call: Call, tools: Sequence[ToolSpec]) -> Reply:
        try:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, "a model call"):
                completion = await self._sampler.sample(call.sequence, call.number, call.max_tokens)
        except RolloutError as error:
            self._end(error)
            raise
        before = call.sequence.ids_L[: call.start]
        call.end, call.completion = len(call.sequence), completion.token_ids_C
        parsed = await self._rendering.parse(completion.token_ids_C, before, tools)
        calls = tuple(self._with_unique_id(call, own) for own in parsed.tool_calls)
        call.reply = Reply(
            number=call.number,
            message=replace(parsed, tool_calls=calls, turn=call.number),
            finish=completion.finish_reason,
            prompt_tokens=call.start,
            completion_tokens=len(completion.token_ids_C),
            cached_tokens=completion.cached_tokens,
        )
        self._record.messages.append(call.reply.message)
        if call.sequence.lineage in TASK_LINEAGES:
            self._record.final = parsed.content
        return call.reply

    def _with_unique_id(self, call: Call, own: ToolCall) -> ToolCall:
        """A call with an id that no other of the attempt has."""
        identity = f"{self._context.key}/{call.number}/{len(self._own_ids)}".encode()
        name = f"call_{blake2b(identity, digest_size=8).hexdigest()}"
        self._own_ids[name] = own
        return own._replace(id=name, name=own.name or INVALID_CALL)

    def _record_messages(self, messages: Sequence[Message], turn: int) -> None:
        """Write down for people what the agent said."""
        for message in messages:
            if message.role != "assistant":
                self.counts["image_placeholders"] += message.content.count(IMAGE)
            own = self._own_ids.get(message.call_id)
            name = own.name if own else message.name
            beside = len(message.reasoning) + sum(len(call.text) for call in message.tool_calls)
            self._message_bytes += (size := text_bytes([message]) + beside)
            if self._message_bytes > MAX_MESSAGE_BYTES:
                text = f"[{size:,} bytes are left out]"
                message = replace(message, content=text, reasoning="", tool_calls=())
            self._record.messages.append(replace(message, turn=turn, name=name))

    # ---- the end

    async def close(self) -> None:
        """End the calls in flight and decide what trains: then the record is complete."""
        tasks = [call.task for call in self._calls if not call.task.done()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if not self.ended.done():
            self.ended.cancel()
        for call in self._unused_replies():
            self.counts["unused_replies"] += 1
            call.sequence.untrain(call.number)
        for sequence in {id(call.sequence): call.sequence for call in self._calls}.values():
            if sequence.lineage not in self._context.train:
                sequence.untrain()
        counted = {field.name: self.counts[field.name] for field in fields(EndpointCounts)}
        self._record.endpoint_counts = EndpointCounts(**counted)

    def _unused_replies(self) -> Iterator[Call]:
        """Yields the replies that the agent did not continue, where a prompt was sampled more than
        once.
        """
        for siblings in self._by_prompt.values():
            if len(siblings) > 1:
                continued = [call for call in siblings if call.continued]
                continued = continued or [call for call in siblings if call.delivered]
                if len(continued) > 1 and not any(call.continued for call in continued):
                    continued = []  # nobody knows which of them the agent goes on with
                yield from (call for call in siblings if call not in continued)


def is_echo(reply: Message, sent: Message) -> bool:
    """Returns whether an agent's message stands for our reply: by its calls, else by its text."""
    if sent.role != "assistant":
        return False
    if reply.tool_calls:
        return {call.id for call in reply.tool_calls} == {call.id for call in sent.tool_calls}
    return not sent.tool_calls and sent.content.strip() == reply.content.strip()


def is_edited(reply: Message, sent: Message) -> bool:
    """Returns whether an echo differs from our reply."""

    def comparable(message: Message) -> list[tuple[str, str]]:
        return [(call.name, canonical_arguments(call)) for call in message.tool_calls]

    return reply.content.strip() != sent.content.strip() or comparable(reply) != comparable(sent)


def join_system(messages: Sequence[Message]) -> list[Message]:
    """Fits templates that take one system message, in first place: joins leading ones, later ones
    as a user's.

    One that came later never moves to the front, which would change the past.
    """
    leading = 0
    while leading < len(messages) and messages[leading].role == "system":
        leading += 1
    text = "\n\n".join(message.content for message in messages[:leading])
    first = [Message(role="system", content=text)] if leading else []
    return [*first, *_as_users(messages[leading:])]


def _as_users(messages: Sequence[Message]) -> list[Message]:
    return [replace(m, role="user") if m.role == "system" else m for m in messages]
