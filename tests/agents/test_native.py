"""The native loop: exact ids, every way an attempt can end, and what is left of it then."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from prorl.agents import ending
from prorl.agents.calls import tool_text
from prorl.agents.context import AttemptContext
from prorl.agents.native import NativeAgent
from prorl.agents.sampler import SILENT_S
from prorl.backends import open_backend
from prorl.envs import get_env
from prorl.errors import BackendError, SandboxError
from prorl.limits import Deadline
from prorl.protocols import Backend, Env
from prorl.testing import RENDERER, LocalSandbox, Replies, Reply, sampled
from prorl.tokenizer import SPECIALS, ByteTokenizer
from prorl.types import (
    UNKNOWN_VERSION,
    AttemptKey,
    FailureClass,
    FailureCode,
    FinishReason,
    Message,
    PolicyVersion,
    RolloutLimits,
    SamplingParams,
    SpanKind,
    StopReason,
    Task,
    ToolCall,
    ToolResult,
    Trajectory,
)
from tests.renderer.test_grammars import PREFIXES

TOKENIZER = ByteTokenizer()
MATH = Task(
    task_id="m/1",
    env="math",
    prompt="Half of 48?",
    data={"answer": "24", "solution": "<<48/2=24>>24\n#### 24"},
)
CALL = Message(
    role="assistant", content="Let me see.", tool_calls=(ToolCall("python", {"code": "1"}),)
)
ANSWER = Message(role="assistant", content="#### 24")


class ToolEnv:
    """The math env with a tool that is a function, so that no process is needed."""

    def __init__(self, tool: Callable[[ToolCall], str] = lambda call: "out") -> None:
        self._math, self._tool = get_env("math"), tool
        self.called: list[ToolCall] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._math, name)

    async def call(
        self, task: Task, sandbox: object, call: ToolCall, timeout_s: float
    ) -> ToolResult:
        self.called.append(call)
        return ToolResult(output=call.error or self._tool(call))


def context(
    backend: Backend, env: object = None, limits: RolloutLimits | None = None, **changes: object
) -> AttemptContext:
    used: Env = env or ToolEnv()  # type: ignore[assignment]
    made = AttemptContext(
        task=MATH,
        env=used,
        messages=used.messages(MATH),
        tools=used.tools(MATH),
        renderer=RENDERER,
        backend=backend,
        sandbox=None,
        deadline=Deadline(30.0),
        key=AttemptKey("run", 5, 2),
        session="key",
        limits=limits or RolloutLimits(),
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def check_exact(trajectory: Trajectory, backend: Replies) -> None:
    """Every prompt is what the sequence held then; every sampled span holds what was sampled; spans
    tile.
    """
    (sequence,) = trajectory.sequences
    ids, ends = sequence.token_ids_L, sequence.span_end_S
    for prompt in backend.prompts:
        np.testing.assert_array_equal(prompt, ids[: len(prompt)])
    for prompt, completion in zip(backend.prompts, backend.completions, strict=False):
        np.testing.assert_array_equal(
            ids[len(prompt) : len(prompt) + len(completion.token_ids_C)], completion.token_ids_C
        )
    starts = np.concatenate([[0], ends[:-1]])
    assert (ends > starts).all()
    assert (len(ends) == 0 and len(ids) == 0) or ends[-1] == len(ids)
    is_sampled = sequence.span_kind_S == SpanKind.TRAINED
    assert (ends - starts)[is_sampled].sum() == len(sequence.logprobs_C)
    assert ((sequence.span_version_S == -1) == ~is_sampled).all()
    spans = [
        ids[start:end] for start, end, kept in zip(starts, ends, is_sampled, strict=True) if kept
    ]
    sampled_ids = [completion.token_ids_C for completion in backend.completions]
    np.testing.assert_array_equal(np.concatenate([*spans, []]), np.concatenate([*sampled_ids, []]))


texts = st.lists(st.one_of(st.text(max_size=8), st.sampled_from(SPECIALS))).map("".join)
raw_ids = st.lists(st.integers(0, TOKENIZER.vocab_size - 1), min_size=1, max_size=20).map(
    lambda ids: np.array(ids, dtype=np.int32)
)
messages = st.builds(
    lambda content, codes: Message(
        role="assistant",
        content=content,
        tool_calls=tuple(ToolCall("python", {"code": code}) for code in codes),
    ),
    texts,
    st.lists(texts, max_size=2),
)
replies = st.lists(st.one_of(messages.map(RENDERER.completion), raw_ids), min_size=1, max_size=5)


@given(replies, texts)
@settings(max_examples=60, deadline=None)
def test_ids_are_exact_whatever_is_sampled(
    completions: Sequence[NDArray[np.int32]], output: str
) -> None:
    """The ids of each prompt start with the earlier prompt and completion, over random tool
    conversations.
    """
    backend = Replies(*(sampled(ids) for ids in completions), *[ANSWER] * 5)
    trajectory = asyncio.run(
        NativeAgent().run(
            context(backend, ToolEnv(lambda call: output), RolloutLimits(max_turns=5))
        )
    )
    check_exact(trajectory, backend)
    turns = zip(backend.prompts, backend.completions, backend.prompts[1:], strict=False)
    for number, (earlier, completion, later) in enumerate(turns):
        outputs = [
            message
            for message in trajectory.messages
            if message.role == "tool" and message.turn == number
        ]
        bridge = RENDERER.bridge(completion.token_ids_C, outputs)
        np.testing.assert_array_equal(
            later, np.concatenate([earlier, completion.token_ids_C, bridge])
        )
    assert len(trajectory.turns) == len(backend.completions)


async def test_a_good_attempt_leaves_everything() -> None:
    backend, env = Replies(CALL, ANSWER), ToolEnv()
    trajectory = await NativeAgent().run(
        context(backend, env, sampling=SamplingParams(temperature=0.5), run_seed=3)
    )
    check_exact(trajectory, backend)
    assert (trajectory.stop_reason, trajectory.failure.code) == (StopReason.DONE, FailureCode.NONE)
    assert trajectory.artifact == b"#### 24"
    assert [message.role for message in trajectory.messages] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert [(turn.turn, turn.tool_calls, turn.temperature) for turn in trajectory.turns] == [
        (0, 1, 0.5),
        (1, 0, 0.5),
    ]
    (sequence,) = trajectory.sequences
    assert sequence.span_kind_S.tolist() == [0, 1, 0, 1]
    assert sequence.span_turn_S.tolist() == [0, 0, 1, 1]
    assert sequence.span_temperature_S.tolist() == [0.0, 0.5, 0.0, 0.5]
    first, second = backend.requests
    assert (first.request_id, first.session, first.task) == ("run/5/2/0", "key", MATH)
    assert first.seed != second.seed
    assert trajectory.llm_s >= 0 <= trajectory.tool_s


async def test_a_repeated_attempt_sends_the_same_seeds() -> None:
    first, two, other = Replies(CALL, ANSWER), Replies(CALL, ANSWER), Replies(CALL, ANSWER)
    for backend, sample in ((first, 0), (two, 0), (other, 1)):
        await NativeAgent().run(context(backend, sample_index=sample))
    assert [request.seed for request in first.requests] == [
        request.seed for request in two.requests
    ]
    assert first.requests[0].seed != other.requests[0].seed


async def test_broken_calls_are_reported_to_the_policy() -> None:
    broken = np.concatenate(
        [[TOKENIZER.specials["<tool_call>"]], TOKENIZER.encode("{oops")]
    ).astype(np.int32)
    trajectory = await NativeAgent().run(context(Replies(sampled(broken), ANSWER)))
    assert trajectory.stop_reason is StopReason.DONE
    assert "not valid JSON" in trajectory.messages[3].content


@pytest.mark.parametrize(
    ("limits", "replies", "code"),
    [
        (RolloutLimits(max_turns=2), [CALL, CALL], FailureCode.MAX_TURNS),
        (RolloutLimits(max_tokens=900), [CALL, CALL, CALL, CALL], FailureCode.MAX_TOKENS),
        (
            RolloutLimits(),
            [sampled(TOKENIZER.encode("cut o"), finish=FinishReason.LENGTH)],
            FailureCode.MAX_TOKENS,
        ),
    ],
)
async def test_budgets_of_the_policy_leave_an_artifact(
    limits: RolloutLimits, replies: list[Reply], code: FailureCode
) -> None:
    backend = Replies(*replies)
    trajectory = await NativeAgent().run(context(backend, limits=limits))
    check_exact(trajectory, backend)
    assert trajectory.failure.code is code
    assert trajectory.failure.failure_class is FailureClass.POLICY
    assert trajectory.artifact
    assert len(trajectory.sequences[0].token_ids_L) <= limits.max_tokens
    assert len(trajectory.turns) == len(backend.completions)


async def test_an_output_that_no_room_can_hold_is_not_rendered() -> None:
    """A tool of an env's own may give 64 MiB."""

    class Refusing:
        def __getattr__(self, name: str) -> object:
            assert name != "bridge"
            return getattr(RENDERER, name)

    backend = Replies(CALL, ANSWER)
    made = context(backend, ToolEnv(lambda call: "x" * (1 << 22)), renderer=Refusing())
    trajectory = await NativeAgent().run(made)
    check_exact(trajectory, backend)
    assert trajectory.stop_reason is StopReason.CONTEXT
    assert trajectory.failure.code is FailureCode.MAX_TOKENS
    assert "the output of python, 4,194,304 bytes, does not fit" in trajectory.failure.message


