"""RUN while weights change: budgets that stand still, versions that are known, backends that are
behind.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

import numpy as np

from prorl.agents.native import NativeAgent
from prorl.backends import open_backend
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.protocols import Backend
from prorl.renderer.apart import AnyRenderer
from prorl.stages.backends import Backends
from prorl.stages.failover import Routed
from prorl.testing import RENDERER, Replies, sampled
from prorl.types import (
    AttemptKey,
    FailureClass,
    FailureCode,
    GenerateRequest,
    PolicyVersion,
    RunWeights,
    SamplingParams,
    StopReason,
)
from tests.agents.test_native import ANSWER, CALL, context

REQUEST = GenerateRequest(
    prompt_ids_L=np.arange(4, dtype=np.int32),
    sampling=SamplingParams(max_tokens=8),
    seed=1,
    stop_token_ids=(),
    request_id="r",
    session="s",
)
KEY = AttemptKey("run", 5, 2)


def opened(backend: Backend) -> Backends:
    """RUN's servers when each name leads to one backend."""

    async def open_(url: str, renderer: AnyRenderer, keyed: bool) -> Backend:
        return backend

    return Backends(open_)


def routed(backends: Backends, url: str, deadline: Deadline, version: int = 0) -> Routed:
    current_weights = (PolicyVersion(version), RunWeights("tag"))
    return Routed(
        backends,
        url,
        key=KEY,
        deadline=deadline,
        renderer=RENDERER,
        current=lambda: current_weights,
    )


async def test_waiting_for_a_paused_backend_costs_no_budget() -> None:
    backend = open_backend("scripted:noop?delay_s=2", RENDERER, get_env)
    backends, began = opened(backend), time.monotonic()
    deadline = Deadline(60.0)
    backends.set_paused(backend.name, True)
    policy = routed(backends, backend.name, deadline)
    trajectory = await NativeAgent().run(context(policy, deadline=deadline))
    assert trajectory.stop_reason is StopReason.DONE
    assert 60.0 - deadline.remaining_s < time.monotonic() - began - 1.5


async def test_a_budget_runs_again_after_resume_and_between_calls() -> None:
    now = [0.0]
    deadline, replies = Deadline(10.0, clock=lambda: now[0]), Replies(None, None)
    backends = opened(replies)
    policy = routed(backends, "b", deadline)
    request = replace(REQUEST, prompt_ids_L=np.arange(3, dtype=np.int32))
    call = asyncio.ensure_future(policy.generate(request))
    await replies.waiting.wait()
    now[0] = 1.0
    backends.set_paused("b", True)
    now[0] = 5.0
    backends.set_paused("b", False)
    now[0] = 6.0
    assert deadline.remaining_s == 8.0
    backends.set_paused("b", True)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    now[0] = 7.0
    assert deadline.remaining_s == 7.0, (
        "an attempt that does not wait for the backend goes on spending"
    )
    backends.clear_pauses()
    assert not backends.is_paused("b")


async def test_a_backend_with_older_weights_may_not_go_on_with_a_rollout() -> None:
    first, second = RENDERER.completion(CALL), RENDERER.completion(ANSWER)
    backend = Replies(sampled(first, version=4), sampled(second, version=3))
    trajectory = await NativeAgent().run(context(backend))
    assert (trajectory.failure.code, trajectory.failure.failure_class) == (
        FailureCode.BACKEND_UNAVAILABLE,
        FailureClass.INFRA,
    )
    assert trajectory.sequences[0].span_version_S.tolist() == [-1, 4, -1], (
        "tokens of the older weights are not kept"
    )
    assert len(trajectory.turns) == 1


async def test_a_lease_that_wants_newer_weights_is_not_served_by_older_ones() -> None:
    backend = Replies(sampled(RENDERER.completion(ANSWER), version=4))
    trajectory = await NativeAgent().run(context(backend, min_version=PolicyVersion(5)))
    assert trajectory.failure.code is FailureCode.BACKEND_UNAVAILABLE
