"""`Attempt`: what an agent of yours drives one rollout with.

    from prorl.agents.attempt import Attempt
    from prorl.types import Message

    class Careful:
        async def run(self, attempt: Attempt) -> str | None:
            reply = await attempt.sample(attempt.messages)
            while reply.tool_calls:
                results = [await attempt.call(call) for call in reply.tool_calls]
                reply = await attempt.sample(results)
            again = Message(role="user", content="Are you sure? Answer again.")
            return (await attempt.sample([again])).content

The agent runs in a helper process (`prorl/helper`), one rollout at a time, and may block. The
policy, the env's tools and the sandbox are RUN's; each `await` here asks RUN over the channel of
the helper. RUN renders what is new, keeps exact ids and log-probabilities, counts tokens and time,
and writes the journal. An agent never holds tokens, so it cannot spoil them.

`run` returns the text that the env makes the artifact of; None stands for the policy's last reply.
A budget that is used up (time, turns, tokens), a lost server or a lost sandbox ends the rollout
where it stands: the agent's `await` raises CancelledError, and its process is killed a second
later unless it is done. What the agent raises is `bad_task`, with its file and line.

A rollout outlives the death of its worker: the agent starts anew, and what was sampled and what the
tools answered is given again, as long as the agent asks the same in the same order. So an agent
that draws at random seeds its generator with `attempt.seed`. What it does by `attempt.sandbox` is
not recorded and is done again.

Conversations may be sampled side by side (`asyncio.gather`), each by one call at a time. This
module imports nothing heavy: every helper process holds it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from prorl.states import Lineage
from prorl.types import (
    Message,
    RolloutLimits,
    SamplingParams,
    SandboxRef,
    Task,
    ToolCall,
    ToolSpec,
)

if TYPE_CHECKING:
    from prorl.protocols import Sandbox


class UserAgent(Protocol):
    """An agent of a user: a class without arguments, or a function that gives one."""

    async def run(self, attempt: Attempt) -> str | None:
        """Drive one rollout; the text of its answer. A plain function may block instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReply:
    """Holds one turn of the policy, which the conversation has already."""

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    is_cut: bool = False
    """A limit of tokens ended it, not the policy."""
    num_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptFacts:
    """RUN sends this to the helper of an attempt when it begins."""

    task: Task
    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...]
    limits: RolloutLimits
    sampling: SamplingParams
    sample_index: int
    number: int
    seed: int
    sandbox: SandboxRef | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRequest:
    """One model call, as the helper asks for it."""

    turn: int
    conversation: int
    lineage: Lineage
    origin: int
    """Turn whose reply the conversation was forked behind; -1 for none."""
    messages: list[Message]
    tools: list[ToolSpec] | None
    max_tokens: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """One tool call, as the helper asks for it."""

    turn: int
    number: int
    call: ToolCall


@dataclass(frozen=True, slots=True, kw_only=True)
class RespondRequest:
    """One turn of the env, as the helper asks for it."""

    turn: int
    number: int


Ask = Callable[..., Awaitable[Any]]
"""Asks RUN to do something; raises CancelledError where the rollout has ended."""


class Conversation:
    """Messages in order, as one sequence of tokens that only grows.

    A user message that the model's template could only append by rewriting its past begins a
    sequence of its own, which goes on training.
    """

    def __init__(self, attempt: Attempt, number: int, lineage: Lineage, origin: int = -1) -> None:
        self._attempt, self._number, self._lineage = attempt, number, lineage
        self._origin, self._last_turn = origin, -1

    async def sample(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] | None = None,
        max_tokens: int | None = None,
    ) -> PolicyReply:
        """Append messages, and the policy's reply to them. The first call says which `tools` the
        policy is shown: None stands for the task's.
        """
        turn = self._attempt.next_turn()
        request = SampleRequest(
            turn=turn,
            conversation=self._number,
            lineage=self._lineage,
            origin=self._origin,
            messages=list(messages),
            tools=None if tools is None else list(tools),
            max_tokens=max_tokens,
        )
        reply: PolicyReply = await self._attempt.ask("sample", request)
        self._last_turn = turn
        self._attempt.last_reply = reply
        return reply

    def fork(self) -> Conversation:
        """One that goes on behind the last reply, of which it shares all tokens so far; those train
        once.
        """
        if self._last_turn < 0:
            raise ValueError("a conversation without a reply cannot be forked: begin another")
        return self._attempt.conversation(self._lineage, origin=self._last_turn)


class Attempt:
    """One rollout, as the agent that drives it sees it."""

    def __init__(self, facts: AttemptFacts, ask: Ask, sandbox: Sandbox | None) -> None:
        self.task, self.limits, self.sampling = facts.task, facts.limits, facts.sampling
        self.messages, self.tools = facts.messages, facts.tools
        self.sample_index, self.number, self.seed = facts.sample_index, facts.number, facts.seed
        self.sandbox = sandbox
        """Its `call`, `exec`, `put`, `get`, `snapshot` and `restore`; None where the task has no
        sandbox.
        """
        self.ask = ask
        self.last_reply: PolicyReply | None = None
        self._num_turns = self._num_calls = self._num_conversations = 0
        self._main = self.conversation(Lineage.MAIN)

    async def sample(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[ToolSpec] | None = None,
        max_tokens: int | None = None,
    ) -> PolicyReply:
        """`Conversation.sample` of the main conversation, which has the task."""
        return await self._main.sample(messages, tools=tools, max_tokens=max_tokens)

    async def call(self, call: ToolCall) -> Message:
        """Run a call of one of the task's tools; the message that tells the policy its result."""
        turn, number = self._next_call()
        text: str = await self.ask("call", CallRequest(turn=turn, number=number, call=call))
        return Message(role="tool", content=text, name=call.name, call_id=call.id, turn=turn)

    async def respond(self) -> Message | None:
        """Returns the env's reply to the policy's last answer in the main conversation, where the
        env has turns of its own; None ends the rollout.
        """
        turn, number = self._next_call()
        text: str | None = await self.ask("respond", RespondRequest(turn=turn, number=number))
        return None if text is None else Message(role="user", content=text, turn=turn + 1)

    def _next_call(self) -> tuple[int, int]:
        """Returns the turn, and the number in it, of the next call of a tool or of the env."""
        self._num_calls += 1
        return max(self._num_turns - 1, 0), self._num_calls - 1

    async def solve(self, messages: Sequence[Message] | None = None) -> PolicyReply:
        """The native loop in the main conversation: sample, run the calls, again, until the policy
        answers and the env has no more to say. Without `messages` it begins with the task's.
        """
        reply = await self.sample(self.messages if messages is None else messages)
        while not reply.is_cut:
            if reply.tool_calls:
                reply = await self.sample([await self.call(call) for call in reply.tool_calls])
            elif (response := await self.respond()) is not None:
                reply = await self.sample([response])
            else:
                break
        return reply

    def conversation(
        self, lineage: Lineage = Lineage.SUBAGENT, *, origin: int = -1
    ) -> Conversation:
        """A conversation of its own. What is sampled in one of lineage `main` or `compacted`
        trains, in one of `subagent` or `auxiliary` where the run's `train` names it.
        """
        self._num_conversations += 1
        return Conversation(self, self._num_conversations - 1, lineage, origin)

    def next_turn(self) -> int:
        """The number of the next model call. It is taken before the call waits for anything, so
        that calls side by side have the same numbers after the death of a worker.
        """
        self._num_turns += 1
        return self._num_turns - 1
