"""What the operators of INIT, RUN and EVAL have in common: envs, the node's sandboxes, and an end.

An operator works on one row and knows nothing of queues. Besides its work it may declare what it
wants to hear of the control stream (`handlers`), and has a `close`; a worker asks no operator which
stage it is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol

from prorl.columns import read_key, read_task
from prorl.control import Claim, ControlRow, Kind, Payload
from prorl.errors import RolloutError, TaskError
from prorl.flight.inlet import Taken
from prorl.limits import Clock
from prorl.protocols import Env, SandboxHost
from prorl.rows import Added, Row
from prorl.types import AttemptKey, FailureCode, Stage, Task

GetEnv = Callable[[str], Env]

Handler = Callable[[ControlRow], None]


class Emit(Protocol):
    """`ControlClient.emit`: tells the gateway something about an attempt."""

    def __call__(
        self, payload: Payload, key: AttemptKey, *, stage: str, code: str = ""
    ) -> None: ...


def owner_of(key: AttemptKey) -> str:
    """Name of an attempt at sandboxd."""
    return f"{key.run_id}/{key.rollout_id}/{key.attempt}"


def needs_sandbox(env: Env, task: Task) -> bool:
    """Whether any stage of this task runs in a sandbox."""
    return any(env.sandbox(task, stage) is not None for stage in (Stage.RUN, Stage.EVAL))


class StageOperator:
    """Base of the three operators; implements all of `prorl.protocols.Operator` but the work."""

    stage: Stage

    def __init__(
        self,
        host: SandboxHost,
        get_env: GetEnv,
        *,
        is_cancelled: Callable[[AttemptKey], bool] = lambda key: False,
        clock: Clock = time.monotonic,
    ) -> None:
        """`is_cancelled`: whether the attempt that is being worked on was cancelled."""
        self._host, self._get_env, self._clock = host, get_env, clock
        self._is_cancelled = is_cancelled
        self.num_tokens = 0
        """Sampled so far."""

    @property
    def handlers(self) -> Mapping[Kind, Handler]:
        """What it wants to hear of the control stream, besides what its host does."""
        return {}

    async def __call__(self, row: Row) -> Added:
        """Work on one row; see `prorl.protocols.Operator`."""
        raise NotImplementedError

    async def release(self, row: Row) -> None:
        """Stop every sandbox that the attempt has; calling it again does nothing."""
        task = read_task(row)
        if needs_sandbox(self._env(task), task):
            await self._host.stop_owner(owner_of(read_key(row)))

    def _env(self, task: Task) -> Env:
        """The task's env. Raises RolloutError (`unknown_env`)."""
        try:
            return self._get_env(task.env)
        except TaskError as error:
            raise RolloutError(FailureCode.UNKNOWN_ENV, str(error)) from None

    async def open(self) -> None:
        """Prepare the operator before its first row."""

    def expect(self, row: Row) -> None:
        """A row has come; nobody knows yet that it has."""

    def settle(self) -> None:
        """Settle the rows that have come: somebody is about to hear of them.

        Their sender, which then forgets them, or the gateway, which then expects of this worker's
        next life that it knows them.
        """

    def claims(self) -> Iterable[Claim]:
        """Attempts of the worker's last life, with which it can go on."""
        return ()

    def adopted(self, claims: Iterable[Claim], elsewhere: Iterable[AttemptKey]) -> Iterable[Taken]:
        """The gateway has decided which of them it has now, and which others have: its rows."""
        return ()

    def leave(self) -> None:
        """What the worker stops from here on goes to other nodes."""

    def left(self, keys: Iterable[AttemptKey]) -> None:
        """These attempts are no longer in the stage's hands."""

    async def close(self) -> None:
        """Give back what outlives rows; calling it again does nothing."""
