"""`UsersAgent`: an agent of a user drives the policy from a helper process.

    RUN                                                   helper (`users_program.py`)
    ---                                                   ---------------------------
    facts of the attempt -------------------------------> agent.run(Attempt)
    renders, samples, records, parses <------ sample ---- await attempt.sample(messages)
    the env's tool, recorded <----------------- call ---- await attempt.call(call)
    the sandbox <------------------------ exec, put ... - await attempt.sandbox.exec(...)
    the answer's text <---------------------------------- return

All that an attempt is made of stays here: sequences, turns, journal, deadline. So an agent can
spoil no token, and whatever it does to its process costs its own rollout: it raises, leaves, blocks
(`CPU_S`, `limits.run_s` between two requests), takes all memory, closes its descriptors. Then the
attempt ends as `bad_task` with what had been sampled. An agent whose process was killed from
outside, or had run another rollout before, is asked a second time, of a fresh process: what was
sampled is in the journal and is given again.

The attempt's time does not run while its agent waits for a process.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from prorl import plugins
from prorl.agents.attempt import (
    AttemptFacts,
    CallRequest,
    PolicyReply,
    RespondRequest,
    SampleRequest,
)
from prorl.agents.calls import ToolCalls
from prorl.agents.context import AttemptContext
from prorl.agents.ending import End, end_of, end_with, run_to_trajectory
from prorl.agents.record import SequenceRecord
from prorl.agents.sampler import Sampler
from prorl.errors import (
    BudgetError,
    ConfigError,
    PromptTooLongError,
    ProrlError,
    RolloutError,
    boundary,
)
from prorl.helper.pool import pool
from prorl.helper.process import Died, Helper, HelperError, HelperProgram, Raised
from prorl.pluralize import pluralize
from prorl.renderer.apart import Rendering, check_fits, check_room, text_bytes
from prorl.sandbox_calls import SANDBOX_OPS, call_sandbox
from prorl.schema import MAX_SEGMENTS
from prorl.states import TASK_LINEAGES
from prorl.tokenizer import max_token_bytes
from prorl.types import (
    Completion,
    Failure,
    FailureCode,
    FinishReason,
    Lineage,
    Message,
    StopReason,
    ToolSpec,
    Trajectory,
)
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.types import Int32

CPU_S = 30.0
"""Seconds of the processor, for an agent's own code between two requests."""
OVERTIME_S = wait_limit_s("agent.overtime")
MAX_MESSAGE_BYTES = 4 << 20
"""The limit of what an agent said to the policy, for people to read."""


def helper_program(name: str) -> HelperProgram:
    """Returns the program whose processes run an agent: one for each rollout in hand, so that RUN's
    slots are their bound.
    """
    return HelperProgram(
        "prorl.agents.users_program",
        (name,),
        cpu_s=CPU_S,
        most=4096,
        nice=5,
        patience_s=0.0,
        by_step=True,
        version=plugins.version_of((name,)),
    )


async def check(name: str) -> None:
    """Raise ConfigError, with the reason, for a user's agent that cannot be made. It is tried in a
    process of its own: its import may block, end the process or take all memory.
    """
    try:
        helper = await Helper.start(helper_program(name))
    except HelperError as error:
        text = error.words if isinstance(error, Raised) else f"agent {name!r}: {error}"
        raise ConfigError(text) from None
    helper.end()


class UsersAgent:
    """Implements `prorl.agents.context.Agent`."""

    def __init__(self, name: str) -> None:
        self._name = name

    async def run(self, context: AttemptContext) -> Trajectory:
        drive = _Drive(self._name, context)
        return await run_to_trajectory(context, drive.record, drive.run())


@dataclass(slots=True, eq=False)
class _ConversationState:
    """A conversation up to one of its replies, or up to the prompt of its next one."""

    sequence: SequenceRecord
    end: int
    """Tokens of the sequence that belong to it: a later reply may have made it longer."""
    completion: Int32
    tools: tuple[ToolSpec, ...]
    messages: tuple[Message, ...]


@dataclass(slots=True, eq=False)
class _LiveConversation:
    """A conversation that the agent goes on with."""

    last: _ConversationState | None
    """The state behind its last reply; None before the first."""
    is_busy: bool = field(default=False)


