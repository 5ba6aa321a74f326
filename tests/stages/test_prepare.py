"""Tests of the requests of INIT and EVAL to sandboxd when an env's preparation is worth keeping,
and of whose fault its failure is.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from prorl.errors import SandboxError, TaskError
from prorl.protocols import Sandbox
from prorl.types import FailureCode, SandboxSpec, Stage, Task
from tests.stages.recording_host import RecordingHost
from tests.stages.test_operators import BoxedEnv, operators, row_of


@dataclass
class KeptEnv(BoxedEnv):
    """An env with a preparation worth keeping."""

    name: str = "kept"
    text: str = "repo@1"
    image: str = ""
    num_prepared: int = 0
    failing: list[Exception] = field(default_factory=list)

    def sandbox(self, task: Task, stage: Stage) -> SandboxSpec | None:
        return SandboxSpec(image=self.image, tools=() if stage is Stage.EVAL else ("bash",))

    def preparation(self, task: Task) -> str:
        return self.text

    async def prepare(self, task: Task, sandbox: Sandbox | None) -> None:
        await asyncio.sleep(0)
        self.num_prepared += 1
        if self.failing:
            raise self.failing.pop(0)


async def _keys(env: KeptEnv) -> list[str]:
    """The keys that INIT and EVAL name for one rollout."""
    host = RecordingHost()
    init, run, evaluate = operators(env, host)
    await evaluate(await run(await init(row_of())))
    await run.operator.close()
    return [key for verb, key, _ in host.requests if verb == "prepare"]


async def test_init_and_eval_share_a_single_preparation_per_content_and_image() -> None:
    env = KeptEnv()
    first = await _keys(env)
    assert env.num_prepared == 2
    assert len(first) == 2
    assert len(set(first)) == 1
    assert await _keys(KeptEnv()) == first
    others = [
        *await _keys(KeptEnv(text="repo@2")),
        *await _keys(KeptEnv(image="/images/a")),
        *await _keys(KeptEnv(name="other")),
    ]
    assert len({*others, *first}) == 4


async def test_nothing_worth_keeping_is_prepared_without_asking() -> None:
    env = KeptEnv(text="")
    assert await _keys(env) == []
    assert env.num_prepared == 2


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SandboxError(FailureCode.SANDBOX_BROKEN, "out of memory"), FailureCode.SANDBOX_START),
        (SandboxError(FailureCode.SANDBOX_LOST, "gone"), FailureCode.SANDBOX_LOST),
    ],
)
@pytest.mark.parametrize("text", ["", "repo@1"])
async def test_a_sandbox_that_breaks_before_the_policy_acts_is_infra(
    error: SandboxError, code: FailureCode, text: str
) -> None:
    init, _, _ = operators(KeptEnv(text=text, failing=[error]), RecordingHost())
    with pytest.raises(SandboxError) as caught:
        await init(row_of())
    assert caught.value.code is code


async def test_a_task_that_cannot_be_prepared_is_the_tasks_fault() -> None:
    init, _, _ = operators(
        KeptEnv(failing=[TaskError("setup ended with exit status 1")]), RecordingHost()
    )
    with pytest.raises(TaskError, match="exit status 1"):
        await init(row_of())
