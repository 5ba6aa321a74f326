"""SCORED rows for the storage tests: built by the same functions that the stages use."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from prorl.control import TaskRow, Terminal
from prorl.schema.columns import Lease
from prorl.types import (
    AttemptKey,
    Failure,
    FailureClass,
    FailureCode,
    FinishReason,
    Message,
    RewardPart,
    RolloutLimits,
    RolloutState,
    SamplingParams,
    SandboxRef,
    Score,
    Sequence,
    StopReason,
    Task,
    Trajectory,
    Turn,
)
from tests.edge_rows import leased_batch, ran_row, ready_row, scored_row

RUN = "demo"


def sequence(seed: int, *, segment: int = 0, version: int = 0, width: int = 5) -> Sequence:
    """Context, sampled, context, sampled: `4 * width` tokens."""
    rng = np.random.default_rng(seed)
    return Sequence(
        segment=segment,
        token_ids_L=rng.integers(0, 50_000, 4 * width, dtype=np.int32),
        logprobs_C=-rng.exponential(size=2 * width).astype(np.float32),
        span_end_S=np.arange(1, 5, dtype=np.int32) * width,
        span_kind_S=np.array([0, 1, 0, 1], np.uint8),
        span_version_S=np.array([-1, version, -1, version + 1], np.int32),
        span_turn_S=np.array([0, 0, 1, 1], np.int32),
        span_temperature_S=np.ones(4, np.float32),
    )


def scored(
    rollout_id: int,
    *,
    n: int = 4,
    attempt: int = 1,
    reward: float | None = 1.0,
    code: FailureCode = FailureCode.NONE,
    eval_code: FailureCode = FailureCode.NONE,
    version: int = 0,
    sequences: tuple[Sequence, ...] | None = None,
    run_id: str = RUN,
    width: int = 5,
) -> pa.RecordBatch:
    """One SCORED row; groups are blocks of `n` rollout ids."""
    lease = Lease(
        key=AttemptKey(run_id, rollout_id, attempt),
        group_id=rollout_id // n,
        sample_index=rollout_id % n,
        rollout_key=f"key-{rollout_id}",
        task=Task(task_id=f"t{rollout_id // n}", env="math", prompt="1+1?"),
        agent="native",
        sampling=SamplingParams(),
        limits=RolloutLimits(),
        backend="oracle",
        min_version=version,
    )
    trajectory = Trajectory(
        sequences=(sequence(rollout_id, version=version, width=width),)
        if sequences is None
        else sequences,
        turns=tuple(turn(i) for i in range(2)),
        messages=(
            Message(role="user", content="1+1?"),
            Message(role="assistant", content="2", turn=1),
        ),
        artifact=b"2",
        stop_reason=StopReason.DONE,
        failure=Failure(code=code),
        llm_s=1.0,
        tool_s=0.5,
    )
    row = ready_row(
        leased_batch([lease]),
        sandbox=SandboxRef(),
        prompt=trajectory.messages[:1],
        tools=(),
        init_s=0.1,
    )
    score = (
        None
        if reward is None
        else Score(parts=(RewardPart(name="exact", value=reward),), log="2 == 2")
    )
    return scored_row(
        ran_row(row, trajectory, run_s=2.0),
        score=score,
        failure=Failure(code=eval_code),
        eval_s=0.2,
    )


def turn(index: int) -> Turn:
    """A model call in numbers."""
    return Turn(
        turn=index,
        segment=0,
        prompt_tokens=10,
        completion_tokens=5,
        cached_tokens=0,
        finish_reason=FinishReason.STOP,
        temperature=1.0,
        policy_version=0,
        backend="oracle",
        llm_s=0.5,
        tool_s=0.25,
        tool_calls=1,
    )


def terminal(
    rollout_id: int, *, n: int = 4, status: str = "failed", code: str = "worker_lost"
) -> Terminal:
    """Returns the content of a `terminal` command."""
    return Terminal(
        rollout_id=rollout_id,
        group_id=rollout_id // n,
        attempt=3,
        status=RolloutState(status),
        failure_class=FailureClass.INFRA,
        failure_code=FailureCode(code),
        failure_message="gone",
        sample_index=rollout_id % n,
        rollout_key=f"key-{rollout_id}",
        task_id=f"t{rollout_id // n}",
        data_source="",
        env="math",
        agent="native",
        queue_s=0.5,
        extra="{}",
    )


def task_row(group_id: int = 0, env: str = "math", task: str = "{}") -> TaskRow:
    """A TASKS row as the gateway sends it, of a group of two."""
    named = {"task_id": "t", "data_source": "", "env": env}
    return TaskRow(**named, group_id=group_id, n=2, task=task, sampling="{}", extra="{}")
