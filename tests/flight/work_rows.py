"""Work rows for tests."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from prorl.schema.columns import Lease
from prorl.types import (
    AttemptKey,
    Failure,
    FailureCode,
    RolloutLimits,
    SamplingParams,
    SandboxRef,
    Sequence,
    StopReason,
    Task,
    Trajectory,
)
from tests.edge_rows import leased_batch, ran_row, ready_row


def key(n: int, attempt: int = 1) -> AttemptKey:
    return AttemptKey("run", n, attempt)


def lease(
    n: int, env: str = "noop", limits: RolloutLimits | None = None, attempt: int = 1, **data: object
) -> Lease:
    task = Task(task_id=f"t/{n}", env=env, prompt="What is 1+1?", data=data)
    return Lease(
        key=key(n, attempt),
        group_id=n,
        sample_index=0,
        rollout_key=f"run/{n}/0",
        task=task,
        agent="native",
        sampling=SamplingParams(),
        limits=limits or RolloutLimits(),
        backend="scripted:noop",
    )


def leased(*numbers: int) -> pa.RecordBatch:
    return leased_batch(lease(n) for n in numbers)


def ready(n: int) -> pa.RecordBatch:
    return ready_row(leased(n), sandbox=SandboxRef(), prompt=(), tools=(), init_s=0.1)


def trajectory(num_tokens: int = 8) -> Trajectory:
    half = num_tokens // 2
    sequence = Sequence(
        segment=0,
        token_ids_L=np.arange(num_tokens, dtype=np.int32),
        logprobs_C=np.full(num_tokens - half, -0.5, np.float32),
        span_end_S=np.array([half, num_tokens], np.int32),
        span_kind_S=np.array([0, 1], np.uint8),
        span_version_S=np.array([-1, 0], np.int32),
        span_turn_S=np.array([0, 0], np.int32),
        span_temperature_S=np.array([0, 1], np.float32),
    )
    return Trajectory(
        sequences=(sequence,),
        turns=(),
        messages=(),
        artifact=b"2",
        stop_reason=StopReason.DONE,
        failure=Failure(code=FailureCode.NONE),
        llm_s=0.1,
        tool_s=0.0,
    )


def ran(n: int, num_tokens: int = 8) -> pa.RecordBatch:
    return ran_row(ready(n), trajectory(num_tokens), run_s=0.2)
