"""One model call of an attempt: what an agent of one's own builds on."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.agents.context import AttemptContext, derive_seed
from prorl.agents.native import NativeAgent
from prorl.agents.sampler import Sampler
from prorl.backends.vllm import VllmBackend
from prorl.control import Assigned, Failover
from prorl.journal import AttemptJournal, RecordedCall
from prorl.limits import Deadline
from prorl.protocols import Backend
from prorl.renderer.apart import AnyRenderer
from prorl.stages.backends import Backends
from prorl.stages.failover import Routed
from prorl.testing import RENDERER, Replies, sampled
from prorl.tokenizer import ByteTokenizer
from prorl.types import (
    Completion,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Message,
    PolicyVersion,
    RunWeights,
    SamplingParams,
    SpanKind,
    StopReason,
)
from tests.agents.test_native import context
from tests.agents.test_resume import Log
from tests.backends.misbehaving_server import Misbehaving, Mode

REPLIES = [Message(role="assistant", content=text) for text in ("one", "two", "three")]


async def test_at_most_as_many_tokens_as_the_caller_wants() -> None:
    attempt_context = context(Replies(*REPLIES))
    sampler = Sampler(attempt_context)
    sampler.record.sequence.append_context(RENDERER.prompt(attempt_context.messages, ()), turn=0)
    completion = await sampler.sample(sampler.record.sequence, turn=0, max_tokens=2)
    assert (len(completion.token_ids_C), completion.finish_reason) == (2, FinishReason.LENGTH)


async def _turns(attempt_context: AttemptContext, prompts: list[str]) -> Sampler:
    sampler = Sampler(attempt_context)
    for turn, prompt in enumerate(prompts):
        sampler.record.sequence.append_context(ByteTokenizer().encode(prompt), turn=turn)
        await sampler.sample(sampler.record.sequence, turn=turn)
    return sampler


async def test_a_recorded_completion_answers_only_for_an_equal_prompt() -> None:
    """A harness that asks something else in its next incarnation is not given what was said
    before.
    """
    log = Log()
    await _turns(context(Replies(*REPLIES), journal=AttemptJournal(log)), ["a", "b", "c"])
    records = [record for record in log.records if isinstance(record, RecordedCall)]
    assert all(len(record.prompt) == 16 for record in records)

    def past() -> AttemptJournal:
        journal = AttemptJournal(resumes=1)
        for record in records:
            journal.restore(record)
        return journal

    same = Replies()
    again = await _turns(context(same, journal=past()), ["a", "b", "c"])
    assert (len(same.prompts), len(again.record.turns)) == (0, 3)
    other = Replies(*REPLIES[1:])
    await _turns(context(other, journal=past()), ["a", "another", "c"])
    assert len(other.prompts) == 2, "the rest is of another past, too"


class _Speaks:
    """Says a token now and then, and never ends."""

    name = "speaks"

    async def generate(self, request: GenerateRequest) -> Completion:
        assert request.on_part is not None
        for count in range(1, 10_000):
            request.on_part(sampled(np.full(count, 65, np.int32), finish=FinishReason.ABORT))
            await asyncio.sleep(0.02)
        raise AssertionError

    async def close(self) -> None:
        pass


@pytest.mark.parametrize("cancels", [False, True])
async def test_a_thought_that_outlasts_the_deadline_is_kept(cancels: bool) -> None:
    """The tokens sampled until then are the policy's, and train: else long thoughts cost
    nothing.
    """
    is_cancelled = False
    deadline = Deadline(60.0 if cancels else 0.5)
    attempt_context = context(_Speaks(), deadline=deadline, cancelled=lambda: is_cancelled)
    running = asyncio.ensure_future(NativeAgent().run(attempt_context))
    if cancels:
        await asyncio.sleep(0.5)
        is_cancelled = True
        running.cancel()
    trajectory = await running
    assert trajectory.stop_reason is (StopReason.CANCELLED if cancels else StopReason.DEADLINE)
    (sequence,) = trajectory.sequences
    assert len(sequence.logprobs_C) > 5
    assert sequence.span_kind_S.tolist() == [SpanKind.CONTEXT, SpanKind.TRAINED]
    assert [turn.finish_reason for turn in trajectory.turns] == [FinishReason.ABORT]


async def test_a_thought_over_http_that_outlasts_the_deadline_is_kept_with_its_version() -> None:
    """From vLLM, whose replies state no version: its label stood before and after."""
    async with Misbehaving(Mode.STALLED, say="I think, therefore I go on thinking.") as server:
        server.label = "tag:3:x"

        async def opened(url: str, renderer: AnyRenderer, keyed: bool) -> Backend:
            return VllmBackend(url, RENDERER.vocab_size, model="m")

        async def ask(failover: Failover) -> Assigned:
            raise AssertionError

        backends, deadline = Backends(opened), Deadline(1.0)
        policy = Routed(
            backends,
            server.url,
            key=context(Replies()).key,
            deadline=deadline,
            renderer=RENDERER,
            ask=ask,
            current=lambda: (PolicyVersion(3), RunWeights("tag", published=True)),
        )
        trajectory = await NativeAgent().run(context(policy, deadline=deadline))
        await backends.close()
    assert trajectory.failure.code is FailureCode.DEADLINE
    (sequence,) = trajectory.sequences
    assert sequence.span_version_S.tolist() == [-1, 3]
    assert len(sequence.logprobs_C) == len(server.calls[0].ids)


async def test_a_turn_that_was_cut_behind_its_stop_token_does_not_go_on() -> None:
    """The server died, or was paused, between the last token and the word that it was the last."""
    backend = Replies(sampled(RENDERER.completion(REPLIES[0]), finish=FinishReason.ABORT))
    trajectory = await NativeAgent().run(context(backend))
    assert (trajectory.stop_reason, len(backend.prompts)) == (StopReason.DONE, 1)


async def test_a_turn_that_was_cut_behind_all_its_tokens_has_its_length() -> None:
    """The server died between the last token that there was room for and the word that it was."""
    ids = RENDERER.completion(REPLIES[0])[:-1]
    attempt_context = context(
        Replies(sampled(ids, finish=FinishReason.ABORT)),
        sampling=SamplingParams(max_tokens=len(ids)),
    )
    sampler = Sampler(attempt_context)
    sampler.record.sequence.append_context(RENDERER.prompt(attempt_context.messages, ()), turn=0)
    completion = await sampler.sample(sampler.record.sequence, turn=0)
    assert completion.finish_reason is FinishReason.LENGTH
    np.testing.assert_array_equal(completion.token_ids_C, ids)


identities = st.tuples(st.integers(0, 2**62), st.text(), *([st.integers(0, 1000)] * 4))


@given(identities)
def test_seeds_fit_63_bits_and_repeat(identity: tuple[int, str, int, int, int, int]) -> None:
    assert 0 <= derive_seed(*identity) < 2**63
    assert derive_seed(*identity) == derive_seed(*identity)


@given(st.sets(identities, min_size=2, max_size=20))
def test_other_identities_have_other_seeds(some: set[tuple[int, str, int, int, int, int]]) -> None:
    assert len({derive_seed(*identity) for identity in some}) == len(some)


def test_the_value_never_changes() -> None:
    """Stored runs repeat with later versions of this code."""
    assert derive_seed(0, "gsm8k/0", 0, 1, 0) == 4304678167316362432
