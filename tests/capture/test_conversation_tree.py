"""Placing: whatever an agent does, no sampled token is lost, trained twice, or trained behind ids
that it was not sampled behind.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.agents.capture.canonical import ConversationRequest, chain
from prorl.agents.capture.conversation_tree import Call, ConversationTree
from prorl.agents.sampler import Sampler
from prorl.states import TASK_LINEAGES
from prorl.testing import RENDERER, sampled
from prorl.types import (
    Completion,
    GenerateRequest,
    Lineage,
    Message,
    SpanKind,
    ToolCall,
    ToolSpec,
)
from tests.capture.scripted_attempt import attempt

BASH = (ToolSpec("bash", "", {}),)
SYSTEM = Message(role="system", content="You fix things.")


class Says:
    """Implements `prorl.protocols.Backend`: every third turn an answer, else one or two calls."""

    name = "says"

    def __init__(self) -> None:
        self.delivered: dict[int, tuple[np.ndarray, Completion]] = {}

    async def generate(self, request: GenerateRequest) -> Completion:
        turn = request.turn
        for _ in range(1 if turn % 2 else 4):  # of two at once the later may answer first
            await asyncio.sleep(0)
        calls = tuple(ToolCall("bash", {"command": f"{turn}.{i}", "n": 1}) for i in range(turn % 3))
        message = Message(role="assistant", content=f"say {turn % 2}", tool_calls=calls)
        ids = RENDERER.completion(message)[: request.sampling.max_tokens]
        completion = sampled(ids, version=turn // 5)
        self.delivered[turn] = (request.prompt_ids_L.copy(), completion)
        return completion

    async def close(self) -> None:
        pass


class Agent:
    """Conversations of one attempt; each op is something that agents were seen to do."""

    def __init__(self, train: tuple[Lineage, ...] = TASK_LINEAGES) -> None:
        self.backend = Says()
        self.sampler = Sampler(attempt(self.backend))
        self.tree = ConversationTree(attempt(self.backend, train=train), self.sampler)
        self.requests: list[ConversationRequest] = []
        self.calls: list[Call] = []
        """In the order of the requests."""

    async def ask(self, *requests: ConversationRequest, delivered: bool = True) -> None:
        """Requests at once, whose clients are there until they have their replies."""
        waiting = [True]
        calls = await asyncio.gather(
            *(self.tree.call(a, chain(a.messages, a.tools), lambda: waiting[0]) for a in requests)
        )
        for call in calls:
            await call.task
            call.delivered |= delivered
        waiting[0] = False
        self.requests += requests
        self.calls += calls

    async def begin(self, task: str, tools: tuple[ToolSpec, ...] = BASH) -> None:
        first = (SYSTEM, Message(role="user", content=task))
        await self.ask(ConversationRequest(messages=first, tools=tools))

    def next(self, at: int, how: int = 0) -> ConversationRequest:
        """The request after the reply to an earlier one, as edited by `how`."""
        request, reply = (
            self.requests[at % len(self.requests)],
            self.calls[at % len(self.calls)].reply,
        )
        assert reply is not None
        echo, results = reply.message, list[Message]()
        for call in reversed(echo.tool_calls):
            results.append(Message(role="tool", content=f"did {how}", call_id=call.id))
        if how == 1:
            echo = replace(echo, reasoning="", content=echo.content + "\n")
        if how == 2 and echo.tool_calls:
            named = tuple(call._replace(name="invalid", arguments={}) for call in echo.tool_calls)
            echo = replace(echo, content="edited", tool_calls=named)
        if how == 3:
            echo = replace(echo, content="never said", tool_calls=())
        tail = [*results, *([Message(role="user", content=f"go on {how}")] if not results else [])]
        dropped = how == 4
        return replace(request, messages=(*request.messages, *([] if dropped else [echo]), *tail))

    async def do(self, op: int, at: int, how: int) -> None:
        match op:
            case 0 | 1 | 2:
                await self.ask(self.next(at, how))
            case 3:
                await self.ask(self.next(at, how), self.next(at, how), self.next(at + 1))
            case 4:
                await self.ask(
                    replace(self.requests[at % len(self.requests)], max_tokens=how or None)
                )
            case 5:
                await self.ask(self.next(at), delivered=False)
                await self.ask(self.requests[-1])
                assert self.calls[-1] is self.calls[-2]
            case 6:
                await self.begin(f"summary {at}", (BASH, (ToolSpec("sub", "", {}),), ())[how % 3])
            case _:
                request = self.requests[at % len(self.requests)]
                messages = (*request.messages[:1], Message(role="user", content=f"so far {how}"))
                await self.ask(replace(request, messages=messages))


def check(agent: Agent) -> None:
    """The guarantees of the model endpoint."""
    segment_by_turn: dict[int, int] = {}
    record = agent.sampler.record
    for sequence in record.sequences:
        ends = sequence.span_end_S.tolist()
        starts = [0, *ends[:-1]]
        sampled_before = 0
        for start, end, kind, turn in zip(
            starts, ends, sequence.span_kind_S, sequence.span_turn_S.tolist(), strict=True
        ):
            if kind == SpanKind.CONTEXT:
                continue
            prompt, completion = agent.backend.delivered[turn]
            np.testing.assert_array_equal(sequence.token_ids_L[:start], prompt)
            np.testing.assert_array_equal(sequence.token_ids_L[start:end], completion.token_ids_C)
            logprobs = sequence.logprobs_C[sampled_before : sampled_before + end - start]
            np.testing.assert_array_equal(logprobs, completion.logprobs_C)
            sampled_before += end - start
            assert turn not in segment_by_turn
            segment_by_turn[turn] = sequence.segment
        trains = SpanKind.TRAINED in sequence.span_kind_S
        assert (sequence.weight > 0) == trains
        assert sequence.parent < sequence.segment
    assert segment_by_turn.keys() == agent.backend.delivered.keys()
    weights = [sequence.weight for sequence in record.sequences]
    assert sum(weights) == pytest.approx(1.0) or not any(weights)
    assert [turn.turn for turn in record.turns] == sorted(segment_by_turn)
    assert {turn.turn: turn.segment for turn in record.turns} == segment_by_turn


def trained(agent: Agent) -> set[int]:
    """Turns that train."""
    return {
        int(turn)
        for sequence in agent.sampler.record.sequences
        for turn, kind in zip(sequence.span_turn_S, sequence.span_kind_S, strict=True)
        if kind == SpanKind.TRAINED
    }


OPS = st.tuples(st.integers(0, 7), st.integers(0, 30), st.integers(0, 4))


@settings(max_examples=60, deadline=None)
@given(ops=st.lists(OPS, max_size=14))
def test_no_token_is_lost_trained_twice_or_behind_another_prefix(
    ops: Sequence[tuple[int, int, int]],
) -> None:
    async def live() -> None:
        agent = Agent()
        await agent.begin("fix it")
        for op in ops:
            await agent.do(*op)
        await agent.tree.close()
        check(agent)

    asyncio.run(live())


async def test_lineages_and_what_trains() -> None:
    agent = Agent()
    await agent.begin("a title", ())
    await agent.begin("fix it")
    await agent.ask(agent.next(1))
    await agent.begin("list the files", (ToolSpec("look", "", {}),))
    compacted = (SYSTEM, Message(role="user", content="so far"))
    await agent.ask(ConversationRequest(messages=compacted, tools=BASH))
    await agent.ask(agent.next(1, how=2))
    await agent.tree.close()
    lineages = [(s.lineage, s.parent, s.weight) for s in agent.sampler.record.sequences]
    assert lineages == [
        (Lineage.AUXILIARY, -1, 0.0),
        (Lineage.MAIN, -1, pytest.approx(1 / 3)),
        (Lineage.SUBAGENT, -1, 0.0),
        (Lineage.COMPACTED, 1, pytest.approx(1 / 3)),
        (Lineage.MAIN, 1, pytest.approx(1 / 3)),
    ]
    assert trained(agent) == {1, 2, 4, 5}
    assert agent.tree.counts["edited_replies"] == 1
    assert agent.tree.counts["forked_calls"] == 1


@pytest.mark.parametrize("train", [TASK_LINEAGES, (*TASK_LINEAGES, Lineage.SUBAGENT)])
async def test_sub_agents_and_what_they_become_train_where_the_run_names_them(
    train: tuple[Lineage, ...],
) -> None:
    agent = Agent(train)
    await agent.begin("fix it")
    tools = (ToolSpec("look", "", {}),)
    await agent.begin("list the files", tools)
    retold = (*agent.requests[1].messages, Message(role="user", content="anew"))
    await agent.ask(
        ConversationRequest(messages=retold, tools=tools)
    )  # no echo: a sequence of its own
    await agent.tree.close()
    weight = 1 / 3 if Lineage.SUBAGENT in train else 0.0
    sequences = agent.sampler.record.sequences
    lineages = [sequence.lineage for sequence in sequences]
    assert lineages == [Lineage.MAIN, Lineage.SUBAGENT, Lineage.SUBAGENT]
    weights = [sequence.weight for sequence in sequences]
    assert weights == pytest.approx([1 - 2 * weight, weight, weight])


async def test_of_repeated_prompts_the_continued_call_trains() -> None:
    agent = Agent()
    await agent.begin("fix it")
    await agent.begin("fix it")
    await agent.ask(agent.next(1))
    await agent.ask(agent.requests[-1])
    await agent.tree.close()
    assert trained(agent) == {1}  # of the last two nobody knows which was heard
    assert agent.tree.counts["unused_replies"] == 3


async def test_what_rendering_again_would_have_changed_is_counted() -> None:
    agent = Agent()
    await agent.begin("fix it")
    await agent.ask(agent.next(0))
    await agent.ask(agent.next(1))  # what was sampled, word for word
    await agent.ask(agent.next(2, how=2))  # its arguments are gone
    await agent.tree.close()
    counts = agent.sampler.record.endpoint_counts
    assert (
        counts.continued_calls,
        counts.rendered_calls,
        counts.edited_replies,
        counts.retokenization_mismatches,
    ) == (3, 1, 1, 1)


async def test_results_come_in_the_order_of_their_calls() -> None:
    agent = Agent()
    await agent.begin("one")
    await agent.begin("two")
    await agent.begin("three")  # two calls
    await agent.ask(agent.next(2), replace(agent.next(2), max_tokens=5))
    reply = agent.calls[2].reply
    assert reply is not None
    first_result, two = (
        Message(role="tool", content=c.id, call_id=c.id) for c in reply.message.tool_calls
    )
    before = (*agent.requests[2].messages, reply.message)
    for order in ((first_result, two), (two, first_result)):
        await agent.ask(replace(agent.requests[2], messages=(*before, *order)))
    first, second = (agent.backend.delivered[call.number][0] for call in agent.calls[-2:])
    np.testing.assert_array_equal(first, second)
    await agent.tree.close()
