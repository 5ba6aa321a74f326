"""EVAL: RAN -> SCORED: the artifact, and nothing else, in a fresh sandbox. A row may come twice.

A row that is not `rescorable` has no artifact: it was too large, and is scored in the agent's own
sandbox, which RUN has left running. What keeps that from a verdict ends the attempt (`eval_failed`,
and a new one begins), for nothing is left that could be graded later.

A row that failed in RUN with class infra, task or cancelled passes unscored. A grader that fails,
or is not ready within `limits.eval_s`, is asked again here with the same artifact: after each of
`RETRY_DELAYS_S`, with `eval_s` anew each time, as long as fewer than two `eval_s` are spent. What
it still cannot score is `grader_error`, never 0: such a row is stored with its sequences and
without a reward, and nothing is sampled anew (`UNSCORED`).

Trouble with the sandbox is tried again, too, at most `TRIES` times each time the grader is asked;
what remains is `eval_failed`, which another attempt may mend on another node. At the end everything
that the attempt still has at sandboxd is stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from typing import NamedTuple

from prorl.env_state import EnvState, bound
from prorl.envs.users import GetEnv, users_code
from prorl.errors import (
    GraderError,
    RolloutError,
    SandboxError,
    ToolError,
    UserError,
    boundary,
)
from prorl.limits import Clock, Deadline
from prorl.network_policy import NetworkPolicy, sandbox_spec
from prorl.plugins import version_of
from prorl.protocols import (
    CachedWorkspace,
    Env,
    Sandbox,
    SandboxHost,
    ScoresInPlace,
    SupportsTaskVerification,
)
from prorl.schema.columns import (
    read_failure,
    read_key,
    read_limit,
    read_sandbox,
    read_task,
    scored_columns,
)
from prorl.schema.rows import Added, Row
from prorl.stages.operator import (
    StageOperator,
    needs_sandbox,
    owner_of,
    prepare,
    refusals_of,
    uncancel_if_attempt_cancelled,
)
from prorl.task_json import task_to_json
from prorl.timing import now
from prorl.types import (
    NO_FAILURE,
    AttemptKey,
    Failure,
    FailureClass,
    FailureCode,
    NetworkRefusal,
    SandboxRef,
    SandboxSpec,
    Score,
    Stage,
    Task,
)
from prorl.waits import wait_limit_s

MAX_TASKS = 10_000
TRIES = 3
"""The tries of a task's trial: the reference of a sound task may fail once, on a busy machine."""
MAX_REFUSALS = 64
"""Hosts that a row names; one sandbox gives 33 at most (`sandbox/node/proxy.py`)."""

RETRY_DELAYS_S = (1.0, 4.0, 16.0)
"""Waits before a grader that failed is called again: a judge over HTTP may be away for some
seconds. The row keeps its slot meanwhile, so that RUN waits and artifacts do not pile up.
"""

GRACE_S = wait_limit_s("eval.grace")

FLOAT32_MAX = 3.4028234e38

log = logging.getLogger("prorl.stages")


class _Trial:
    """The trial of one task. The rollout that tries the task has the lock; its siblings wait."""

    def __init__(self) -> None:
        self.lock = asyncio.Lock()
        self.is_done = False
        self.problem: RolloutError | None = None

    def check(self, limit_s: float) -> None:
        """Raise RolloutError unless the trial has shown that the task is sound."""
        if not self.is_done:
            raise RolloutError(
                FailureCode.EVAL_FAILED, f"the task could not be tried within {limit_s:g} s"
            )
        if self.problem is not None:
            # a fresh one: an exception that is raised again and again grows its traceback
            raise RolloutError(self.problem.code, self.problem.message)


