"""EVAL: RAN -> SCORED.

Scores the artefact, and nothing but the artefact, in a fresh sandbox. Idempotent: a row may come
twice.

Before the first row of a task the task itself is tried once (`verified.py`).

A row that failed in RUN with class infra, task or cancelled passes unscored. A grader that fails is
`grader_error`: the rollout is masked, never scored 0. Trouble with the sandbox is tried again here,
on the same attempt, `TRIES` times at most and within `limits.eval_s`; what remains is
`eval_failed`. At the end everything that the attempt still has at sandboxd is stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import NamedTuple

from prorl.envs.users import GetEnv
from prorl.errors import GraderError, RolloutError, SandboxError, ToolError, boundary
from prorl.limits import Clock, Deadline
from prorl.protocols import CachedWorkspace, Env, SandboxHost
from prorl.schema.columns import read_failure, read_key, read_limit, read_task, scored_columns
from prorl.schema.rows import Added, Row
from prorl.stages.operator import StageOperator, needs_sandbox, owner_of, prepare
from prorl.stages.verified import Verified
from prorl.timing import now
from prorl.types import NO_FAILURE, AttemptKey, Failure, FailureCode, Score, Stage, Task

TRIES = 3

GRACE_S = 10.0
"""After `eval_s`, for an env that keeps its deadline to say so itself."""

log = logging.getLogger("prorl.stages")


class _Job(NamedTuple):
    """What is scored, and until when."""

    env: Env
    task: Task
    owner: str
    artefact: bytes
    deadline: Deadline


class EvalOperator(StageOperator):
    """The operator of EVAL: takes RAN rows and gives SCORED rows."""

    stage = Stage.EVAL

    def __init__(
        self,
        host: SandboxHost,
        get_env: GetEnv,
        *,
        is_cancelled: Callable[[AttemptKey], bool],
        clock: Clock = now,
    ) -> None:
        super().__init__(host, get_env, is_cancelled=is_cancelled, clock=clock)
        self._verified = Verified(host, clock)

    async def __call__(self, row: Row) -> Added:
        """Score one row; never raises for what grading can suffer."""
        if not read_failure(row).failure_class.trains:
            return scored_columns(score=None, failure=NO_FAILURE, eval_s=0.0)
        began = self._clock()
        key = read_key(row)
        score: Score | None = None
        failure = NO_FAILURE
        try:
            score = await self._score(row, key)
        except RolloutError as error:
            failure = Failure(code=error.code, message=error.message)
        except asyncio.CancelledError:
            running = asyncio.current_task()
            if running is None or not self._is_cancelled(key):
                raise
            running.uncancel()
            failure = Failure(code=FailureCode.CANCELLED)
        return scored_columns(score=score, failure=failure, eval_s=self._clock() - began)

    async def _score(self, row: Row, key: AttemptKey) -> Score:
        task, eval_s = read_task(row), read_limit(row, "eval_s")
        env = await self._env(task, eval_s)
        job = _Job(
            env, task, owner_of(key), row.value("artefact"), Deadline(eval_s, clock=self._clock)
        )
        try:
            # in its own time: what is tried once for all siblings is no rollout's to pay
            await self._verified.check(
                env, task, job.owner, 2 * eval_s, lambda: self._stop(job.owner)
            )
            job = job._replace(deadline=Deadline(eval_s, clock=self._clock))
            async with asyncio.timeout(eval_s + GRACE_S):
                return await self._tries(job)
        except TimeoutError:
            raise RolloutError(
                FailureCode.EVAL_FAILED, f"not scored within eval_s = {eval_s:g} s"
            ) from None
        finally:
            if needs_sandbox(env, task):
                await asyncio.shield(self._stop(job.owner))

    async def _tries(self, job: _Job) -> Score:
        problems: list[str] = []
        while len(problems) < TRIES and not job.deadline.expired:
            try:
                return await self._once(job)
            except (SandboxError, ToolError) as error:
                log.info("scoring %s again: %s", job.owner, error)
                problems.append(str(error))
                await self._stop(job.owner)
        raise RolloutError(
            FailureCode.EVAL_FAILED,
            f"{len(problems)} tries: {'; '.join(problems) or 'no time left'}",
        )

    async def _once(self, job: _Job) -> Score:
        spec = job.env.sandbox(job.task, Stage.EVAL)
        async with AsyncExitStack() as stack:
            sandbox = None
            if spec is not None:
                ref = await self._host.start(job.owner, "eval", spec)
                sandbox = await stack.enter_async_context(self._host.connect(ref))
                if isinstance(job.env, CachedWorkspace):
                    await prepare(self._host, job.env, job.task, spec, sandbox)
            with boundary(GraderError, FailureCode.GRADER_ERROR, f"{job.env.name}.score"):
                return await job.env.score(job.task, job.artefact, sandbox, job.deadline)

    async def _stop(self, owner: str) -> None:
        try:
            await self._host.stop_owner(owner)
        except RolloutError as error:
            log.warning("cannot stop the sandboxes of %s: %s", owner, error)