@pytest.mark.parametrize("name", PREFIXES)
async def test_an_answer_that_repeats_itself_is_the_policys(name: str) -> None:
    """A hundred kilobytes of how a call begins, in each grammar: what is in it is run or told of,
    and the rollout ends by its own.
    """
    opener = PREFIXES[name] or "ha "
    sampling, limits = SamplingParams(max_tokens=131_072), RolloutLimits(max_tokens=500_000)
    for answer in (opener * (100_000 // len(opener)), opener + "x" * 100_000):
        backend = Replies(Message(role="assistant", content=answer), ANSWER)
        made = context(backend, limits=limits, sampling=sampling)
        trajectory = await NativeAgent().run(made)
        check_exact(trajectory, backend)
        assert trajectory.failure.failure_class.trains, trajectory.failure.message
        assert backend.completions[0].finish_reason is FinishReason.STOP
        assert sum(len(completion.token_ids_C) for completion in backend.completions) > 10_000


async def test_the_deadline_cuts_a_model_call_and_keeps_the_turns_and_the_artifact() -> None:
    backend = Replies(CALL, None)
    trajectory = await NativeAgent().run(context(backend, deadline=Deadline(0.1)))
    check_exact(trajectory, backend)
    assert (trajectory.stop_reason, trajectory.failure.code) == (
        StopReason.DEADLINE,
        FailureCode.DEADLINE,
    )
    assert trajectory.artifact == b"Let me see."
    assert len(trajectory.turns) == 1


async def test_silence_is_never_the_policys_fault() -> None:
    """A deadline without a single token, or after long silence, is infrastructure's failure."""
    backend = Replies(None)
    never_spoke = await NativeAgent().run(context(backend, deadline=Deadline(0.05)))
    now = [0.0]

    async def freeze() -> None:
        await late.waiting.wait()
        now[0] = SILENT_S + 1.0

    late = Replies(CALL, None)
    freezing = asyncio.ensure_future(freeze())
    deadline = Deadline(0.05, clock=lambda: now[0])
    deadline_passes = asyncio.ensure_future(NativeAgent().run(context(late, deadline=deadline)))
    await freezing
    for trajectory in (never_spoke, await deadline_passes):
        assert trajectory.failure.code is FailureCode.BACKEND_UNAVAILABLE
        assert trajectory.stop_reason is StopReason.FAILED
        assert not trajectory.artifact


async def test_tokens_of_unknown_weights_are_kept_and_do_not_train() -> None:
    first, second = RENDERER.completion(CALL), RENDERER.completion(ANSWER)
    backend = Replies(sampled(first, version=UNKNOWN_VERSION), sampled(second, version=2))
    trajectory = await NativeAgent().run(context(backend, min_version=PolicyVersion(1)))
    (sequence,) = trajectory.sequences
    assert sequence.span_kind_S.tolist() == [
        SpanKind.CONTEXT,
        SpanKind.SAMPLED,
        SpanKind.CONTEXT,
        SpanKind.TRAINED,
    ]
    assert sequence.span_version_S.tolist() == [-1, -1, -1, 2]
    assert len(sequence.logprobs_C) == len(first) + len(second)


async def test_a_paused_deadline_cuts_nothing() -> None:
    deadline = Deadline(0.05)
    deadline.pause()
    backend = open_backend("scripted:noop?delay_s=0.2", RENDERER, get_env)
    assert (
        await NativeAgent().run(context(backend, deadline=deadline))
    ).stop_reason is StopReason.DONE


@pytest.mark.parametrize("code", [FailureCode.BACKEND_UNAVAILABLE, FailureCode.BACKEND_PROTOCOL])
async def test_a_lost_backend_is_infrastructure_and_keeps_the_turns(code: FailureCode) -> None:
    backend = Replies(CALL, BackendError(code, "gone"))
    trajectory = await NativeAgent().run(context(backend))
    check_exact(trajectory, backend)
    assert (trajectory.stop_reason, trajectory.failure.code, trajectory.artifact) == (
        StopReason.FAILED,
        code,
        b"",
    )
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize("fault", ["nan", "positive", "short", "foreign"])
async def test_impossible_tokens_never_enter_a_sequence(fault: str) -> None:
    backend = open_backend(f"scripted:faulty?base=noop&{fault}=1", RENDERER, get_env)
    trajectory = await NativeAgent().run(context(backend))
    assert trajectory.failure.code is FailureCode.BACKEND_PROTOCOL
    assert len(trajectory.sequences[0].logprobs_C) == 0


def _raises(error: Exception) -> Callable[[ToolCall], str]:
    def tool(call: ToolCall) -> str:
        raise error

    return tool


@pytest.mark.parametrize(
    ("error", "stop", "code", "artifact"),
    [
        (
            SandboxError(FailureCode.SANDBOX_BROKEN, "killed"),
            StopReason.SANDBOX_BROKEN,
            FailureCode.SANDBOX_BROKEN,
            b"Let me see.",
        ),
        (
            SandboxError(FailureCode.SANDBOX_LOST, "gone"),
            StopReason.FAILED,
            FailureCode.SANDBOX_LOST,
            b"",
        ),
        (KeyError("a bug of the env"), StopReason.FAILED, FailureCode.STAGE_ERROR, b""),
    ],
)
async def test_who_broke_the_sandbox_decides(
    error: Exception, stop: StopReason, code: FailureCode, artifact: bytes
) -> None:
    backend = Replies(CALL)
    trajectory = await NativeAgent().run(context(backend, ToolEnv(_raises(error))))
    check_exact(trajectory, backend)
    assert (trajectory.stop_reason, trajectory.failure.code, trajectory.artifact) == (
        stop,
        code,
        artifact,
    )
    assert len(trajectory.turns) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SandboxError(FailureCode.SANDBOX_LOST, "x"), FailureCode.SANDBOX_LOST),
        (KeyError("x"), FailureCode.STAGE_ERROR),
    ],
)
async def test_an_artifact_that_cannot_be_fetched_is_not_an_empty_answer(
    error: Exception, code: FailureCode
) -> None:
    env = ToolEnv()

    async def artifact(*_: object) -> bytes:
        raise error

    env.artifact = artifact  # type: ignore[attr-defined]
    trajectory = await NativeAgent().run(context(Replies(ANSWER), env))
    assert (trajectory.stop_reason, trajectory.failure.code) == (StopReason.FAILED, code)


