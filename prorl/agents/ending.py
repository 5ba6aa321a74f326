"""Ends an attempt, whichever agent drove the policy: its end, its artifact, its trajectory.

    agent's loop -> End -> Env.artifact -> AttemptEnd in the journal -> Trajectory -> RAN, EVAL

Invariants: whatever happens there is a trajectory with everything that was sampled until then. A
budget that ends leaves the artifact to be scored (class policy); a backend or sandbox that we lost
leaves none (class infra).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import NamedTuple

from prorl.agents.context import AttemptContext
from prorl.agents.record import AttemptRecord
from prorl.errors import (
    PromptTooLongError,
    ProrlError,
    RolloutError,
    SandboxError,
    TaskError,
    boundary,
)
from prorl.journal import AttemptEnd
from prorl.protocols import ScoresInPlace
from prorl.types import (
    FAILURE_CLASS,
    Failure,
    FailureClass,
    FailureCode,
    Json,
    StopReason,
    Trajectory,
)
from prorl.waits import wait_limit_s

ARTIFACT_S = wait_limit_s("agent.artifact")


class End(NamedTuple):
    stop: StopReason
    failure: Failure = Failure(code=FailureCode.NONE)
    artifact: bytes | None = None
    """Set where the agent, not the env, gives what crosses into EVAL."""


_STOPS = {
    FailureCode.DEADLINE: StopReason.DEADLINE,
    FailureCode.MAX_TURNS: StopReason.MAX_TURNS,
    FailureCode.MAX_TOKENS: StopReason.MAX_TOKENS,
    FailureCode.PROMPT_TOO_LONG: StopReason.CONTEXT,
    FailureCode.SANDBOX_BROKEN: StopReason.SANDBOX_BROKEN,
    FailureCode.CANCELLED: StopReason.CANCELLED,
}


def end_with(code: FailureCode, message: str = "") -> End:
    return End(_STOPS.get(code, StopReason.FAILED), Failure(code=code, message=message))


async def run_to_trajectory(
    context: AttemptContext,
    record: AttemptRecord,
    loop: Coroutine[Json, Json, End],
) -> Trajectory:
    """Run an agent's loop, which writes to `record`, to the attempt's end. Returns what it left.

    Raises only CancelledError, and only when `context.cancelled()` is false.
    """
    try:
        end = await _end_of_loop(loop)
        end, artifact = await _finish(context, record, end)
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if not context.cancelled() or task is None:
            raise
        task.uncancel()
        end, artifact = end_with(FailureCode.CANCELLED), b""
    return Trajectory(
        sequences=record.sequences,
        turns=tuple(record.turns),
        messages=tuple(record.messages),
        artifact=artifact or b"",
        rescorable=artifact is not None,
        stop_reason=end.stop,
        failure=end.failure,
        llm_s=record.llm_s,
        tool_s=record.tool_s,
        endpoint_counts=record.endpoint_counts,
        env_state=context.state.committed,
    )


async def _end_of_loop(loop: Coroutine[Json, Json, End]) -> End:
    try:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, "agent loop"):
            return await loop
    except ProrlError as error:
        return end_of(error)


def end_of(error: ProrlError) -> End:
    """Returns the end of an attempt that an error ended."""
    match error:
        case RolloutError():
            return end_with(error.code, error.message)
        case PromptTooLongError():
            return end_with(FailureCode.PROMPT_TOO_LONG, str(error))
        case TaskError():
            return end_with(FailureCode.BAD_TASK, str(error))
        case _:
            return end_with(FailureCode.STAGE_ERROR, str(error))


async def _finish(
    context: AttemptContext, record: AttemptRecord, end: End
) -> tuple[End, bytes | None]:
    """Returns how the attempt ended, and the artifact for EVAL: as recorded, or written down
    now.
    """
    journal = context.journal
    if (ended := journal.ended) is not None:
        return End(ended.stop, Failure(code=ended.code, message=ended.message)), ended.artifact
    artifact: bytes | None = end.artifact or b""
    if end.failure.failure_class.trains and end.artifact is None:
        end, artifact = await _artifact(context, record, end)
    code, message = end.failure.code, end.failure.message
    spent_s = context.spent_s
    ended = AttemptEnd(
        stop=end.stop, code=code, message=message, artifact=artifact, spent_s=spent_s
    )
    journal.record_end(ended)
    return end, artifact


async def _artifact(
    context: AttemptContext, record: AttemptRecord, end: End
) -> tuple[End, bytes | None]:
    """Returns the artifact that the env wants EVAL to grade, and how the attempt ends. None: it is
    too large, and EVAL grades it in the agent's own sandbox.

    Where the sandbox cannot give the artifact any more, a good end becomes that failure, and a bad
    end stays.
    """
    try:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, "artifact"):
            return end, await _fetch(context, record)
    except RolloutError as error:
        ours = FAILURE_CLASS[error.code] is not FailureClass.POLICY
        keep = end.stop is StopReason.SANDBOX_BROKEN or (
            end.stop is not StopReason.DONE and not ours
        )
        return (end if keep else end_with(error.code, error.message)), b""


async def _fetch(context: AttemptContext, record: AttemptRecord) -> bytes | None:
    try:
        async with asyncio.timeout(ARTIFACT_S) as guard:
            if isinstance(context.env, ScoresInPlace) and context.sandbox is not None:
                max_bytes = context.limits.artifact_mb << 20
                return await context.env.pack(context.task, context.sandbox, max_bytes)
            return await context.env.artifact(context.task, record.final, context.sandbox)
    except TimeoutError as cause:
        if context.sandbox is None or not guard.expired():
            raise
        message = f"the sandbox did not give its artifact in {ARTIFACT_S:g} s"
        raise SandboxError(FailureCode.SANDBOX_BROKEN, message) from cause
