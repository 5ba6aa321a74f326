"""Tries a task once a node before anything is scored with it.

Where its env can do that (`prorl.protocols.Verifies`). What is wrong with a task is found once and
told to every rollout of it, as `bad_task`; what is wrong with the machine is not remembered.
Bounded by MAX_TASKS.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from hashlib import blake2b

from prorl.errors import GraderError, RolloutError, SandboxError, ToolError, boundary
from prorl.limits import Clock, Deadline
from prorl.protocols import CachedWorkspace, Env, SandboxHost, Verifies
from prorl.stages.operator import prepare
from prorl.task_json import task_to_json
from prorl.types import Failure, FailureClass, FailureCode, Stage, Task

MAX_TASKS = 10_000
TRIES = 3
GRACE_S = 10.0

log = logging.getLogger("prorl.stages")


class _Trial:
    """One task's; the lock is held by the rollout that tries it, the others wait."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.is_done = False
        self.problem: RolloutError | None = None

    def tell(self, limit_s: float) -> None:
        """Raises RolloutError unless the task holds."""
        if not self.is_done:
            raise RolloutError(
                FailureCode.EVAL_FAILED, f"the task could not be tried within {limit_s:g} s"
            )
        if self.problem is not None:
            # a fresh one: an exception that is raised again and again grows its traceback
            raise RolloutError(self.problem.code, self.problem.message)


class Verified:
    def __init__(self, host: SandboxHost, clock: Clock) -> None:
        self._host, self._clock = host, clock
        self._trials: dict[bytes, _Trial] = {}

    async def check(
        self, env: Env, task: Task, owner: str, limit_s: float, stop: Callable[[], Awaitable[None]]
    ) -> None:
        """Return when the task holds. Raises RolloutError.

        The sandbox belongs to `owner`, `stop` ends it; `limit_s` is for one trial.
        """
        if env.sandbox(task, Stage.EVAL) is None or not isinstance(env, Verifies):
            return
        trial = self._trial(task)
        async with trial.lock:
            for _ in range(TRIES):
                if trial.is_done:
                    break
                try:
                    await self._try_within(limit_s, trial, env, task, owner)
                finally:
                    await stop()
        trial.tell(limit_s)

    def _trial(self, task: Task) -> _Trial:
        key = blake2b(task_to_json(task).encode(), digest_size=16).digest()
        found = self._trials.pop(key, None) or _Trial()
        self._trials[key] = found
        while len(self._trials) > MAX_TASKS:
            del self._trials[next(iter(self._trials))]
        return found

    async def _try_within(
        self, limit_s: float, trial: _Trial, env: Env, task: Task, owner: str
    ) -> None:
        """One try; what the machine did to it is logged and no more."""
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                await self._try(trial, env, task, owner, limit_s)
        except (SandboxError, ToolError) as error:
            log.info("trying the task of %s again: %s", owner, error)
        except TimeoutError:
            log.info("trying the task of %s took longer than %g s", owner, limit_s)

    async def _try(self, trial: _Trial, env: Env, task: Task, owner: str, limit_s: float) -> None:
        spec = env.sandbox(task, Stage.EVAL)
        assert spec is not None
        assert isinstance(env, Verifies)
        ref = await self._host.start(owner, "eval", spec)
        async with self._host.connect(ref) as sandbox:
            try:
                if isinstance(env, CachedWorkspace):
                    await prepare(self._host, env, task, spec, sandbox)
                with boundary(GraderError, FailureCode.GRADER_ERROR, f"{env.name}.verify"):
                    await env.verify(task, sandbox, Deadline(limit_s, clock=self._clock))
            except RolloutError as error:
                if Failure(code=error.code).failure_class is not FailureClass.TASK:
                    raise
                trial.problem = error
        trial.is_done = True