async def test_a_sandbox_that_gives_its_artifact_too_slowly_is_no_excuse(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "ARTIFACT_S", 0.05)
    env = ToolEnv()

    async def artifact(*_: object) -> bytes:
        await asyncio.sleep(60)
        return b""

    env.artifact = artifact  # type: ignore[attr-defined]
    slow = context(Replies(ANSWER), env, sandbox=LocalSandbox(tmp_path))
    trajectory = await NativeAgent().run(slow)
    assert trajectory.failure.code is FailureCode.SANDBOX_BROKEN
    without = await NativeAgent().run(context(Replies(ANSWER), env))
    assert without.failure.code is FailureCode.STAGE_ERROR


async def test_cancelling_keeps_the_turns_and_ends_the_task() -> None:
    flag: list[bool] = []
    backend = Replies(CALL, None)
    task = asyncio.create_task(NativeAgent().run(context(backend, cancelled=lambda: bool(flag))))
    await backend.waiting.wait()
    flag.append(True)
    task.cancel()
    trajectory = await task
    check_exact(trajectory, backend)
    assert (trajectory.stop_reason, trajectory.failure.code) == (
        StopReason.CANCELLED,
        FailureCode.CANCELLED,
    )
    assert len(trajectory.turns) == 1


async def test_a_cancel_that_nobody_announced_passes_through() -> None:
    backend = Replies(None)
    task = asyncio.create_task(NativeAgent().run(context(backend)))
    await backend.waiting.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_flag_alone_ends_the_loop_between_calls() -> None:
    flag: list[bool] = []
    backend = Replies(CALL, ANSWER)
    env = ToolEnv(lambda call: flag.append(True) or "out")  # type: ignore[func-returns-value]
    trajectory = await NativeAgent().run(context(backend, env, cancelled=lambda: bool(flag)))
    assert trajectory.stop_reason is StopReason.CANCELLED
    assert len(backend.requests) == 1


