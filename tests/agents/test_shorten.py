"""What does not fit: a stop reason with what was cut, or a strategy that starts a segment."""

from __future__ import annotations

import numpy as np

from prorl.agents import get_agent
from prorl.agents.native import NativeAgent
from prorl.agents.shorten import ASK, DROPPED, SUMMARY, drop_outputs, summarise
from prorl.testing import Replies
from prorl.types import (
    Failure,
    FailureCode,
    Message,
    RolloutLimits,
    SpanKind,
    StopReason,
    ToolCall,
    Trajectory,
)
from tests.agents.test_native import ANSWER, CALL, TOKENIZER, ToolEnv, context

LONG = "x" * 1200
LIMITS = RolloutLimits(max_tokens=3000)


def _check(trajectory: Trajectory, backend: Replies) -> None:
    """Each segment holds whole turns, and every prompt is what its segment held then."""
    assert [s.segment for s in trajectory.sequences] == list(range(len(trajectory.sequences)))
    for turn, prompt, said in zip(trajectory.turns, backend.prompts, backend.said, strict=True):
        sequence = trajectory.sequences[turn.segment]
        end = len(prompt) + len(said.token_ids_C)
        np.testing.assert_array_equal(sequence.token_ids_L[: len(prompt)], prompt)
        np.testing.assert_array_equal(sequence.token_ids_L[len(prompt) : end], said.token_ids_C)
        assert turn.turn in sequence.span_turn_S
    for sequence in trajectory.sequences:
        sizes = np.diff(sequence.span_end_S, prepend=0)
        sampled = sizes[sequence.span_kind_S == SpanKind.TRAINED].sum()
        assert sampled == len(sequence.logprobs_C) > 0


async def test_output_that_does_not_fit_is_a_stop_reason_with_what_was_cut() -> None:
    backend = Replies(CALL, CALL, CALL, CALL)
    env = ToolEnv(lambda call: LONG)
    trajectory = await NativeAgent().run(context(backend, env, LIMITS))
    assert trajectory.stop_reason is StopReason.CONTEXT
    assert trajectory.failure.code is FailureCode.MAX_TOKENS
    assert trajectory.failure.message.startswith("the output of python, 1")
    assert trajectory.failure.message.endswith("are left")
    assert trajectory.messages[-1].content == LONG


async def test_a_prompt_that_does_not_fit_says_by_how_much() -> None:
    trajectory = await NativeAgent().run(context(Replies(), limits=RolloutLimits(max_tokens=50)))
    assert trajectory.stop_reason is StopReason.CONTEXT
    assert trajectory.failure == Failure(
        code=FailureCode.BAD_TASK, message=trajectory.failure.message
    )
    assert "tokens does not fit in limits.max_tokens = 50" in trajectory.failure.message


async def test_the_oldest_outputs_are_dropped_and_a_segment_starts() -> None:
    calls = [
        Message(role="assistant", content="", tool_calls=(ToolCall("python", {"code": str(n)}),))
        for n in range(4)
    ]
    backend = Replies(*calls, ANSWER)
    env = ToolEnv(lambda call: f"{call.arguments['code']}{LONG}")
    trajectory = await NativeAgent(drop_outputs).run(context(backend, env, LIMITS))
    _check(trajectory, backend)
    assert trajectory.stop_reason is StopReason.DONE
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1, 2, 3]
    last = TOKENIZER.decode(trajectory.sequences[-1].token_ids_L)
    assert last.count(DROPPED) == 3
    assert f"3{LONG}" in last
    assert [m.content[0] for m in trajectory.messages if m.role == "tool"] == list("0123")


async def test_the_policy_sums_up_and_goes_on_from_there() -> None:
    summary = Message(role="assistant", content="Twice x.")
    backend = Replies(CALL, CALL, summary, CALL, CALL, summary, ANSWER)
    trajectory = await NativeAgent(summarise).run(
        context(backend, ToolEnv(lambda call: LONG), LIMITS)
    )
    _check(trajectory, backend)
    assert trajectory.stop_reason is StopReason.DONE
    assert [turn.segment for turn in trajectory.turns] == [0, 0, 1, 2, 2, 3, 4]
    assert ASK in TOKENIZER.decode(trajectory.sequences[1].token_ids_L)
    last = TOKENIZER.decode(trajectory.sequences[-1].token_ids_L)
    assert last.count(SUMMARY) == 1
    assert last.count("Twice x.") == 1
    assert LONG not in last


def test_strategies_have_names() -> None:
    for name in ("native", "native-drop", "native-summary"):
        assert isinstance(get_agent(name), NativeAgent)