class TaskVerifier:
    """Tries each task once on this node before a rollout of it is scored, if its env can do that
    (`SupportsTaskVerification`).

    A fault of the task ends every rollout of it as `bad_task`; a fault of the machine is not
    remembered. Bounded by MAX_TASKS.
    """

    def __init__(self, host: SandboxHost, clock: Clock) -> None:
        self._host, self._clock = host, clock
        self._trials: dict[bytes, _Trial] = {}

    async def check(self, env: Env, task: Task, owner: str, limit_s: float) -> None:
        """Return when the task is sound. Raises RolloutError.

        The sandbox belongs to `owner`, which ends it if this is cancelled; `limit_s` is for one
        trial.
        """
        if sandbox_spec(env, task, Stage.EVAL) is None or not isinstance(
            env, SupportsTaskVerification
        ):
            return
        trial = self._trial(task)
        async with trial.lock:
            for _ in range(TRIES):
                if trial.is_done:
                    break
                await self._try_within(limit_s, trial, env, task, owner)
        trial.check(limit_s)

    def _trial(self, task: Task) -> _Trial:
        key = blake2b(task_to_json(task).encode(), digest_size=16).digest()
        trial = self._trials.pop(key, None) or _Trial()
        self._trials[key] = trial
        while len(self._trials) > MAX_TASKS:
            del self._trials[next(iter(self._trials))]
        return trial

    async def _try_within(
        self, limit_s: float, trial: _Trial, env: Env, task: Task, owner: str
    ) -> None:
        """Try the task once; a fault of the machine is logged, and the caller tries again."""
        try:
            async with asyncio.timeout(limit_s + GRACE_S):
                await self._try(trial, env, task, owner, limit_s)
        except (SandboxError, ToolError) as error:
            log.info("trying the task of %s again: %s", owner, error)
        except TimeoutError:
            log.info("trying the task of %s took longer than %g s", owner, limit_s)

    async def _try(self, trial: _Trial, env: Env, task: Task, owner: str, limit_s: float) -> None:
        spec = sandbox_spec(env, task, Stage.EVAL)
        assert spec is not None
        ref = await self._host.start(owner, "eval", spec)
        try:
            async with self._host.connect(ref) as sandbox:
                await self._try_in(sandbox, trial, env, task, spec, limit_s)
        finally:
            await self._host.stop(ref)
        trial.is_done = True

    async def _try_in(
        self,
        sandbox: Sandbox,
        trial: _Trial,
        env: Env,
        task: Task,
        spec: SandboxSpec,
        limit_s: float,
    ) -> None:
        assert isinstance(env, SupportsTaskVerification)
        try:
            if isinstance(env, CachedWorkspace):
                await prepare(self._host, env, task, spec, sandbox)
            with boundary(GraderError, FailureCode.GRADER_ERROR, f"{env.name}.verify"):
                await env.verify(task, sandbox, Deadline(limit_s, clock=self._clock))
        except RolloutError as error:
            if Failure(code=error.code).failure_class is not FailureClass.TASK:
                raise
            trial.problem = error


