"""An attempt that is taken over after any of its records ends as one that was never disturbed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from prorl.agents.native import NativeAgent
from prorl.errors import SandboxError
from prorl.journal import UNKNOWN, AttemptEnd, AttemptJournal, CallId, RecordedCall, ToolAnswer
from prorl.journal.records import FrameKind, read
from prorl.limits import Deadline
from prorl.testing import Replies
from prorl.types import (
    Completion,
    FailureCode,
    GenerateRequest,
    Message,
    RolloutLimits,
    StopReason,
    ToolCall,
    ToolResult,
    Trajectory,
)
from prorl.types import Sequence as Segment
from tests.agents.test_native import ToolEnv, context

CALLS = [ToolCall("python", {"code": str(i)}) for i in range(4)]
REPLIES = [
    Message(role="assistant", content="two", tool_calls=(CALLS[0], CALLS[1])),
    Message(role="assistant", content="one", tool_calls=(CALLS[2],)),
    Message(role="assistant", content="bad", tool_calls=(ToolCall("python", {}, error="no"),)),
    Message(role="assistant", content="#### 24"),
]


class Repeatable(ToolEnv):
    """Its calls may be asked again."""

    def repeats(self, call: ToolCall) -> bool:
        return True

    @property
    def codes(self) -> list[object]:
        return [call.arguments.get("code") for call in self.called]


class Outside(Repeatable):
    """Its calls change something that no sandbox holds."""

    def repeats(self, call: ToolCall) -> bool:
        return False


class Log:
    """A sink: records as they come back from their bytes."""

    def __init__(self) -> None:
        self.records: list[RecordedCall | ToolAnswer | AttemptEnd] = []

    def __call__(self, kind: FrameKind, body: bytes) -> None:
        record = read(kind, memoryview(body))
        assert isinstance(record, RecordedCall | ToolAnswer | AttemptEnd)
        self.records.append(record)


def journal_of(
    records: list[RecordedCall | ToolAnswer | AttemptEnd], log: Log, resumes: int = 1
) -> AttemptJournal:
    journal = AttemptJournal(log, resumes=resumes)
    for record in records:
        journal.restore(record)
    return journal


def drive(journal: AttemptJournal, replies: Replies, env: ToolEnv) -> Trajectory:
    attempt_context = context(replies, env, RolloutLimits(max_tokens=1 << 14), journal=journal)
    return asyncio.run(NativeAgent().run(attempt_context))


def check_same(trajectory: Trajectory, other: Trajectory) -> None:
    assert [s.segment for s in trajectory.sequences] == [s.segment for s in other.sequences]
    for ours, theirs in zip(trajectory.sequences, other.sequences, strict=True):
        for name in (
            *("token_ids_L", "logprobs_C", "span_end_S", "span_kind_S"),
            *("span_version_S", "span_turn_S", "span_temperature_S"),
        ):
            np.testing.assert_array_equal(getattr(ours, name), getattr(theirs, name))
    assert trajectory.messages == other.messages
    assert [(t.turn, t.segment, t.prompt_tokens, t.tool_calls) for t in trajectory.turns] == [
        (t.turn, t.segment, t.prompt_tokens, t.tool_calls) for t in other.turns
    ]
    assert (trajectory.artifact, trajectory.stop_reason, trajectory.failure) == (
        other.artifact,
        other.stop_reason,
        other.failure,
    )


def test_resumed_after_any_record_the_trajectory_is_equal() -> None:
    log, env = Log(), Repeatable()
    whole = drive(AttemptJournal(log), Replies(*REPLIES), env)
    assert whole.stop_reason is StopReason.DONE
    kinds = "".join(type(record).__name__[0] for record in log.records)
    assert kinds == "RTTRTRTRA"
    for count in range(len(log.records) + 1):
        past, later = log.records[:count], Log()
        turns = sum(isinstance(record, RecordedCall) for record in past)
        answers = sum(isinstance(record, ToolAnswer) for record in past)
        rest, env = Replies(*REPLIES[turns:]), Repeatable()
        resumed = drive(journal_of(past, later), rest, env)
        check_same(resumed, whole)
        assert len(rest.prompts) == len(REPLIES) - turns, "a turn was sampled twice, or not at all"
        assert len(env.called) == 4 - answers
        assert len(past) + len(later.records) == len(log.records)


@pytest.mark.parametrize(
    ("on_lost_tool_call", "stop"), [("report", StopReason.DONE), ("fail", StopReason.FAILED)]
)
def test_what_may_have_run_outside_a_sandbox_does_not_run_again(
    on_lost_tool_call: str, stop: StopReason
) -> None:
    log = Log()
    drive(AttemptJournal(log), Replies(*REPLIES), Outside())
    env = Outside()
    journal = AttemptJournal(Log(), resumes=1, on_lost_tool_call=on_lost_tool_call)
    journal.restore(log.records[0])
    resumed = drive(journal, Replies(*REPLIES[1:]), env)
    assert resumed.stop_reason is stop
    assert "0" not in env.codes
    if on_lost_tool_call == "report":
        assert [m.content for m in resumed.messages if m.role == "tool"][:2] == [UNKNOWN, "out"]
    else:
        assert resumed.failure.code is FailureCode.CALL_UNKNOWN


class Remembering:
    """A sandbox that knows no result of the first call that it is asked."""

    def __init__(self) -> None:
        self.marks: list[CallId | None] = []

    def mark(self, call: CallId | None) -> None:
        self.marks.append(call)


class InSandbox(Repeatable):
    """Calls go to the sandbox, which may not know what became of one."""

    async def call(
        self, task: object, sandbox: object, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        assert isinstance(sandbox, Remembering)
        if sandbox.marks == [CallId(1, 0, 0)]:
            raise SandboxError(FailureCode.CALL_UNKNOWN, "it has come before")
        return ToolResult(output="out")


def test_a_call_that_the_sandbox_does_not_remember_is_reported_to_the_policy() -> None:
    log = Log()
    drive(AttemptJournal(log), Replies(*REPLIES), Repeatable())
    sandbox, env = Remembering(), InSandbox()
    attempt_context = context(
        Replies(*REPLIES[1:]), env, sandbox=sandbox, journal=journal_of(log.records[:1], Log())
    )
    resumed = asyncio.run(NativeAgent().run(attempt_context))
    assert [m.content for m in resumed.messages if m.role == "tool"][:2] == [UNKNOWN, "out"]
    assert sandbox.marks[:4] == [CallId(1, 0, 0), None, CallId(1, 0, 1), None]


def test_the_budget_goes_on_from_what_was_spent() -> None:
    log = Log()
    drive(AttemptJournal(log), Replies(*REPLIES), Repeatable())
    journal = journal_of(log.records[:2], Log())
    assert journal.spent_s == log.records[1].spent_s
    deadline = Deadline(max(0.0, 0.0 - journal.spent_s))
    attempt_context = context(
        Replies(*REPLIES[1:]), Repeatable(), journal=journal, deadline=deadline
    )
    resumed = asyncio.run(NativeAgent().run(attempt_context))
    assert resumed.stop_reason is StopReason.DEADLINE
    assert len(resumed.turns) == 1


class Mixture(Replies):
    """Says of each token which experts it went through: its id and its place."""

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        ids = np.concatenate([request.prompt_ids_L, completion.token_ids_C])
        routed_experts = np.stack([ids % 100, np.arange(len(ids))], axis=1).astype(np.int16)
        return replace(completion, routed_experts=routed_experts[request.routing_from : -1])


def test_resumed_turns_keep_their_routed_experts() -> None:
    def mixed(journal: AttemptJournal, replies: Replies) -> Sequence[Segment]:
        limits = RolloutLimits(max_tokens=1 << 14)
        attempt_context = context(
            replies, Repeatable(), limits, journal=journal, routed_experts=True
        )
        return asyncio.run(NativeAgent().run(attempt_context)).sequences

    log = Log()
    (whole,) = mixed(AttemptJournal(log), Mixture(*REPLIES))
    assert whole.routed_experts is not None
    np.testing.assert_array_equal(whole.routed_experts[:, 0], whole.token_ids_L[:-1] % 100)
    np.testing.assert_array_equal(whole.routed_experts[:, 1], np.arange(len(whole.token_ids_L) - 1))
    for count in range(len(log.records) + 1):
        past = log.records[:count]
        remaining_replies = REPLIES[sum(isinstance(record, RecordedCall) for record in past) :]
        (again,) = mixed(journal_of(past, Log()), Mixture(*remaining_replies))
        assert again.routed_experts is not None
        np.testing.assert_array_equal(again.routed_experts, whole.routed_experts)


def test_a_server_without_experts_is_refused_where_a_run_asks_for_them() -> None:
    attempt_context = context(Replies(*REPLIES), Repeatable(), routed_experts=True)
    trajectory = asyncio.run(NativeAgent().run(attempt_context))
    assert trajectory.failure.code is FailureCode.BACKEND_PROTOCOL
    assert "--enable-return-routed-experts" in trajectory.failure.message
