"""A turn that is cut anywhere, in every family: no call that was not said whole, no id is lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from prorl.agents.native import NativeAgent
from prorl.renderer.model import TemplateRenderer
from prorl.testing import Replies, sampled
from prorl.types import FailureClass, FinishReason, Message, ToolCall
from tests.agents.test_native import ToolEnv, check_exact, context
from tests.renderer import families
from tests.renderer.bridge_checks import conversation
from tests.renderer.families import MODELS, Model, needs_data

pytestmark = needs_data
CALLING = [model for model in MODELS if model.tools]


def _beginnings(made: TemplateRenderer, ids: NDArray[np.int32]) -> Iterator[NDArray[np.int32]]:
    """Yields what may have been sampled when it ended at any character, markers being whole."""
    markers = set(made.tokenizer.specials.values())
    for end, id in enumerate(ids):
        yield ids[:end]
        text = "" if int(id) in markers else made.tokenizer.decode(ids[end : end + 1])
        for size in range(1, len(text)):
            part = made.tokenizer.encode(text[:size]).astype(np.int32)
            yield np.concatenate([ids[:end], part]).astype(np.int32)


def _same(call: ToolCall, other: ToolCall) -> bool:
    return (call.name, call.arguments) == (other.name, other.arguments)


async def _check(model: Model, num_cuts: int | None) -> None:
    made = families.renderer(model)
    if not made.family.shows_calls:
        pytest.skip("its template writes no calls; its grammar is tried in test_grammars.py")
    messages, tools = next(
        candidate
        for candidate in (conversation(model, seed) for seed in range(40))
        if next(message for message in candidate[0] if message.role == "assistant").tool_calls
    )
    first = next(index for index, message in enumerate(messages) if message.role == "assistant")
    whole = made.completion(messages[first])
    expected_calls = made.parse(whole, made.prompt(messages[:first], tools), tools).tool_calls
    assert expected_calls
    answer = made.completion(Message(role="assistant", content="I see."))
    cuts = list(_beginnings(made, whole))[1:]
    cuts = cuts if num_cuts is None else cuts[:: max(1, len(cuts) // num_cuts)]
    assert len(cuts) >= 8
    for cut in cuts:
        env = ToolEnv()
        backend = Replies(sampled(whole), sampled(cut, finish=FinishReason.LENGTH), sampled(answer))
        attempt_context = replace(
            context(backend, env), renderer=made, messages=messages[:first], tools=tools
        )
        trajectory = await NativeAgent().run(attempt_context)
        check_exact(trajectory, backend)  # every sampled id is there, and trains
        assert len(backend.completions) >= 2
        assert trajectory.failure.failure_class in (FailureClass.NONE, FailureClass.POLICY)
        assert len(env.called) >= len(expected_calls)
        for called, meant in zip(env.called, (*expected_calls, *expected_calls), strict=False):
            assert called.error or _same(called, meant), made.tokenizer.decode(cut)
        assert all(message.error for message in env.called[2 * len(expected_calls) :])


@pytest.mark.parametrize("model", CALLING, ids=lambda model: model.name)
async def test_a_conversation_that_is_cut_keeps_its_ids_and_runs_whole_calls(model: Model) -> None:
    await _check(model, 8)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("model", CALLING, ids=lambda model: model.name)
async def test_a_conversation_that_is_cut_at_any_character(model: Model) -> None:
    await _check(model, None)
