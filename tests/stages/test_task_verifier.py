"""A task is tried once a node: what is wrong with it every rollout is told, what is wrong with the
machine nobody remembers.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from prorl.envs.noop import NoopEnv
from prorl.errors import RolloutError, SandboxError
from prorl.limits import Deadline
from prorl.protocols import Sandbox, SupportsTaskVerification
from prorl.stages.eval import TaskVerifier
from prorl.testing import make_task
from prorl.types import FailureCode, SandboxSpec, Stage, Task
from tests.stages.recording_host import RecordingHost, as_host

TASK = make_task("tried")


class TriedEnv(NoopEnv):
    """Its trials end as the test wants."""

    name = "tried"

    def __init__(self, *ends: RolloutError | None) -> None:
        self.ends = list(ends)
        self.num_trials = 0

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        return SandboxSpec()

    async def verify(self, task: Task, sandbox: Sandbox, deadline: Deadline) -> None:
        self.num_trials += 1
        await asyncio.sleep(0.01)
        if self.ends and (end := self.ends.pop(0)) is not None:
            raise end


async def _check(verifier: TaskVerifier, env: TriedEnv, *tasks: Task) -> list[BaseException | None]:
    """All at once, as siblings come."""
    checks = (verifier.check(env, task, "run/1/1", 5.0) for task in tasks)
    return await asyncio.gather(*checks, return_exceptions=True)


@pytest.fixture
def verifier() -> TaskVerifier:
    return TaskVerifier(as_host(RecordingHost()), time.monotonic)


async def test_siblings_share_a_single_trial_and_other_tasks_have_their_own(
    verifier: TaskVerifier,
) -> None:
    env = TriedEnv()
    assert isinstance(env, SupportsTaskVerification)
    assert await _check(verifier, env, *[TASK] * 8) == [None] * 8
    assert env.num_trials == 1
    await _check(verifier, env, TASK, make_task("tried", "another"))
    assert env.num_trials == 2


async def test_a_failed_verification_is_reported_to_every_rollout(verifier: TaskVerifier) -> None:
    """Each rollout has an error of its own: one that is raised again grows by each rollout's
    frames.
    """
    env = TriedEnv(RolloutError(FailureCode.BAD_TASK, "no pytest"))
    errors = await _check(verifier, env, *[TASK] * 3)
    assert [str(error) for error in errors] == ["bad_task: no pytest"] * 3
    assert len(set(map(id, errors))) == 3
    assert env.num_trials == 1


async def test_what_the_machine_did_is_tried_again_and_not_remembered(
    verifier: TaskVerifier,
) -> None:
    lost = SandboxError(FailureCode.SANDBOX_LOST, "gone")
    env = TriedEnv(lost, None)
    assert await _check(verifier, env, TASK) == [None]
    assert env.num_trials == 2
    never = TriedEnv(*[lost] * 3)
    other = make_task("tried", "other")
    (error,) = await _check(verifier, never, other)
    assert isinstance(error, RolloutError)
    assert error.code is FailureCode.EVAL_FAILED
    assert await _check(verifier, never, other) == [None]


async def test_an_env_that_tries_nothing_costs_no_sandbox() -> None:
    host = RecordingHost()
    verifier = TaskVerifier(as_host(host), time.monotonic)
    await verifier.check(NoopEnv(), TASK, "run/1/1", 5.0)
    assert host.requests == []
