"""RUN: READY -> RAN: the agent drives the policy, in the sandbox that INIT made.

EVAL's sandbox is reserved when RUN starts, so that it is warm when RUN ends. RUN stops the RUN
sandbox in every case, and the reservation too when nothing will be scored. The agent keeps the
budget (`limits.run_s`, paused while a backend takes weights); one that ignores its end is cancelled
`GRACE_S` later. Model calls are reported as `progress`, at most one a second for a row.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from prorl.agents import get_agent
from prorl.agents.context import AttemptContext
from prorl.agents.guest_broker import GuestBroker
from prorl.backends import open_probed
from prorl.control import (
    BackendStatus,
    Claim,
    ControlRow,
    Kind,
    Paused,
    Progress,
    VersionPublished,
)
from prorl.envs.users import GetEnv
from prorl.errors import RolloutError, TaskError, UserError
from prorl.flight.inlet import ReceivedRow
from prorl.flight.queues import wire_bytes
from prorl.journal import AttemptEnd, Journals, Recovered
from prorl.limits import Clock, Deadline
from prorl.linux import crashes
from prorl.network_policy import sandbox_spec, target_of
from prorl.protocols import Backend, Env, ProvidesAgent, SandboxHost
from prorl.renderer.apart import AnyRenderer, open_renderer
from prorl.schema.columns import Lease, ran_columns, read_ready, read_sandbox
from prorl.schema.rows import Added, Row
from prorl.stages.backends import Backends
from prorl.stages.failover import Ask, Routed
from prorl.stages.operator import (
    Emit,
    Handler,
    StageOperator,
    WorkerParts,
    needs_sandbox,
    owner_of,
    refusals_of,
    uncancel_if_attempt_cancelled,
)
from prorl.timing import now
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
from prorl.waits import wait_limit_s

GRACE_S = wait_limit_s("run.grace")

RENDERER_S = wait_limit_s("renderer.make")

PROGRESS_S = 1.0

ALIVE_S = wait_limit_s("sandbox.alive")

log = logging.getLogger("prorl.stages")


class RunOperator(StageOperator):
    """The operator of RUN: takes READY rows and gives RAN rows.

    Backends are opened once per URL and closed by `close`. `ask` finds another for an attempt that
    lost its own; without it a failure ends the attempt.
    """

    stage = Stage.RUN
    can_resume = True

    @classmethod
    def of_worker(cls, parts: WorkerParts) -> RunOperator:
        config = parts.config
        return cls(
            parts.host,
            parts.get_env,
            open_renderer,
            model=config.model,
            api_key=config.backend_key,
            is_cancelled=parts.is_cancelled,
            emit=parts.emit,
            ask=parts.ask,
            journals=Journals(
                config.root / "journal" / parts.name, sync=os.fsync if config.journal_sync else None
            ),
            guest_broker=GuestBroker.of(config, parts.name, parts.waits),
            clear_crashes=lambda key: crashes.clear_crashes(
                config.root / "quarantine", owner_of(key)
            ),
            node=config.node_id,
            worker=parts.process,
        )

    def __init__(
        self,
        host: SandboxHost,
        get_env: GetEnv,
        open_renderer: Callable[[str], Coroutine[Any, Any, AnyRenderer]],
        *,
        model: str = "",
        api_key: str = "",
        is_cancelled: Callable[[AttemptKey], bool],
        emit: Emit,
        ask: Ask | None = None,
        journals: Journals | None = None,
        guest_broker: GuestBroker | None = None,
        clear_crashes: Callable[[AttemptKey], None] = lambda key: None,
        node: str = "",
        worker: str = "",
        clock: Clock = now,
    ) -> None:
        super().__init__(host, get_env, is_cancelled=is_cancelled, clock=clock)
        self._open_renderer, self._model, self._api_key = open_renderer, model, api_key
        self._clear_crashes = clear_crashes
        self._node, self._worker = node, worker
        self._renderers: dict[str, asyncio.Future[AnyRenderer]] = {}
        """The renderers by the runs' specs."""
        self._emit, self._ask = emit, ask
        self._keeps_journals = journals is not None
        self._journals = journals or Journals(Path())
        """Not opened, they keep nothing."""
        self._guest_broker, self._stack = guest_broker or GuestBroker(), AsyncExitStack()
        self._recovered: dict[AttemptKey, Recovered] = {}
        """The attempts that the last incarnation left, until the gateway has said who goes on with
        them.
        """
        self.backends = Backends(self._open, clock, has_key=bool(api_key))
        self.versions: dict[str, tuple[PolicyVersion, RunWeights]] = {}
        """The versions of each run: its newest published version, and how its servers' labels
        read.
        """

    @property
    def waits_for(self) -> Mapping[str, Mapping[str, int]]:
        """Returns how many rows wait for a guest from elsewhere, by run and the guest's name."""
        return self._guest_broker.waits_for

    async def __call__(self, row: Row) -> Added:
        """Play one attempt, from where an earlier worker left it. Raises RolloutError when it
        cannot begin; what happens later is in the row.
        """
        began = self._clock()
        ready = read_ready(row)
        lease = ready.lease
        env = await self._env(lease.task, lease.limits.init_s)
        trajectory: Trajectory | None = None
        journal = self._journals.attempt(lease.key, on_lost_tool_call=lease.on_lost_tool_call)
        spent_s, ended = journal.spent_s, journal.ended is not None
        try:
            renderer = await self._renderer(lease.renderer)
            await self._reserve(env, lease)
            async with AsyncExitStack() as stack:
                sandbox = (
                    await stack.enter_async_context(self._host.connect(ready.sandbox))
                    if ready.sandbox.sandbox_id and not ended
                    else None
                )
                deadline = Deadline(lease.limits.run_s - spent_s, clock=self._clock)
                backend = self._routed(lease, renderer, deadline)
                stack.push_async_callback(backend.close)
                context = AttemptContext(
                    task=lease.task,
                    env=env,
                    messages=ready.prompt,
                    tools=ready.tools,
                    renderer=renderer,
                    backend=backend,
                    sandbox=sandbox,
                    deadline=deadline,
                    key=lease.key,
                    session=lease.rollout_key,
                    cancelled=lambda: self._is_cancelled(lease.key),
                    sampling=lease.sampling,
                    limits=lease.limits,
                    sample_index=lease.sample_index,
                    run_seed=lease.run_seed,
                    min_version=PolicyVersion(lease.min_version),
                    journal=journal,
                    guest_broker=self._guest_broker,
                    routed_experts=lease.keep_routed_experts,
                    train=lease.train,
                    renderer_spec=lease.renderer,
                )
                agent = env.agent if isinstance(env, ProvidesAgent) else lease.agent
                trajectory = await self._drive(agent, context)
            spec = sandbox_spec(env, lease.task, Stage.RUN)
            refusals = await refusals_of(self._host, ready.sandbox, spec)
        finally:
            if ready.sandbox.sandbox_id or needs_sandbox(env, lease.task):
                await asyncio.shield(self._clean(lease.key, ready.sandbox, trajectory))
        if trajectory.failure.failure_class.trains:
            self._clear_crashes(lease.key)
        run_s = spent_s + self._clock() - began
        return ran_columns(
            trajectory,
            run_s=run_s,
            resumes=journal.resumes,
            node=self._node,
            worker=self._worker,
            server=lease.backend,
            refusals=refusals,
        )

    # ---- the journal

    async def open(self) -> None:
        """Let guests in, and read the journals of the last incarnation. An attempt whose sandbox is
        gone is not claimed.
        """
        if self._guest_broker.at is not None:
            from prorl.agents.guest_broker_server import serving  # it brings aiohttp

            await self._stack.enter_async_context(serving(self._guest_broker))
        if not self._keeps_journals:
            return
        recovered = self._journals.open()
        alive = await asyncio.gather(*map(self._is_alive, recovered))
        for attempt, is_alive in zip(recovered, alive, strict=True):
            if is_alive:
                self._recovered[attempt.key] = attempt
            else:
                log.info("%s cannot go on: its sandbox is gone", attempt.key)
                self._journals.refuse(attempt)

    async def _is_alive(self, recovered: Recovered) -> bool:
        ref = read_sandbox(recovered.row)
        ended = [record for record in recovered.records if isinstance(record, AttemptEnd)]
        if not ref.sandbox_id or (ended and ended[-1].artifact is not None):
            return True
        try:
            async with asyncio.timeout(ALIVE_S), self._host.connect(ref):
                return True
        except (RolloutError, TimeoutError):
            return False

    def received(self, row: Row) -> None:
        self._journals.begin(row)

    def claims(self) -> Iterable[Claim]:
        return [Claim(*attempt.key, attempt.resumes) for attempt in self._recovered.values()]

    def adopted(self, claims: Iterable[Claim]) -> Iterable[ReceivedRow]:
        """Returns the rows to go on with, and removes the journals of those that are not ours."""
        resumes = {claim.key: claim.resumes for claim in claims}
        recovered, self._recovered = self._recovered, {}
        rows = []
        for key, attempt in recovered.items():
            if key in resumes:
                self._journals.adopt(attempt, resumes[key])
                rows.append(ReceivedRow(key, attempt.row, wire_bytes(attempt.row.batch)))
                continue
            self._journals.refuse(attempt)
        if recovered:
            log.info("of %d attempts of the last incarnation %d go on", len(recovered), len(rows))
        return rows

    async def _stop(self, key: AttemptKey, stopping: Awaitable[None]) -> None:
        try:
            await stopping
        except RolloutError as error:
            log.warning("cannot stop the sandbox of %s: %s", owner_of(key), error)

    def forget(self, keys: Iterable[AttemptKey]) -> None:
        for key in keys:
            self._journals.drop(key)

    # ---- one attempt

    async def _drive(self, agent: str, context: AttemptContext) -> Trajectory:
        """Run the agent, and cancel it if it outlives its deadline. Returns its trajectory."""
        work = asyncio.ensure_future(get_agent(agent).run(context))
        try:
            while not work.done():
                if context.deadline.expired:
                    await asyncio.wait({work}, timeout=GRACE_S)
                    break
                await asyncio.wait({work}, timeout=max(context.deadline.remaining_s, 0.05))
        except asyncio.CancelledError:
            work.cancel()
            if not uncancel_if_attempt_cancelled(self._is_cancelled(context.key)):
                raise
            await asyncio.wait({work}, timeout=GRACE_S)
        if not work.done():
            work.cancel()
            text = f"agent {agent} went on {GRACE_S:g} s after its end"
            raise RolloutError(FailureCode.STAGE_ERROR, text)
        return work.result()

    async def _renderer(self, spec: str) -> AnyRenderer:
        """The renderer of a run's model, made once for equal specs: a vocabulary takes a second."""
        making = self._renderers.get(spec)
        if making is None or (making.done() and making.exception() is not None):
            making = asyncio.ensure_future(self._open_renderer(spec))
            self._renderers[spec] = making
        try:
            async with asyncio.timeout(RENDERER_S):
                return await asyncio.shield(making)
        except TimeoutError:
            words = f"the renderer was not made within {RENDERER_S:g} s"
            raise RolloutError(FailureCode.STAGE_ERROR, words) from None
        except UserError as error:
            is_users = isinstance(error, TaskError)
            code = FailureCode.BAD_TASK if is_users else FailureCode.STAGE_ERROR
            raise RolloutError(code, f"renderer: {error}") from error

    async def _reserve(self, env: Env, lease: Lease) -> None:
        spec = sandbox_spec(env, lease.task, Stage.EVAL)
        if spec is None:
            return
        try:
            await self._host.reserve(owner_of(lease.key), "eval", spec)
        except RolloutError as error:
            log.info("EVAL will start its sandbox itself: %s", error)

    async def _clean(self, key: AttemptKey, ref: SandboxRef, trajectory: Trajectory | None) -> None:
        """Stop RUN's sandbox, unless EVAL scores in it, and the one reserved for EVAL unless there
        is something to score.
        """
        if trajectory is None or not trajectory.failure.failure_class.trains:
            await self._stop(key, self._host.stop_owner(owner_of(key)))
        elif ref.sandbox_id and trajectory.rescorable:
            await self._stop(key, self._host.stop(ref))

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """Returns the handlers of versions, pauses and dead backends. After a lost connection the
        gateway says all of them again.
        """
        return {
            Kind.WELCOME: lambda row: self.backends.clear_pauses(),
            Kind.VERSION: self._version,
            Kind.PAUSED: self._paused,
            Kind.BACKENDS: self._backend_status,
        }

    def _version(self, row: ControlRow) -> None:
        published = row.read(VersionPublished)
        self.versions[row.run_id] = (PolicyVersion(published.version), published.weights)

    def _paused(self, row: ControlRow) -> None:
        pause = row.read(Paused)
        self.backends.set_paused(pause.backend, pause.paused)

    def _backend_status(self, row: ControlRow) -> None:
        status = row.read(BackendStatus)
        self.backends.update_pool(status.unreachable, status.keyed)

    async def close(self) -> None:
        self._journals.close()
        await self._stack.aclose()
        await self.backends.close()

    async def _open(self, url: str, renderer: AnyRenderer, keyed: bool) -> Backend:
        if (target := target_of(url)) is not None:
            await self._host.close_targets([target])
        return await open_probed(
            url,
            renderer,
            self._get_env,
            model=self._model,
            api_key=self._api_key if keyed else "",
        )

    def _routed(self, lease: Lease, renderer: AnyRenderer, deadline: Deadline) -> Routed:
        run_id = lease.key.run_id
        return Routed(
            self.backends,
            lease.backend,
            key=lease.key,
            deadline=deadline,
            renderer=renderer,
            wait_s=lease.limits.queue_s,
            ask=self._ask,
            current=lambda: self.versions.get(run_id, (FIRST_VERSION, None)),
            count=partial(self._count, _AttemptProgress(self._clock()), lease.key),
        )

    def _count(self, progress: _AttemptProgress, key: AttemptKey, completion: Completion) -> None:
        """A model call of an attempt ended: say so, at most once in `PROGRESS_S`."""
        now, fresh = self._clock(), len(completion.token_ids_C)
        progress.turns += 1
        progress.tokens += fresh
        self.num_tokens += fresh
        if now - progress.at >= PROGRESS_S:
            progress.at = now
            self._emit(Progress(turn=progress.turns, tokens=progress.tokens), key, stage=self.stage)


@dataclass(slots=True)
class _AttemptProgress:
    """The progress of an attempt so far, and when the gateway was last informed."""

    at: float
    turns: int = 0
    tokens: int = 0
