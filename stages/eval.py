"""EVAL: RAN -> SCORED. Scores the artefact, and nothing but the artefact, in a fresh sandbox. Idempotent: a row may come twice.

A row that failed in RUN with class infra, task or cancelled passes unscored. A grader that fails is `grader_error`: the rollout is
masked, never scored 0. Trouble with the sandbox is tried again here, on the same attempt, `TRIES` times at most and within
`limits.eval_s`; what remains is `eval_failed`. At the end everything that the attempt still has at sandboxd is stopped.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

import pyarrow as pa

from prorl.columns import Lease, read_failure, read_lease, scored_row
from prorl.errors import GraderError, RolloutError, SandboxError, ToolError, boundary
from prorl.limits import Clock, Deadline
from prorl.protocols import Env, SandboxHost
from prorl.stages.host import TRAINS
from prorl.stages.init import GetEnv, needs_sandbox, owner_of
from prorl.types import AttemptKey, Failure, FailureCode, Score, Stage

TRIES = 3

GRACE_S = 10.0
"""After `eval_s`, for an env that keeps its deadline to say so itself."""

NO_FAILURE = Failure(code=FailureCode.NONE)

log = logging.getLogger("prorl.stages")


class EvalOperator:
    """Implements `prorl.protocols.Operator`."""

    stage = Stage.EVAL

    def __init__(self, host: SandboxHost, get_env: GetEnv, *, is_cut: Callable[[AttemptKey], bool], clock: Clock = time.monotonic) -> None:
        self._host, self._get_env, self._is_cut, self._clock = host, get_env, is_cut, clock

    async def __call__(self, row: pa.RecordBatch) -> pa.RecordBatch:
        """Score one row; never raises for what grading can suffer."""
        if read_failure(row).failure_class not in TRAINS:
            return scored_row(row, score=None, failure=NO_FAILURE, eval_s=0.0)
        began = self._clock()
        lease = read_lease(row)
        try:
            score, failure = await self._score(lease, row.column("artefact")[0].as_py()), NO_FAILURE
        except RolloutError as error:
            score, failure = None, Failure(code=error.code, message=error.message)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or not self._is_cut(lease.key):
                raise
            task.uncancel()
            score, failure = None, Failure(code=FailureCode.CANCELLED)
        return scored_row(row, score=score, failure=failure, eval_s=self._clock() - began)

    async def _score(self, lease: Lease, artefact: bytes) -> Score:
        env = self._get_env(lease.task.env)
        deadline = Deadline(lease.limits.eval_s, clock=self._clock)
        try:
            async with asyncio.timeout(lease.limits.eval_s + GRACE_S):
                return await self._tries(env, lease, artefact, deadline)
        except TimeoutError:
            raise RolloutError(FailureCode.EVAL_FAILED, f"not scored within eval_s = {lease.limits.eval_s:g} s") from None
        finally:
            if needs_sandbox(env, lease):
                await asyncio.shield(self._stop(lease))

    async def _tries(self, env: Env, lease: Lease, artefact: bytes, deadline: Deadline) -> Score:
        problems: list[str] = []
        while len(problems) < TRIES and not deadline.expired:
            try:
                return await self._once(env, lease, artefact, deadline)
            except (SandboxError, ToolError) as error:
                log.info("scoring %s again: %s", owner_of(lease.key), error)
                problems.append(str(error))
                await self._stop(lease)
        raise RolloutError(FailureCode.EVAL_FAILED, f"{len(problems)} tries: {'; '.join(problems) or 'no time left'}")

    async def _once(self, env: Env, lease: Lease, artefact: bytes, deadline: Deadline) -> Score:
        spec = env.sandbox(lease.task, Stage.EVAL)
        async with AsyncExitStack() as stack:
            sandbox = None
            if spec is not None:
                ref = await self._host.start(owner_of(lease.key), "eval", spec)
                sandbox = await stack.enter_async_context(self._host.connect(ref))
            with boundary(GraderError, FailureCode.GRADER_ERROR, f"{env.name}.score"):
                return await env.score(lease.task, artefact, sandbox, deadline)

    async def _stop(self, lease: Lease) -> None:
        try:
            await self._host.stop_owner(owner_of(lease.key))
        except RolloutError as error:
            log.warning("cannot stop the sandboxes of %s: %s", owner_of(lease.key), error)

    async def release(self, row: pa.RecordBatch) -> None:
        """Stop what the attempt has; idempotent."""
        lease = read_lease(row)
        if needs_sandbox(self._get_env(lease.task.env), lease):
            await self._stop(lease)