async def test_a_weight_update_splits_the_span_where_it_happened() -> None:
    whole = RENDERER.completion(ANSWER)
    backend = Replies(
        sampled(whole[:3], version=1, finish=FinishReason.ABORT),
        sampled(whole[:0], finish=FinishReason.ABORT),
        sampled(whole[3:], version=2),
    )
    trajectory = await NativeAgent().run(context(backend, sampling=SamplingParams(max_tokens=50)))
    check_exact(trajectory, backend)
    (sequence,) = trajectory.sequences
    assert sequence.span_version_S.tolist() == [-1, 1, 2]
    assert sequence.span_turn_S.tolist() == [0, 0, 0]
    assert len(trajectory.turns) == 1
    assert trajectory.turns[0].completion_tokens == len(whole)
    assert [request.sampling.max_tokens for request in backend.requests] == [50, 47, 47]
    assert [request.min_version for request in backend.requests] == [0, 1, 1]
    assert len({request.seed for request in backend.requests}) == 3


async def test_an_attempt_never_goes_back_to_older_weights() -> None:
    whole = RENDERER.completion(ANSWER)
    backend = Replies(
        sampled(whole[:3], version=2, finish=FinishReason.ABORT), sampled(whole[3:], version=1)
    )
    trajectory = await NativeAgent().run(context(backend))
    assert trajectory.failure.code is FailureCode.BACKEND_UNAVAILABLE
    (sequence,) = trajectory.sequences
    assert sequence.span_version_S.tolist() == [-1, 2]


