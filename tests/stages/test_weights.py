"""RUN while weights change: budgets that stand still, versions that are known, backends that are
behind.
"""

from __future__ import annotations

import asyncio
from typing import cast

from prorl.agents.native import NativeAgent
from prorl.backends import open_backend
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.protocols import Backend
from prorl.stages.run import Pauses, RunOperator, _Watched
from prorl.testing import RENDERER, Replies, sampled
from prorl.types import (
    AttemptKey,
    FailureClass,
    FailureCode,
    FinishReason,
    PolicyVersion,
    StopReason,
)
from tests.agents.test_native import ANSWER, CALL, context
from tests.stages.service import RecordingHost, as_host

KEY = AttemptKey("run", 5, 2)


def operator() -> RunOperator:
    return RunOperator(
        as_host(RecordingHost()),
        get_env,
        lambda spec: RENDERER,
        is_cut=lambda key: False,
        progress=lambda *_: None,
    )


def watched(backend: Backend, run: RunOperator, deadline: Deadline) -> Backend:
    return cast(Backend, _Watched(backend, run, KEY, deadline))


async def test_waiting_for_a_paused_backend_costs_no_budget() -> None:
    deadline, run = Deadline(0.4), operator()
    backend = open_backend("scripted:noop?delay_s=0.8", RENDERER, get_env)
    run.pauses.set(backend.name, True)
    attempt = asyncio.ensure_future(
        NativeAgent().run(context(watched(backend, run, deadline), deadline=deadline))
    )
    assert (await attempt).stop_reason is StopReason.DONE
    assert deadline.remaining_s > 0.2
    assert not run.pauses._waiting[backend.name]


async def test_a_budget_runs_again_after_resume_and_between_calls() -> None:
    now = [0.0]
    deadline, pauses = Deadline(10.0, clock=lambda: now[0]), Pauses()
    one = cast(_Watched, watched(Replies(), operator(), deadline))
    with pauses.watch("b", one):
        now[0] = 1.0
        pauses.set("b", True)
        now[0] = 5.0
        pauses.set("b", False)
        now[0] = 6.0
    assert deadline.remaining_s == 8.0
    pauses.set("b", True)
    now[0] = 7.0
    assert deadline.remaining_s == 7.0, (
        "an attempt that does not wait for the backend goes on spending"
    )
    with pauses.watch("other", one):
        now[0] = 8.0
    assert deadline.remaining_s == 6.0
    pauses.clear()
    with pauses.watch("b", one):
        now[0] = 9.0
    assert deadline.remaining_s == 5.0


async def test_the_newest_version_is_the_label_where_a_server_states_none() -> None:
    deadline, run = Deadline(30.0), operator()
    run.versions["run"] = PolicyVersion(7)
    backend = open_backend("scripted:noop", RENDERER, get_env)
    trajectory = await NativeAgent().run(
        context(watched(backend, run, deadline), deadline=deadline)
    )
    assert trajectory.sequences[0].span_version_S.tolist() == [-1, 7]


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


async def test_a_turn_cut_by_new_weights_is_continued_and_split_at_that_very_id() -> None:
    whole = RENDERER.completion(ANSWER)
    backend = Replies(
        sampled(whole[:3], version=1, finish=FinishReason.ABORT), sampled(whole[3:], version=2)
    )
    trajectory = await NativeAgent().run(context(backend))
    (sequence,) = trajectory.sequences
    prompt = len(backend.prompts[0])
    assert backend.prompts[1].tolist() == sequence.token_ids_L[: prompt + 3].tolist()
    assert sequence.span_version_S.tolist() == [-1, 1, 2]
    assert sequence.span_end_S.tolist() == [prompt, prompt + 3, prompt + len(whole)]
