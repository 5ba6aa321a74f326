"""INIT:

LEASED -> READY. Makes the sandbox that RUN will act in, with the task's files in it; renders
nothing, samples nothing.

A task that its env cannot read is `bad_task` or `unknown_env` (class task, not tried again);
trouble with the sandbox is class infra. What INIT started it gives back in `release`; once RUN took
the row, RUN stops it. Bounded by `limits.init_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from prorl.columns import read_key, read_limit, read_task, ready_columns
from prorl.errors import RolloutError, SandboxError, TaskError, boundary
from prorl.limits import Clock
from prorl.protocols import Env, SandboxHost
from prorl.rows import Added, Row
from prorl.stages.prepare import prepare
from prorl.types import AttemptKey, FailureCode, SandboxRef, SandboxSpec, Stage, Task

GetEnv = Callable[[str], Env]


def owner_of(key: AttemptKey) -> str:
    """Name of an attempt at sandboxd."""
    return f"{key.run_id}/{key.rollout_id}/{key.attempt}"


def needs_sandbox(env: Env, task: Task) -> bool:
    """Whether any stage of this task runs in a sandbox."""
    return any(env.sandbox(task, stage) is not None for stage in (Stage.RUN, Stage.EVAL))


class InitOperator:
    """Implements `prorl.protocols.Operator`."""

    stage = Stage.INIT

    def __init__(self, host: SandboxHost, get_env: GetEnv, clock: Clock = time.monotonic) -> None:
        self._host, self._get_env, self._clock = host, get_env, clock

    async def __call__(self, row: Row) -> Added:
        """Make one row ready. Raises RolloutError and TaskError."""
        began = self._clock()
        task = read_task(row)
        env = self._env(task)
        env.check(task)
        messages, tools = env.messages(task), env.tools(task)
        spec = env.sandbox(task, Stage.RUN)
        ref = SandboxRef()
        if spec is not None:
            ref = await self._sandbox(env, task, spec, row)
        else:
            await env.prepare(task, None)
        return ready_columns(
            sandbox=ref, prompt=messages, tools=tools, init_s=self._clock() - began
        )

    def _env(self, task: Task) -> Env:
        try:
            return self._get_env(task.env)
        except TaskError as error:
            raise RolloutError(FailureCode.UNKNOWN_ENV, str(error)) from None

    async def _sandbox(self, env: Env, task: Task, spec: SandboxSpec, row: Row) -> SandboxRef:
        """A sandbox with the task's files in it, within `init_s`."""
        init_s = read_limit(row, "init_s")
        try:
            async with asyncio.timeout(init_s):
                with boundary(SandboxError, FailureCode.SANDBOX_START, "sandbox start"):
                    ref = await self._host.start(owner_of(read_key(row)), "run", spec)
                async with self._host.connect(ref) as sandbox:
                    await prepare(self._host, env, task, spec, sandbox)
        except TimeoutError:
            raise SandboxError(
                FailureCode.SANDBOX_START, f"not ready within init_s = {init_s:g} s"
            ) from None
        return ref

    async def release(self, row: Row) -> None:
        """Stop what the attempt has; idempotent."""
        task = read_task(row)
        if needs_sandbox(self._env(task), task):
            await self._host.stop_owner(owner_of(read_key(row)))
