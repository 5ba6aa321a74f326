"""Where a rollout, its group and its attempt may be, as log, columns and views name it."""

from __future__ import annotations

from enum import StrEnum


class Stage(StrEnum):
    """The stage that an attempt is in."""

    INIT = "init"
    """A sandbox is made ready."""
    RUN = "run"
    """The policy acts."""
    EVAL = "eval"
    """The artefact is scored in a fresh sandbox."""


class RolloutState(StrEnum):
    """Life of a rollout in the control log. The first four are open, the last three terminal."""

    QUEUED = "queued"
    """Accepted, waiting for a lease."""
    LEASED = "leased"
    """An attempt is on its way to INIT or in it."""
    RUNNING = "running"
    """RUN has the attempt; from here EVAL follows without the log's help."""
    RESERVED = "reserved"
    """The store is writing the attempt's part."""
    COMPLETED = "completed"
    """The trajectory is stored and valid."""
    FAILED = "failed"
    """Infrastructure or task failure after the last allowed attempt."""
    CANCELLED = "cancelled"
    """Asked for, or made redundant by the sampler."""

    @property
    def terminal(self) -> bool:
        """Whether the rollout's fate is decided."""
        return self in (RolloutState.COMPLETED, RolloutState.FAILED, RolloutState.CANCELLED)


class GroupState(StrEnum):
    """Life of a group: OPEN -> KEPT or DROPPED; KEPT -> STALE or DELIVERED; DELIVERED -> ACKED."""

    OPEN = "open"
    """Some member is not terminal, or the decision is not logged yet."""
    KEPT = "kept"
    """The filter wants it; the store may serve it."""
    DROPPED = "dropped"
    """The filter does not want it, or it is incomplete; stored, never served by default."""
    STALE = "stale"
    """Too old at hand-out; stored, never served."""
    DELIVERED = "delivered"
    """Has a `delivery_seq`."""
    ACKED = "acked"
    """The primary consumer committed a cursor beyond it."""


class StopReason(StrEnum):
    """Why the agent loop ended."""

    DONE = "done"
    """The policy gave its final answer."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    CONTEXT = "context"
    """A prompt or a tool's output does not fit in `limits.max_tokens`; the failure says what."""
    DEADLINE = "deadline"
    SANDBOX_BROKEN = "sandbox_broken"
    CANCELLED = "cancelled"
    FAILED = "failed"


class FinishReason(StrEnum):
    """Why one model call ended (vLLM's words)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