class _Drive:
    """One attempt, driven from a helper. Bounded by `limits.max_turns` replies."""

    def __init__(self, name: str, context: AttemptContext) -> None:
        self._name, self._context = name, context
        self._sampler = Sampler(context)
        self._rendering = Rendering(context.renderer, context.renderer_spec, context.deadline)
        self._sandbox = asyncio.Lock()  # one tool call at a time is the sandbox's current one
        self._end: asyncio.Future[End] = asyncio.get_running_loop().create_future()
        """The end of the attempt, where its agent had no say in it."""
        self._requests: set[asyncio.Task[Any]] = set()
        self._has_begun = self._has_lost_call = False
        self._begin()

    def _begin(self) -> None:
        self._sampler.restart()
        self._calls = ToolCalls(self._context)
        self.record = self._sampler.record
        self._conversations: dict[int, _LiveConversation] = {}
        self._replies: dict[int, _ConversationState] = {}
        self._turns: set[int] = set()
        self._cut_text: str | None = None
        """The last text of the policy, where a limit of tokens cut it."""
        self._message_bytes, self._has_prompt = 0, False

    # ---- how long the helper's question is open

    async def run(self) -> End:
        deadline = self._context.deadline
        deadline.pause()
        asking = asyncio.ensure_future(self._ask())
        ends: set[asyncio.Future[Any]] = {asking, self._end}
        try:
            while not (asking.done() or self._end.done()):
                overtime_s = OVERTIME_S if deadline.expired else 0.0
                timeout_s = max(deadline.remaining_s, overtime_s, 0.05)
                await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
                if overtime_s and deadline.expired and not (asking.done() or self._end.done()):
                    text = f"agent {self._name!r} went on {OVERTIME_S:g} s after its time"
                    self._end.set_result(end_with(FailureCode.BAD_TASK, text))
        finally:
            deadline.resume()
            asking.cancel()
            # then its process is gone, and what was sampled is written down
            await asyncio.wait({asking, *self._requests})
            if not asking.cancelled():
                asking.exception()  # or it is the one that is raised below
            for sequence in {id(s.sequence): s.sequence for s in self._replies.values()}.values():
                if sequence.lineage not in self._context.train:
                    sequence.untrain()
        return self._end.result() if self._end.done() else asking.result()

    async def _ask(self) -> End:
        context, name = self._context, self._name
        facts = AttemptFacts(
            task=context.task,
            messages=tuple(context.messages),
            tools=tuple(context.tools),
            limits=context.limits,
            sampling=context.sampling,
            sample_index=context.sample_index,
            number=context.key.attempt,
            seed=context.seed,
            sandbox=None if context.sandbox is None else context.sandbox.ref,
        )
        label = f"agent {name!r}"
        try:
            helpers = await pool(helper_program(name))
            wall_s = max(context.limits.run_s, 1.0)
            text: str = await helpers.ask(facts, label=label, wall_s=wall_s, call_back=self._serve)
        except RolloutError as error:  # of its sandbox, which it let pass; the code came as a text
            codes = FailureCode.__members__.values()
            code = FailureCode(error.code) if error.code in codes else FailureCode.BAD_TASK
            return end_with(code, f"{label}: {error.message}")
        except ProrlError as error:
            return end_with(FailureCode.BAD_TASK, str(error))
        except HelperError as error:
            if isinstance(error, Died) and error.was_killed:
                return end_with(FailureCode.STAGE_ERROR, str(error))
            if isinstance(error, Raised) and error.trace:
                self.record.messages.append(Message(role="tool", name=name, content=error.trace))
            text = str(error) if label in error.words else f"{label}: {error}"
            return end_with(FailureCode.BAD_TASK, text)
        if not isinstance(text, str):
            return end_with(FailureCode.BAD_TASK, f"{label} gave a {type(text).__name__}, no text")
        return self._end_of_answer(text)

    def _end_of_answer(self, text: str) -> End:
        self.record.final = text
        if self._cut_text == text:
            return end_with(FailureCode.MAX_TOKENS, "cut off in the answer")
        return End(StopReason.DONE)

    # ---- what it asks for

    async def _serve(self, op: str, *arguments: Any) -> tuple[str, Any]:
        """Returns the reply to a request of the helper: ("gave", value), or ("cancelled", None)
        once the attempt has ended. A request may be what ends it.
        """
        task = asyncio.current_task()
        assert task is not None
        self._requests.add(task)
        try:
            if op == "begin":
                await self._restart()
            if self._end.done():
                return "cancelled", None
            if op in SANDBOX_OPS and len(arguments) == 2 and isinstance(arguments[0], list):
                return await self._use_sandbox(op, *arguments)
            reply = await self._answer_request(op, arguments)
        except ProrlError as error:
            reply = end_of(error)
        finally:
            self._requests.discard(task)
        if isinstance(reply, End):
            if not self._end.done():
                self._end.set_result(reply)
            return "cancelled", None
        return "gave", reply

    async def _answer_request(
        self, op: str, arguments: Sequence[Any]
    ) -> PolicyReply | str | End | None:
        with boundary(RolloutError, FailureCode.BAD_TASK, f"agent {self._name!r} asks for {op}"):
            request: SampleRequest | CallRequest | RespondRequest | None = None
            if op != "begin":
                kinds: Mapping[str, Any] = {
                    "sample": SampleRequest,
                    "call": CallRequest,
                    "respond": RespondRequest,
                }
                request = msgspec.convert(arguments[0], kinds[op])
        with boundary(RolloutError, FailureCode.STAGE_ERROR, "agent loop"):
            match request:
                case SampleRequest():
                    return await self._sample(request)
                case CallRequest():
                    return await self._call(request)
                case RespondRequest():
                    return await self._respond(request)
        return None

    async def _restart(self) -> None:
        """Begin the attempt for an agent that starts, or starts again in a second process."""
        self._context.deadline.resume()
        if self._has_begun:
            lost = [request for request in self._requests if request is not asyncio.current_task()]
            for request in lost:
                request.cancel()
            if lost:  # what they had sampled is written down before the record begins anew
                await asyncio.wait(lost)
            if self._has_lost_call:
                text = f"the process of agent {self._name!r} ended during a tool call"
                raise RolloutError(FailureCode.STAGE_ERROR, text)
            self._begin()
        self._has_begun = True

    async def _use_sandbox(self, op: str, arguments: Any, named: Any) -> tuple[str, Any]:
        context = self._context
        if context.sandbox is None:
            text = f"agent {self._name!r} asks for a sandbox, and its task has none"
            raise RolloutError(FailureCode.BAD_TASK, text)
        context.deadline.check(FailureCode.DEADLINE, "sandbox calls")
        async with self._sandbox:
            began = context.deadline.clock()
            try:
                return await call_sandbox(context.sandbox, op, arguments, named)
            finally:
                self.record.tool_s += context.deadline.clock() - began

    async def _call(self, request: CallRequest) -> str:
        clock, calls = self._context.deadline.clock, self._calls
        async with self._sandbox:
            began, recorded_s = clock(), calls.recorded_s
            try:
                return await calls.run(request.turn, request.number, request.call)
            except asyncio.CancelledError:
                self._has_lost_call = True
                raise
            finally:
                self.record.add_tool_calls(clock() - began + calls.recorded_s - recorded_s, 1)

    async def _respond(self, request: RespondRequest) -> str | None:
        conversation = self._conversations.get(0)
        last = conversation.last if conversation is not None else None
        if last is None:
            text = f"agent {self._name!r} asks for the env's turn before the policy's first answer"
            raise RolloutError(FailureCode.BAD_TASK, text)
        async with self._sandbox:
            number = request.number
            return await self._calls.respond(request.turn, number, last.messages, self.record)

    async def _sample(self, request: SampleRequest) -> PolicyReply | End:
        conversation = self._conversations.setdefault(request.conversation, _LiveConversation(None))
        if conversation.is_busy or request.turn in self._turns:
            text = f"agent {self._name!r} samples a conversation twice at once"
            raise RolloutError(FailureCode.BAD_TASK, text)
        if not 0 <= request.turn < self._context.limits.max_turns:
            text = pluralize(len(self._turns), "turn") + " without an answer"
            raise BudgetError(FailureCode.MAX_TURNS, text)
        self._turns.add(request.turn)
        conversation.is_busy = True
        try:
            extended = await self._extend(request, conversation)
            if isinstance(extended, End):
                return extended
            return await self._sample_reply(request, conversation, extended)
        finally:
            conversation.is_busy = False

    async def _extend(
        self, request: SampleRequest, conversation: _LiveConversation
    ) -> _ConversationState | End:
        """Returns the conversation with its new messages in a sequence, for the policy to continue;
        or the attempt's end, where they do not fit.
        """
        last = conversation.last
        if last is None and request.origin >= 0:
            last = self._replies.get(request.origin)
            if last is None:
                text = f"agent {self._name!r} forks behind turn {request.origin}, which is none"
                raise RolloutError(FailureCode.BAD_TASK, text)
        new, limits = request.messages, self._context.limits
        if last is None:
            tools = self._context.tools if request.tools is None else request.tools
            return await self._begin_sequence(request, new, tuple(tools), -1)
        if await self._rendering.starts_segment(new):
            parent = last.sequence.segment
            compact = replace(request, lineage=Lineage.COMPACTED)
            if last.sequence.lineage not in TASK_LINEAGES:
                compact = request
            return await self._begin_sequence(compact, [*last.messages, *new], last.tools, parent)
        room, num_bytes = limits.max_tokens - last.end, text_bytes(new)
        size, bridge = f"{num_bytes:,} bytes", None
        if num_bytes <= room * max_token_bytes(self._context.renderer):  # else not worth rendering
            bridge = await self._rendering.bridge(last.completion, new)
            size = f"{len(bridge)} tokens"
        if bridge is None or len(bridge) >= room:
            text = f"new messages of {size} do not fit: {room} tokens are left"
            return End(StopReason.CONTEXT, Failure(code=FailureCode.MAX_TOKENS, message=text))
        sequence = last.sequence
        if conversation.last is None or len(sequence) != last.end:
            sequence = self.record.fork(sequence.segment, last.end, request.turn)
        sequence.append_context(bridge, request.turn)
        self._record_messages(new, request.turn)
        return replace(last, sequence=sequence, messages=(*last.messages, *new))

    async def _begin_sequence(
        self,
        request: SampleRequest,
        messages: Sequence[Message],
        tools: tuple[ToolSpec, ...],
        parent: int,
    ) -> _ConversationState | End:
        """Returns the conversation in a new sequence, rendered whole; or the attempt's end."""
        if self.record.sequence.segment + 1 >= MAX_SEGMENTS:
            raise BudgetError(FailureCode.MAX_TURNS, f"{MAX_SEGMENTS} sequences")
        most, renderer = self._context.limits.max_tokens, self._context.renderer
        try:
            check_fits(text_bytes(messages), max_token_bytes(renderer), most)
            ids = await self._rendering.prompt(messages, tools)
            check_room(len(ids), most)
        except PromptTooLongError as error:
            if not self.record.turns:
                raise
            failure = Failure(code=FailureCode.MAX_TOKENS, message=str(error))
            return End(StopReason.CONTEXT, failure)
        if not self._has_prompt:
            self.record.messages.clear()  # the agent's own first prompt stands for the env's
            self._has_prompt = True
        sequence = self.record.begin(request.lineage, parent)
        sequence.append_context(ids, request.turn)
        self._record_messages(messages if parent < 0 else request.messages, request.turn)
        return _ConversationState(
            sequence, len(sequence), np.empty(0, np.int32), tools, tuple(messages)
        )

    async def _sample_reply(
        self, request: SampleRequest, conversation: _LiveConversation, state: _ConversationState
    ) -> PolicyReply:
        sequence, turn = state.sequence, request.turn
        prompt_ids = sequence.ids_L
        completion: Completion = await self._sampler.sample(sequence, turn, request.max_tokens)
        ids = completion.token_ids_C
        message = await self._rendering.parse(ids, prompt_ids, state.tools)
        message = replace(message, turn=turn)
        self.record.messages.append(message)
        conversation.last = self._replies[turn] = replace(
            state,
            end=len(sequence),
            completion=ids,
            messages=(*state.messages, message),
        )
        is_cut = completion.finish_reason is FinishReason.LENGTH and not message.tool_calls
        if sequence.lineage in TASK_LINEAGES:
            self.record.final = message.content
            self._cut_text = message.content if is_cut else None
        return PolicyReply(
            content=message.content,
            reasoning=message.reasoning,
            tool_calls=message.tool_calls,
            is_cut=is_cut,
            num_tokens=len(ids),
        )

    def _record_messages(self, messages: Sequence[Message], turn: int) -> None:
        """Write down for people what the agent said to the policy."""
        for message in messages:
            self._message_bytes += (size := len(message.content))
            if self._message_bytes > MAX_MESSAGE_BYTES:
                message = replace(message, content=f"[{size:,} letters are left out]")
            at = min(message.turn, turn) if message.role == "tool" else turn
            self.record.messages.append(replace(message, turn=at))
