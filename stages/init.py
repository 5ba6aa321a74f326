"""INIT: LEASED -> READY. Makes the sandbox that RUN will act in, with the task's files in it; renders nothing, samples nothing.

A task that its env cannot read is `bad_task` or `unknown_env` (class task, not tried again); trouble with the sandbox is class infra.
What INIT started it gives back in `release`; once RUN took the row, RUN stops it. Bounded by `limits.init_s`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import pyarrow as pa

from prorl.columns import Lease, read_lease, ready_row
from prorl.errors import RolloutError, SandboxError, TaskError, boundary
from prorl.limits import Clock
from prorl.protocols import Env, SandboxHost
from prorl.types import AttemptKey, FailureCode, SandboxRef, SandboxSpec, Stage

GetEnv = Callable[[str], Env]


def owner_of(key: AttemptKey) -> str:
    """Name of an attempt at sandboxd."""
    return f"{key.run_id}/{key.rollout_id}/{key.attempt}"


def needs_sandbox(env: Env, lease: Lease) -> bool:
    """Whether any stage of this task runs in a sandbox."""
    return any(env.sandbox(lease.task, stage) is not None for stage in (Stage.RUN, Stage.EVAL))


class InitOperator:
    """Implements `prorl.protocols.Operator`."""

    stage = Stage.INIT

    def __init__(self, host: SandboxHost, get_env: GetEnv, clock: Clock = time.monotonic) -> None:
        self._host, self._get_env, self._clock = host, get_env, clock

    async def __call__(self, row: pa.RecordBatch) -> pa.RecordBatch:
        """Make one row ready. Raises RolloutError and TaskError."""
        began = self._clock()
        lease = read_lease(row)
        env = self._env(lease)
        env.check(lease.task)
        try:
            async with asyncio.timeout(lease.limits.init_s):
                ref = await self._prepare(env, lease)
        except TimeoutError:
            raise SandboxError(FailureCode.SANDBOX_START, f"not ready within init_s = {lease.limits.init_s:g} s") from None
        messages, tools = env.messages(lease.task), env.tools(lease.task)
        return ready_row(row, sandbox=ref, prompt=messages, tools=tools, init_s=self._clock() - began)

    def _env(self, lease: Lease) -> Env:
        try:
            return self._get_env(lease.task.env)
        except TaskError as error:
            raise RolloutError(FailureCode.UNKNOWN_ENV, str(error)) from None

    async def _prepare(self, env: Env, lease: Lease) -> SandboxRef:
        spec = env.sandbox(lease.task, Stage.RUN)
        if spec is None:
            await env.prepare(lease.task, None)
            return SandboxRef()
        ref = await self._start(lease, spec)
        async with self._host.connect(ref) as sandbox:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, f"{env.name}.prepare"):
                await env.prepare(lease.task, sandbox)
        return ref

    async def _start(self, lease: Lease, spec: SandboxSpec) -> SandboxRef:
        with boundary(SandboxError, FailureCode.SANDBOX_START, "sandbox start"):
            return await self._host.start(owner_of(lease.key), "run", spec)

    async def release(self, row: pa.RecordBatch) -> None:
        """Stop what the attempt has; idempotent."""
        lease = read_lease(row)
        if needs_sandbox(self._env(lease), lease):
            await self._host.stop_owner(owner_of(lease.key))
