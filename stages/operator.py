"""The parts that the operators of INIT, RUN and EVAL share: a task's env, its sandboxes, and what
becomes of a row when its task is cancelled.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from prorl.config import ServiceConfig
from prorl.control import Assigned, Claim, ControlRow, Failover, Kind, Payload
from prorl.envs.users import GetEnv, open_env, users_code
from prorl.errors import RolloutError, SandboxError, TaskError, boundary
from prorl.flight.inlet import ReceivedRow
from prorl.limits import Clock
from prorl.network_policy import NO_NETWORK
from prorl.protocols import CachedWorkspace, Env, Sandbox, SandboxHost
from prorl.schema.columns import read_key, read_task
from prorl.schema.rows import Added, Row
from prorl.timing import now
from prorl.types import (
    AttemptKey,
    Failure,
    FailureCode,
    NetworkRefusal,
    SandboxRef,
    SandboxSpec,
    Stage,
    Task,
)

Handler = Callable[[ControlRow], None]


class Emit(Protocol):
    """`ControlClient.emit`: tells the gateway something about an attempt."""

    def __call__(
        self, payload: Payload, key: AttemptKey, *, stage: str, code: str = ""
    ) -> None: ...


def owner_of(key: AttemptKey) -> str:
    """Name of an attempt at sandboxd."""
    return f"{key.run_id}/{key.rollout_id}/{key.attempt}"


def uncancel_if_attempt_cancelled(is_cancelled: bool) -> bool:
    """Returns whether the attempt was cancelled and not our process; if so, this task goes on."""
    task = asyncio.current_task()
    if not is_cancelled or task is None:
        return False
    task.uncancel()
    return True


def was_cancelled() -> bool:
    """Returns whether somebody asked for this task's end, which may raise CancelledError itself."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def needs_sandbox(env: Env, task: Task) -> bool:
    """Returns whether any stage of this task runs in a sandbox."""
    return any(env.sandbox(task, stage) is not None for stage in (Stage.RUN, Stage.EVAL))


async def refusals_of(
    host: SandboxHost, ref: SandboxRef, *specs: SandboxSpec | None
) -> tuple[NetworkRefusal, ...]:
    """Returns the connections that the network's proxy refused to a sandbox since the last
    question; `specs` are those of the phases that it has played. Nothing where it is gone, for its
    end is told elsewhere.
    """
    if all(spec is None or spec.network_mode == NO_NETWORK for spec in specs):
        return ()
    try:
        return await host.refusals(ref)
    except SandboxError:
        return ()


async def prepare(
    host: SandboxHost, env: Env, task: Task, spec: SandboxSpec, sandbox: Sandbox
) -> None:
    """Put the task's files into a fresh sandbox: once a node for siblings, where that is worth it.

    Raises TaskError, RolloutError.
    """
    text = env.preparation(task) if isinstance(env, CachedWorkspace) else ""

    async def work() -> None:
        with boundary(RolloutError, FailureCode.STAGE_ERROR, f"{env.name}.prepare"):
            await env.prepare(task, sandbox)

    try:
        if text:
            parts = "\0".join((env.name, spec.image, text)).encode("utf-8", "surrogatepass")
            key = hashlib.blake2b(parts, digest_size=16).hexdigest()
            await host.prepare(sandbox, key, work)
        else:
            await work()
    except SandboxError as error:
        if error.code is not FailureCode.SANDBOX_BROKEN:
            raise
        # It did not start: the policy cannot have broken it.
        raise SandboxError(
            FailureCode.SANDBOX_START, f"broke while it was prepared: {error.message}"
        ) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerParts:
    """The parts of a worker that its operator needs."""

    config: ServiceConfig
    name: str
    """The name of the stage in this process, such as `run-0`: of its journal, and its port for
    guests.
    """
    process: str
    """The worker's name at the gateway."""
    host: SandboxHost
    get_env: GetEnv
    is_cancelled: Callable[[AttemptKey], bool]
    emit: Emit
    ask: Callable[[Failover], Awaitable[Assigned]]
    waits: Callable[[AttemptKey, bool], None] = lambda key, waits: None
    """Notes that an attempt waits for somebody outside, or waits no more: it has no slot
    meanwhile.
    """


class StageOperator:
    """Base of the operators; implements all of `prorl.protocols.Operator` but the work."""

    stage: str
    can_resume: ClassVar[bool] = False
    """True if the next incarnation of its worker goes on with the attempts that it held."""

    @classmethod
    def of_worker(cls, parts: WorkerParts) -> StageOperator:
        """Make the operator of a worker. An operator that needs more parts overrides this."""
        return cls(parts.host, parts.get_env, is_cancelled=parts.is_cancelled)

    def __init__(
        self,
        host: SandboxHost,
        get_env: GetEnv,
        *,
        is_cancelled: Callable[[AttemptKey], bool] = lambda key: False,
        clock: Clock = now,
    ) -> None:
        self._host, self._get_env, self._clock = host, get_env, clock
        self._is_cancelled = is_cancelled
        self.num_tokens = 0
        """Sampled so far."""

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """Returns the handlers for the control stream that the operator adds to its host's."""
        return {}

    async def __call__(self, row: Row) -> Added:
        raise NotImplementedError

    def unfinished(self, failure: Failure) -> Added | None:
        """Returns columns for a row that the operator never worked on, so that the next edge takes
        what an earlier stage has made of it. None: there is nothing to keep.
        """
        return None

    async def release(self, row: Row) -> None:
        task = read_task(row)
        if users_code(task) or needs_sandbox(self._get_env(task.env), task):
            await self._host.stop_owner(owner_of(read_key(row)))

    async def _env(self, task: Task, within_s: float) -> Env:
        """The task's env; a user's has checked the task. `within_s`: for its `prepare`.

        Raises RolloutError (`unknown_env`), TaskError.
        """
        try:
            self._get_env(task.env)
        except TaskError as error:
            raise RolloutError(FailureCode.UNKNOWN_ENV, str(error)) from None
        return await open_env(self._get_env, task, within_s)

    async def open(self) -> None:
        """Prepare before the first row, and find what the last incarnation of the worker left."""

    def received(self, row: Row) -> None:
        """Note a row that has come, before its sender or the gateway learns that it has."""

    def claims(self) -> Iterable[Claim]:
        """Returns the attempts of the worker's last incarnation with which this one can go on."""
        return ()

    def adopted(self, claims: Iterable[Claim]) -> Iterable[ReceivedRow]:
        """Returns the rows of those claims that the gateway has left to this worker."""
        return ()

    def forget(self, keys: Iterable[AttemptKey]) -> None:
        """Forgets attempts that are no longer in the stage's hands."""

    async def close(self) -> None:
        """Free what the operator keeps beyond its rows; idempotent."""
