"""INIT: LEASED -> READY: makes the sandbox that RUN will act in, with the task's files in it.

A task that its env cannot read is `bad_task`, one whose prompt does not fit `prompt_too_long`, one
of an env that nobody knows `unknown_env` (class task, not tried again); no sandbox is started for
it; trouble with the sandbox is class infra. What INIT started it gives back in `release`; once RUN
took the row, RUN stops it. Bounded by `limits.init_s`.
"""

from __future__ import annotations

import asyncio

from prorl.agents.programs import program_of
from prorl.errors import SandboxError, boundary
from prorl.limits import Deadline
from prorl.network_policy import NO_NETWORK, sandbox_spec, target_of
from prorl.protocols import Env, Responds
from prorl.renderer.apart import check_length
from prorl.schema.columns import read_key, read_limit, read_task, ready_columns
from prorl.schema.rows import Added, Row
from prorl.stages.operator import StageOperator, owner_of, prepare
from prorl.types import FailureCode, SandboxRef, SandboxSpec, Stage, Task


class InitOperator(StageOperator):
    stage = Stage.INIT

    async def __call__(self, row: Row) -> Added:
        """Make one row ready. Raises RolloutError and TaskError."""
        began = self._clock()
        task = read_task(row)
        env = await self._env(task, read_limit(row, "init_s"))
        env.check(task)
        messages, tools = env.messages(task), env.tools(task)
        spec: SandboxSpec | None
        if (program := program_of(row.value("agent"))) is not None:
            spec = program.sandbox(env, task)
        else:
            spec = sandbox_spec(env, task, Stage.RUN)
            most, deadline = int(read_limit(row, "max_tokens")), Deadline(read_limit(row, "init_s"))
            await check_length(row.value("renderer"), messages, tools, most, deadline)
        ref = SandboxRef()
        if spec is not None:
            ref = await self._sandbox(env, task, spec, row)
        else:
            await env.prepare(task, None)
        return ready_columns(
            sandbox=ref,
            prompt=messages,
            tools=tools,
            responds=isinstance(env, Responds),
            init_s=self._clock() - began,
        )

    async def _sandbox(self, env: Env, task: Task, spec: SandboxSpec, row: Row) -> SandboxRef:
        """A sandbox with the task's files in it, within `init_s`."""
        init_s = read_limit(row, "init_s")
        try:
            async with asyncio.timeout(init_s):
                if spec.network_mode != NO_NETWORK:
                    server = target_of(row.value("backend"))
                    await self._host.close_targets([server] if server else [])
                with boundary(SandboxError, FailureCode.SANDBOX_START, "sandbox start"):
                    ref = await self._host.start(owner_of(read_key(row)), "run", spec)
                async with self._host.connect(ref) as sandbox:
                    await prepare(self._host, env, task, spec, sandbox)
        except TimeoutError:
            late = f"not ready within init_s = {init_s:g} s"
            raise SandboxError(FailureCode.SANDBOX_START, late) from None
        return ref