async def test_a_completion_of_several_versions_is_several_spans() -> None:
    completion = replace(
        sampled(RENDERER.completion(ANSWER)),
        version_ends=(2, 8),
        versions=(PolicyVersion(3), PolicyVersion(4)),
    )
    backend = Replies(completion)
    trajectory = await NativeAgent().run(context(backend))
    check_exact(trajectory, backend)
    (sequence,) = trajectory.sequences
    assert sequence.span_version_S.tolist() == [-1, 3, 4]
    assert np.diff(sequence.span_end_S).tolist() == [2, 6]


async def test_a_backend_that_only_aborts_is_unavailable() -> None:
    nothing = sampled(np.empty(0, dtype=np.int32), finish=FinishReason.ABORT)
    trajectory = await NativeAgent().run(context(Replies(*[nothing] * 100)))
    assert trajectory.failure.code is FailureCode.BACKEND_UNAVAILABLE


async def test_a_prompt_that_does_not_fit_is_the_tasks_fault() -> None:
    trajectory = await NativeAgent().run(context(Replies(), limits=RolloutLimits(max_tokens=50)))
    assert trajectory.failure.failure_class is FailureClass.TASK


@pytest.mark.parametrize(
    ("result", "text"),
    [
        (ToolResult(output="a\n"), "a"),
        (ToolResult(output=""), "[no output]"),
        (ToolResult(output="", exit_code=2), "[exit status 2]"),
        (
            ToolResult(output="a", exit_code=124, timed_out=True, truncated=True),
            "a\n[output truncated]\n[stopped after 5 s]",
        ),
    ],
)
def test_a_tool_result_is_rendered_for_the_policy(result: ToolResult, text: str) -> None:
    assert tool_text(result, 5.0) == text
