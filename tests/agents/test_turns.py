"""Envs with turns of their own in the native loop: exact ids, and every place of a death."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from prorl.agents.native import NativeAgent
from prorl.env_state import EnvState
from prorl.journal import AttemptJournal, RecordedCall, ToolAnswer
from prorl.protocols import Env
from prorl.renderer import ChatMLRenderer
from prorl.testing import RENDERER, Replies, make_task
from prorl.types import (
    FailureCode,
    Lineage,
    Message,
    RolloutLimits,
    SpanKind,
    StopReason,
    Task,
    ToolCall,
    Trajectory,
)
from tests.agents.test_native import check_exact, context
from tests.agents.test_resume import Log, check_same, journal_of
from tests.envs.guessing_env import Guessing

TASK = make_task("guessing", "Which number?", number=7)
REPLIES: Sequence[str | ToolCall] = ("5", ToolCall("hint", {"about": "x"}), "6", "7")


def drive(
    backend: Replies, journal: AttemptJournal | None = None, env: Env | None = None, **more: object
) -> Trajectory:
    limits = more.pop("limits", RolloutLimits(max_tokens=1 << 14))
    attempt_context = context(
        backend,
        env or Guessing(),
        limits,  # type: ignore[arg-type]
        **({"journal": journal} if journal else {}),
        **more,
    )
    attempt_context = replace(attempt_context, task=TASK, messages=Guessing().messages(TASK))
    return asyncio.run(NativeAgent().run(replace(attempt_context, tools=Guessing().tools(TASK))))


def test_a_reply_of_the_env_is_a_user_message_of_context_tokens() -> None:
    backend = Replies(*REPLIES)
    played = drive(backend)
    assert played.stop_reason is StopReason.DONE
    assert (played.artifact, played.env_state) == (b"7", '{"wrong":2,"hints":1}')
    check_exact(played, backend)
    responses = [m for m in played.messages if m.role == "user"]
    assert [m.turn for m in responses] == [0, 1, 3]
    assert [m.content.split()[:2] for m in responses[1:]] == [["1:", "higher"], ["2:", "higher"]]
    (sequence,) = played.sequences
    for message, completion in zip(
        responses[1:], (backend.completions[0], backend.completions[2]), strict=True
    ):
        bridge = RENDERER.bridge(completion.token_ids_C, [message])
        starts = np.concatenate([[0], sequence.span_end_S[:-1]])
        spans = [
            (kind, sequence.token_ids_L[start:end])
            for kind, start, end in zip(
                sequence.span_kind_S, starts, sequence.span_end_S, strict=True
            )
        ]
        assert any(kind == SpanKind.CONTEXT and np.array_equal(ids, bridge) for kind, ids in spans)


def test_resumed_after_any_record_the_env_continues_from_its_state() -> None:
    """It draws at random, so a turn that was asked for twice would be seen."""
    log = Log()
    whole = drive(Replies(*REPLIES), AttemptJournal(log))
    kinds = "".join(type(record).__name__[0] for record in log.records)
    assert kinds == "RTRTRTRTA"
    for count in range(len(log.records) + 1):
        past = log.records[:count]
        turns = sum(isinstance(record, RecordedCall) for record in past)
        answers = sum(isinstance(record, ToolAnswer) for record in past)
        resumed = drive(Replies(*REPLIES[turns:]), journal_of(past, Log()))
        assert resumed.env_state == whole.env_state
        assert env_texts(resumed)[:answers] == env_texts(whole)[:answers]
        if answers == len(REPLIES):
            check_same(resumed, whole)


def env_texts(trajectory: Trajectory) -> list[str]:
    """Returns the texts of env and tools for the policy."""
    return [m.content for m in trajectory.messages[1:] if m.role in ("user", "tool")]


class _Rewrites(ChatMLRenderer):
    """Its template would rewrite the past for a user's message."""

    def starts_segment(self, messages: Sequence[Message]) -> bool:
        return any(message.role == "user" for message in messages)


def test_where_the_template_rewrites_its_past_a_turn_begins_a_sequence() -> None:
    log, renderer = Log(), _Rewrites(RENDERER.tokenizer)
    backend = Replies("5", "7")
    played = drive(backend, AttemptJournal(log), renderer=renderer)
    first, second = played.sequences
    assert (first.lineage, second.lineage, second.parent) == (Lineage.MAIN, Lineage.COMPACTED, 0)
    assert (first.weight, second.weight) == (0.5, 0.5)
    prompt = RENDERER.prompt(list(played.messages[:-1]), Guessing().tools(TASK))
    np.testing.assert_array_equal(backend.prompts[1], prompt)
    alone = drive(Replies("5", "7"), renderer=renderer, train=(Lineage.MAIN,)).sequences
    assert [SpanKind.TRAINED in sequence.span_kind_S for sequence in alone] == [True, False]
    for count in (2, 3, 4):
        past = log.records[:count]
        num_remaining = 2 - sum(isinstance(record, RecordedCall) for record in past)
        again = drive(Replies(*["7"][:num_remaining]), journal_of(past, Log()), renderer=renderer)
        check_same(again, played)


def test_turns_are_bounded_and_the_policy_answers_for_it() -> None:
    played = drive(Replies("5", "5", "5"), limits=RolloutLimits(max_turns=2))
    assert played.stop_reason is StopReason.MAX_TURNS
    assert (played.artifact, played.env_state) == (b"5", '{"wrong":2}')
    assert played.failure.failure_class.trains


class _Spoils(Guessing):
    def respond(self, task: Task, messages: Sequence[Message], state: EnvState, _: object) -> str:
        state["it"] = {1, 2} if state else 1
        return "Go on."


def test_a_hook_that_spoils_its_state_keeps_the_previous_state() -> None:
    played = drive(Replies("5", "6"), env=_Spoils())
    assert (played.failure.code, played.env_state) == (FailureCode.BAD_TASK, '{"it":1}')
    assert "no JSON" in played.failure.message
    assert played.turns[-1].turn == 1


class _Long(Guessing):
    def respond(self, *arguments: object) -> str:
        return "x" * 4000


def test_a_turn_that_does_not_fit_ends_the_rollout_as_tool_output_does() -> None:
    played = drive(Replies("5"), env=_Long(), limits=RolloutLimits(max_tokens=2000))
    assert (played.stop_reason, played.failure.code) == (
        StopReason.CONTEXT,
        FailureCode.MAX_TOKENS,
    )
    assert "the env's turn, 4" in played.failure.message
