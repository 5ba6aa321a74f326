"""INIT: LEASED -> READY.

Makes the sandbox that RUN will act in, with the task's files in it; renders nothing, samples
nothing.

A task that its env cannot read is `bad_task` or `unknown_env` (class task, not tried again);
trouble with the sandbox is class infra. What INIT started it gives back in `release`; once RUN took
the row, RUN stops it. Bounded by `limits.init_s`.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from prorl.columns import read_key, read_limit, read_task, ready_columns
from prorl.errors import ProrlError, SandboxError, boundary
from prorl.flight.handover import Mover
from prorl.journal import handed_path
from prorl.protocols import Env, Sandbox, SandboxHost
from prorl.rows import Added, Row
from prorl.stages.operator import GetEnv, StageOperator, owner_of
from prorl.stages.prepare import prepare
from prorl.types import FailureCode, SandboxRef, SandboxSpec, Stage, Task

log = logging.getLogger("prorl.stages")


class InitOperator(StageOperator):
    """The operator of INIT: takes LEASED rows and gives READY rows."""

    stage = Stage.INIT

    def __init__(
        self,
        host: SandboxHost,
        get_env: GetEnv,
        mover: Mover | None = None,
        journals: Path | None = None,
    ) -> None:
        """`journals`: the folder of a worker of this node, beside which RUN looks for pasts."""
        super().__init__(host, get_env)
        self._mover, self._journals = mover, journals

    async def __call__(self, row: Row) -> Added:
        """Make one row ready. Raises RolloutError and TaskError."""
        began = self._clock()
        task = read_task(row)
        env = self._env(task)
        env.check(task)
        messages, tools = env.messages(task), env.tools(task)
        spec = env.sandbox(task, Stage.RUN)
        ref = SandboxRef()
        workspace = await self._fetch(row, spec)
        if spec is not None:
            ref = await self._sandbox(env, task, spec, row, workspace)
        else:
            await env.prepare(task, None)
        return ready_columns(
            sandbox=ref, prompt=messages, tools=tools, init_s=self._clock() - began
        )

    async def release(self, row: Row) -> None:
        """Also what was fetched for it."""
        if self._journals is not None and row.value("handed"):
            handed_path(self._journals, read_key(row)).unlink(missing_ok=True)
        await super().release(row)

    async def _fetch(self, row: Row, spec: SandboxSpec | None) -> Path | None:
        """The workspace of an attempt that a node has handed over, with its journal beside it.

        None where it begins anew.
        """
        key, handed = read_key(row), row.value("handed")
        if not handed or self._mover is None or self._journals is None:
            return None
        journal = handed_path(self._journals, key)
        workspace = journal.with_suffix(".workspace")
        try:
            journal.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            async with asyncio.timeout(read_limit(row, "init_s")):
                await self._mover.take(key._replace(attempt=handed), journal, workspace)
        except (ProrlError, OSError) as error:  # a timeout is an OSError, too
            log.warning("what was handed over of %s cannot be had: %s", key, error)
        if spec is not None and not (journal.exists() and workspace.exists()):
            journal.unlink(missing_ok=True)  # turns without the files that they made
            workspace.unlink(missing_ok=True)
        return workspace if workspace.exists() else None

    async def _restore(self, row: Row, sandbox: Sandbox, workspace: Path) -> None:
        """Put the workspace back. Where that fails, the next attempt does not try it again."""
        try:
            await sandbox.restore(str(workspace))
        except SandboxError as error:
            assert self._mover is not None
            key = read_key(row)._replace(attempt=row.value("handed"))
            await self._mover.tell(key, f"its workspace could not be restored: {error.message}")
            raise

    async def _sandbox(
        self, env: Env, task: Task, spec: SandboxSpec, row: Row, workspace: Path | None
    ) -> SandboxRef:
        """A sandbox with the task's files in it, or those of `workspace`, within `init_s`."""
        init_s = read_limit(row, "init_s")
        try:
            async with asyncio.timeout(init_s):
                with boundary(SandboxError, FailureCode.SANDBOX_START, "sandbox start"):
                    ref = await self._host.start(owner_of(read_key(row)), "run", spec)
                async with self._host.connect(ref) as sandbox:
                    if workspace is None:
                        await prepare(self._host, env, task, spec, sandbox)
                    else:
                        await self._restore(row, sandbox, workspace)
        except TimeoutError:
            late = f"not ready within init_s = {init_s:g} s"
            raise SandboxError(FailureCode.SANDBOX_START, late) from None
        finally:
            if workspace is not None:
                workspace.unlink(missing_ok=True)
        return ref
