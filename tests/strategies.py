"""Hypothesis strategies for the records of `prorl.types`: valid by construction, small, with every
corner that a row can have.
"""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from prorl.schema.columns import Lease
from prorl.types import (
    AttemptKey,
    Failure,
    FailureCode,
    FinishReason,
    Lineage,
    Message,
    RewardPart,
    RolloutLimits,
    SamplingParams,
    SandboxRef,
    Score,
    Sequence,
    SpanKind,
    StopReason,
    Task,
    ToolCall,
    ToolSpec,
    Trajectory,
    Turn,
)

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**40), 2**40)
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=5,
)
seconds = st.floats(0, 1e6)
float32 = st.floats(-1e6, 1e6, width=32)

tasks = st.builds(
    Task,
    task_id=text.filter(lambda name: bool(name) and "\0" not in name),
    env=st.sampled_from(["math", "code", "noop"]),
    prompt=text,
    data=st.dictionaries(text, json_values, max_size=3),
)
leases = st.builds(
    Lease,
    key=st.builds(AttemptKey, text, st.integers(0, 2**50), st.integers(1, 100)),
    group_id=st.integers(0, 2**50),
    sample_index=st.integers(0, 63),
    rollout_key=text,
    task=tasks,
    agent=text,
    sampling=st.builds(
        SamplingParams, temperature=st.floats(0, 2, width=32), top_p=st.floats(0.0625, 1, width=32)
    ),
    limits=st.builds(RolloutLimits, run_s=seconds, max_turns=st.integers(1, 100)),
    backend=text,
    run_seed=st.integers(0, 2**62),
    queue_s=seconds,
    train=st.lists(st.sampled_from(Lineage), min_size=1, unique=True).map(tuple),
)
calls = st.builds(ToolCall, text, st.dictionaries(text, json_values, max_size=2), text, text, text)
messages = st.builds(
    Message,
    role=text,
    content=text,
    tool_calls=st.lists(calls, max_size=2).map(tuple),
    name=text,
    turn=st.integers(0, 99),
    reasoning=text,
    call_id=text,
)
sandboxes = st.builds(SandboxRef, text, text, text)
specs = st.builds(ToolSpec, text, text, st.dictionaries(text, json_values, max_size=2))


@st.composite
def sequences(draw: st.DrawFn, segment: int = 0) -> Sequence:
    """A valid sequence of up to a few dozen tokens."""
    spans = draw(
        st.lists(
            st.tuples(st.integers(1, 9), st.sampled_from(SpanKind), st.integers(0, 5)),
            min_size=1,
            max_size=6,
        )
    )
    widths = np.array([width for width, _, _ in spans])
    kinds = np.array([kind for _, kind, _ in spans], np.uint8)
    num_sampled = int(widths[kinds >= 1].sum())
    seed = np.random.default_rng(draw(st.integers(0, 2**32)))
    return Sequence(
        segment=segment,
        lineage=draw(st.sampled_from(Lineage)),
        parent=draw(st.integers(-1, segment - 1)),
        weight=draw(st.sampled_from([0.0, 0.5, 1.0])),
        token_ids_L=seed.integers(0, 2**31 - 1, int(widths.sum()), dtype=np.int32),
        logprobs_C=-seed.exponential(size=num_sampled).astype(np.float32),
        span_end_S=np.cumsum(widths).astype(np.int32),
        span_kind_S=kinds,
        span_version_S=np.array([version if kind else -1 for _, kind, version in spans], np.int32),
        span_turn_S=np.arange(len(spans), dtype=np.int32),
        span_temperature_S=seed.random(len(spans), dtype=np.float32),
    )


turns = st.builds(
    Turn,
    turn=st.integers(0, 99),
    segment=st.integers(0, 3),
    prompt_tokens=st.integers(0, 9999),
    completion_tokens=st.integers(0, 9999),
    cached_tokens=st.integers(0, 9999),
    finish_reason=st.sampled_from(FinishReason),
    temperature=st.floats(0, 2, width=32),
    policy_version=st.integers(0, 99),
    backend=text,
    llm_s=seconds,
    tool_s=seconds,
    tool_calls=st.integers(0, 9),
)
failures = st.builds(Failure, code=st.sampled_from(FailureCode), message=text)
trajectories = st.builds(
    Trajectory,
    sequences=st.integers(1, 3).flatmap(
        lambda n: st.tuples(*(sequences(segment=i) for i in range(n)))
    ),
    turns=st.lists(turns, max_size=3).map(tuple),
    messages=st.lists(messages, max_size=3).map(tuple),
    artifact=st.binary(max_size=40),
    stop_reason=st.sampled_from(StopReason),
    failure=failures,
    llm_s=seconds,
    tool_s=seconds,
)
scores = st.builds(
    Score,
    parts=st.lists(
        st.builds(RewardPart, name=text, value=float32, weight=st.floats(0, 1, width=32)),
        max_size=3,
    ).map(tuple),
    log=text,
)
