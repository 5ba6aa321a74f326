"""RUN:

READY -> RAN. The agent drives the policy against the backend that the gateway assigned, in the
sandbox that INIT made.

EVAL's sandbox is reserved when RUN starts, so that it is warm when RUN ends. RUN stops the RUN
sandbox in every case, and the reservation too when nothing will be scored. The agent keeps the
budget (`limits.run_s`, paused while a backend takes weights); one that ignores its end is cancelled
`GRACE_S` later. Model calls are reported as `progress`, at most one a second for a row.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import AsyncExitStack

from prorl.agents import get_agent
from prorl.agents.context import AttemptContext
from prorl.backends import open_probed
from prorl.columns import Lease, ran_columns, read_key, read_ready, read_task
from prorl.errors import RolloutError, UserError
from prorl.limits import Clock, Deadline
from prorl.protocols import Backend, Env, Renderer, SandboxHost
from prorl.rows import Added, Row
from prorl.stages.backends import Backends
from prorl.stages.failover import Ask, Routed
from prorl.stages.init import GetEnv, needs_sandbox, owner_of
from prorl.types import (
    FIRST_VERSION,
    AttemptKey,
    Completion,
    FailureCode,
    PolicyVersion,
    RunWeights,
    SandboxRef,
    Stage,
    Trajectory,
)

GRACE_S = 60.0
"""After the deadline: fetching the artefact, a last tool call that ends by itself."""

PROGRESS_S = 1.0

log = logging.getLogger("prorl.stages")

Progress = Callable[[AttemptKey, int, int], None]
"""(attempt, turns, tokens sampled so far)."""


class RunOperator:
    """Implements `prorl.protocols.Operator`.

    Backends are opened once per URL and closed by `close`. `ask` finds another for an attempt that
    lost its own; without it a failure ends the attempt.
    """

    stage = Stage.RUN

    def __init__(
        self,
        host: SandboxHost,
        get_env: GetEnv,
        make_renderer: Callable[[str], Renderer],
        *,
        model: str = "",
        api_key: str = "",
        is_cut: Callable[[AttemptKey], bool],
        progress: Progress,
        ask: Ask | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self._host, self._get_env, self._model, self._api_key = host, get_env, model, api_key
        self._make_renderer = make_renderer
        self._renderers: dict[str, Renderer] = {}
        """By the runs' specs."""
        self._is_cut, self._progress, self._clock = is_cut, progress, clock
        self._loading = asyncio.Lock()
        self._ask = ask
        self.backends = Backends(self._open, clock)
        self.num_tokens = 0
        """Sampled by this worker so far."""
        self.versions: dict[str, tuple[PolicyVersion, RunWeights]] = {}
        """Of each run: its newest published version, and how its servers' labels read."""

    async def __call__(self, row: Row) -> Added:
        """Run one attempt.

        Raises RolloutError when it cannot begin; what happens later is in the row.
        """
        began = self._clock()
        ready = read_ready(row)
        lease = ready.lease
        env = self._get_env(lease.task.env)
        trajectory: Trajectory | None = None
        try:
            renderer = await self._renderer(lease.renderer)
            await self._reserve(env, lease)
            async with AsyncExitStack() as stack:
                sandbox = (
                    await stack.enter_async_context(self._host.connect(ready.sandbox))
                    if ready.sandbox.sandbox_id
                    else None
                )
                deadline = Deadline(lease.limits.run_s, clock=self._clock)
                context = AttemptContext(
                    task=lease.task,
                    env=env,
                    messages=ready.prompt,
                    tools=ready.tools,
                    renderer=renderer,
                    backend=self._routed(lease, renderer, deadline),
                    sandbox=sandbox,
                    deadline=deadline,
                    key=lease.key,
                    session=lease.rollout_key,
                    cancelled=lambda: self._is_cut(lease.key),
                    sampling=lease.sampling,
                    limits=lease.limits,
                    sample_index=lease.sample_index,
                    run_seed=lease.run_seed,
                    min_version=PolicyVersion(lease.min_version),
                )
                trajectory = await self._drive(lease.agent, context)
        finally:
            if needs_sandbox(env, lease.task):
                await asyncio.shield(self._clean(lease.key, ready.sandbox, trajectory))
        return ran_columns(trajectory, run_s=self._clock() - began)

    async def _drive(self, agent: str, context: AttemptContext) -> Trajectory:
        """The agent's trajectory; an agent that outlives its deadline is cut."""
        work = asyncio.ensure_future(get_agent(agent).run(context))
        try:
            while not work.done():
                if context.deadline.expired:
                    await asyncio.wait({work}, timeout=GRACE_S)
                    break
                await asyncio.wait({work}, timeout=max(context.deadline.remaining_s, 0.05))
        except asyncio.CancelledError:
            work.cancel()
            if not self._is_cut(context.key):
                raise
            task = asyncio.current_task()
            assert task is not None
            task.uncancel()
            await asyncio.wait({work}, timeout=GRACE_S)
        if not work.done():
            work.cancel()
            raise RolloutError(
                FailureCode.STAGE_ERROR, f"agent {agent} went on {GRACE_S:g} s after its end"
            )
        return work.result()

    async def _renderer(self, spec: str) -> Renderer:
        """Of a run's model; a vocabulary takes a second to load, so once for equal specs."""
        async with self._loading:  # attempts that begin together wait for one vocabulary
            if spec not in self._renderers:
                try:
                    self._renderers[spec] = await asyncio.to_thread(self._make_renderer, spec)
                except UserError as error:
                    raise RolloutError(FailureCode.STAGE_ERROR, f"renderer: {error}") from error
        return self._renderers[spec]

    async def _reserve(self, env: Env, lease: Lease) -> None:
        spec = env.sandbox(lease.task, Stage.EVAL)
        if spec is None or lease.eval_node not in ("", self._host.node_id):
            return
        try:
            await self._host.reserve(owner_of(lease.key), "eval", spec)
        except RolloutError as error:
            log.info("EVAL will start its sandbox itself: %s", error)

    async def _clean(self, key: AttemptKey, ref: SandboxRef, trajectory: Trajectory | None) -> None:
        """Stop RUN's sandbox, and the one reserved for EVAL unless there is something to score."""
        try:
            if trajectory is None or not trajectory.failure.failure_class.trains:
                await self._host.stop_owner(owner_of(key))
            elif ref.sandbox_id:
                await self._host.stop(ref)
        except RolloutError as error:
            log.warning("cannot stop the sandbox of %s: %s", owner_of(key), error)

    async def release(self, row: Row) -> None:
        """Stop what the attempt has; idempotent."""
        task = read_task(row)
        if needs_sandbox(self._get_env(task.env), task):
            await self._host.stop_owner(owner_of(read_key(row)))

    async def close(self) -> None:
        """Close the backends; idempotent."""
        await self.backends.close()

    async def _open(self, url: str, renderer: Renderer, keyed: bool) -> Backend:
        return await open_probed(
            url,
            renderer,
            self._get_env,
            model=self._model,
            api_key=self._api_key if keyed else "",
        )

    def _routed(self, lease: Lease, renderer: Renderer, deadline: Deadline) -> Routed:
        run_id = lease.key.run_id
        return Routed(
            self.backends,
            lease.backend,
            key=lease.key,
            deadline=deadline,
            renderer=renderer,
            wait_s=lease.limits.queue_s,
            ask=self._ask,
            known=lambda: self.versions.get(run_id, (FIRST_VERSION, None)),
            count=_Progress(self, lease.key, self._progress).count,
        )

    @property
    def clock(self) -> Clock:
        """Monotonic seconds."""
        return self._clock


class _Progress:
    """Counts an attempt's model calls and tokens, and says so now and then."""

    def __init__(self, operator: RunOperator, key: AttemptKey, tell: Progress) -> None:
        self._operator, self._key, self._tell = operator, key, tell
        self._turns = self._tokens = 0
        self._told_at = operator.clock()

    def count(self, completion: Completion) -> None:
        """A model call ended."""
        now, fresh = self._operator.clock(), len(completion.token_ids_C)
        self._turns += 1
        self._tokens += fresh
        self._operator.num_tokens += fresh
        if now - self._told_at >= PROGRESS_S:
            self._told_at = now
            self._tell(self._key, self._turns, self._tokens)