class _Job(NamedTuple):
    """The job of scoring one row, and its deadline."""

    env: Env
    task: Task
    owner: str
    artifact: bytes
    state: EnvState
    eval_s: float
    in_place: SandboxRef | None
    """RUN's sandbox, where what is scored lies in it and crosses as no artifact."""
    refusals: list[NetworkRefusal]
    """The hosts that the network's proxy refused, the last MAX_REFUSALS of all tries."""


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
        retry_delays_s: Sequence[float] = RETRY_DELAYS_S,
    ) -> None:
        super().__init__(host, get_env, is_cancelled=is_cancelled, clock=clock)
        self._task_verifier = TaskVerifier(host, clock)
        self._retry_delays_s = retry_delays_s

    async def __call__(self, row: Row) -> Added:
        """Score one row; never raises for what grading can suffer."""
        if not read_failure(row).failure_class.trains:
            return scored_columns(score=None, failure=NO_FAILURE, eval_s=0.0)
        began = self._clock()
        key = read_key(row)
        score: Score | None = None
        failure, trace, env_sha256 = NO_FAILURE, "", ""
        refusals: list[NetworkRefusal] = []
        try:
            with boundary(RolloutError, FailureCode.STAGE_ERROR, "EVAL"):
                task = read_task(row)
                env_sha256 = version_of(users_code(task))
                score = await self._score(row, task, key, refusals)
        except RolloutError as error:
            failure = Failure(code=error.code, message=error.message)
            trace = error.log if isinstance(error, GraderError) else ""
        except UserError as error:
            failure = Failure(code=FailureCode.BAD_TASK, message=str(error))
        except asyncio.CancelledError:
            if not uncancel_if_attempt_cancelled(self._is_cancelled(key)):
                raise
            failure = Failure(code=FailureCode.CANCELLED)
        eval_s = self._clock() - began
        return scored_columns(
            score=score,
            failure=failure,
            eval_s=eval_s,
            trace=trace,
            env_sha256=env_sha256,
            refusals=tuple(refusals),
        )

    def unfinished(self, failure: Failure) -> Added:
        return scored_columns(score=None, failure=failure, eval_s=0.0)

    async def _score(
        self, row: Row, task: Task, key: AttemptKey, refusals: list[NetworkRefusal]
    ) -> Score:
        eval_s = read_limit(row, "eval_s")
        env = await self._env(task, eval_s)
        owner = owner_of(key)
        try:
            # in its own time: a trial for all siblings is not charged to one of them
            await self._task_verifier.check(env, task, owner, 2 * eval_s)
            in_place = None if row.value("rescorable") else read_sandbox(row)
            state = EnvState(text=row.value("env_state"))
            artifact = row.value("artifact")
            job = _Job(env, task, owner, artifact, state, eval_s, in_place, refusals)
            try:
                return await self._ask_grader(job)
            except GraderError as error:
                if in_place is None or error.code is not FailureCode.GRADER_ERROR:
                    raise
                text = f"not scored while its sandbox was there: {error.message}"
                raise RolloutError(FailureCode.EVAL_FAILED, text) from error
        finally:
            if needs_sandbox(env, task):
                await asyncio.shield(self._stop(owner))

    async def _ask_grader(self, job: _Job) -> Score:
        """Raises GraderError for what it cannot score, also when it is asked again; RolloutError
        for what is not the grader's doing.
        """
        began = self._clock()
        for delay_s in (*self._retry_delays_s, None):
            try:
                async with asyncio.timeout(job.eval_s + GRACE_S):
                    return await self._score_with_retries(
                        job, Deadline(job.eval_s, clock=self._clock)
                    )
            except TimeoutError:
                text = f"not scored within eval_s = {job.eval_s:g} s"
                problem = GraderError(FailureCode.GRADER_ERROR, text)
            except GraderError as error:
                problem = error
            is_final = problem.code is not FailureCode.GRADER_ERROR  # it will say the same again
            if is_final or delay_s is None or self._clock() - began >= 2 * job.eval_s:
                raise problem
            log.info("asking the grader of %s again in %g s: %s", job.owner, delay_s, problem)
            await self._stop_fresh(job)
            await asyncio.sleep(delay_s)
        raise AssertionError

    async def _score_with_retries(self, job: _Job, deadline: Deadline) -> Score:
        problems: list[str] = []
        while len(problems) < TRIES and not deadline.expired:
            try:
                return await self._score_once(job, deadline)
            except (SandboxError, ToolError) as error:
                log.info("scoring %s again: %s", job.owner, error)
                problems.append(str(error))
                await self._stop_fresh(job)
        raise RolloutError(
            FailureCode.EVAL_FAILED,
            f"{len(problems)} tries: {'; '.join(problems) or 'no time left'}",
        )

    async def _score_once(self, job: _Job, deadline: Deadline) -> Score:
        spec = sandbox_spec(job.env, job.task, Stage.EVAL)
        async with AsyncExitStack() as stack:
            sandbox = None
            if spec is not None:
                ref = await self._host.start(job.owner, "eval", spec)
                if job.in_place is not None:
                    stack.push_async_callback(self._host.stop, ref)
                sandbox = await stack.enter_async_context(self._host.connect(ref))
                if isinstance(job.env, CachedWorkspace):
                    await prepare(self._host, job.env, job.task, spec, sandbox)
                stack.push_async_callback(self._keep_refusals, job, ref, spec)
            agents = None
            if job.in_place is not None:
                agents = await stack.enter_async_context(self._host.connect(job.in_place))
                agents_spec = sandbox_spec(job.env, job.task, Stage.RUN)
                if spec is not None and agents_spec is not None and spec.image == agents_spec.image:
                    await self._set_network(job.in_place, agents_spec, spec)
                    specs = agents_spec, spec
                    stack.push_async_callback(self._keep_refusals, job, job.in_place, *specs)
            label = f"{job.env.name}.score"
            with boundary(GraderError, FailureCode.GRADER_ERROR, label), bound(job.state):
                if agents is None:
                    score = await job.env.score(job.task, job.artifact, sandbox, deadline)
                else:
                    assert isinstance(job.env, ScoresInPlace)
                    assert sandbox is not None
                    score = await job.env.score_in_place(job.task, agents, sandbox, deadline)
            _check(score, job.env.name)
            return score

    async def _set_network(self, ref: SandboxRef, before: SandboxSpec, spec: SandboxSpec) -> None:
        """Give the agent's sandbox the verifier's network, where the tests run in its image."""
        network = NetworkPolicy(spec.network_mode, spec.allowed_hosts)
        if network != (before.network_mode, before.allowed_hosts):
            await self._host.set_network(ref, network)

    async def _keep_refusals(self, job: _Job, ref: SandboxRef, *specs: SandboxSpec | None) -> None:
        job.refusals.extend(await refusals_of(self._host, ref, *specs))
        del job.refusals[:-MAX_REFUSALS]

    async def _stop_fresh(self, job: _Job) -> None:
        """Stop what a try has started; where the agent's sandbox is graded, that stays."""
        if job.in_place is None and job.env.sandbox(job.task, Stage.EVAL) is not None:
            await self._stop(job.owner)

    async def _stop(self, owner: str) -> None:
        try:
            await self._host.stop_owner(owner)
        except RolloutError as error:
            log.warning("cannot stop the sandboxes of %s: %s", owner, error)


def _check(score: Score, env: str) -> None:
    """Raises GraderError for a reward that no float32 holds: the next try would give it again."""
    parts = (number for part in score.parts for number in (part.value, part.weight))
    numbers = (score.reward, *parts)
    if not all(abs(number) <= FLOAT32_MAX for number in numbers):
        raise GraderError(
            FailureCode.BAD_TASK,
            f"{env}.score gave {score.reward:g}; expected numbers that a float32 holds",
        )
