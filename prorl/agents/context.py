"""The protocol of an agent, and the plain record that it gets for one attempt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from prorl.agents.guest_broker import GuestBroker
from prorl.env_state import EnvState
from prorl.journal import AttemptJournal
from prorl.limits import Deadline
from prorl.protocols import Backend, Env, Sandbox
from prorl.renderer.apart import AnyRenderer
from prorl.states import TASK_LINEAGES, Lineage
from prorl.types import (
    FIRST_VERSION,
    AttemptKey,
    Json,
    Message,
    PolicyVersion,
    RolloutLimits,
    SamplingParams,
    Task,
    ToolSpec,
    Trajectory,
)


def _never() -> bool:
    return False


@dataclass(slots=True, kw_only=True)
class AttemptContext:
    """The record that an agent gets of the one attempt that it drives.

    Cancelling: make `cancelled` true, then cancel the task that runs the agent; it returns what it
    has.
    """

    task: Task
    env: Env
    messages: Sequence[Message]
    tools: Sequence[ToolSpec]
    renderer: AnyRenderer
    backend: Backend
    sandbox: Sandbox | None
    deadline: Deadline
    """The deadline of RUN; paused while a backend is paused for new weights."""
    key: AttemptKey
    session: str
    """Rollout key, for prefix caches and sticky routers."""
    cancelled: Callable[[], bool] = field(default=_never)
    sampling: SamplingParams = field(default_factory=SamplingParams)
    limits: RolloutLimits = field(default_factory=RolloutLimits)
    sample_index: int = 0
    run_seed: int = 0
    train: tuple[Lineage, ...] = TASK_LINEAGES
    """Lineages whose sampled ids train."""
    min_version: PolicyVersion = FIRST_VERSION
    journal: AttemptJournal = field(default_factory=AttemptJournal)
    """The journal: what earlier workers of the attempt have recorded, and where this one
    records.
    """
    guest_broker: GuestBroker = field(default_factory=GuestBroker)
    """The broker through which guests take their turns, and those of other hosts their work."""
    renderer_spec: str = ""
    """The spec from which another process makes the same renderer; empty where none can."""
    routed_experts: bool = False
    """True if the backend is asked which experts the tokens go through."""
    state: EnvState = field(default_factory=EnvState)
    """The state that the env remembers of this rollout."""

    @property
    def spent_s(self) -> float:
        """Seconds of the attempt's budget that all of its workers have spent."""
        return self.limits.run_s - self.deadline.remaining_s

    @property
    def seed(self) -> int:
        """Returns the seed of what users' code draws in this attempt."""
        number = self.key.attempt
        return derive_seed(self.run_seed, self.task.task_id, self.sample_index, number, -1)


class Agent(Protocol):
    """Drives the policy through one task; keeps no state beyond (task, turns so far, sandbox)."""

    async def run(self, context: AttemptContext) -> Trajectory:
        """Never raises for what a rollout can suffer: failures are part of the trajectory."""


def derive_seed(
    run_seed: int, task_id: str, sample_index: int, attempt: int, turn: int, part: int = 0
) -> int:
    """63-bit seed of one model call.

    `part` counts the pieces of a turn that weight updates interrupted.

    >>> derive_seed(0, "gsm8k/0", 0, 1, 0) == derive_seed(0, "gsm8k/0", 0, 1, 0)
    True
    >>> derive_seed(0, "gsm8k/0", 0, 1, 0) == derive_seed(0, "gsm8k/0", 1, 1, 0)
    False
    """
    identity: tuple[Json, ...] = (run_seed, task_id, sample_index, attempt, turn, part)
    # repr keeps (1, "23") and (12, "3") apart.
    return (
        int.from_bytes(
            blake2b(repr(identity).encode("utf-8", "replace"), digest_size=8).digest(), "big"
        )
        >> 1
    )
