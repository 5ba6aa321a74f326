"""The states of a rollout, its group and its attempt, and why one ends other than well.

Log, columns and views use these names. The class of a failure decides everything that follows:
whether the rollout trains and whether it is tried again. Infrastructure failure is never a reward
of 0; a sandbox that the agent itself broke is never an excuse from the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Stage(StrEnum):
    """The stage that an attempt is in."""

    INIT = "init"
    """A sandbox is made ready."""
    RUN = "run"
    """The policy acts."""
    EVAL = "eval"
    """The artifact is scored in a fresh sandbox."""


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
        """Tells whether the rollout's fate is decided."""
        return self in (RolloutState.COMPLETED, RolloutState.FAILED, RolloutState.CANCELLED)


class GroupState(StrEnum):
    """Life of a group: OPEN -> KEPT or DROPPED; KEPT -> STALE or DELIVERED -> COMMITTED."""

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
    COMMITTED = "committed"
    """The primary consumer committed a cursor beyond it."""


class StopReason(StrEnum):
    """Says why the agent loop ended."""

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


class Lineage(StrEnum):
    """Says which conversation of a rollout a token sequence holds."""

    MAIN = "main"
    """The one that was given the task."""
    SUBAGENT = "subagent"
    """Another with tools: a sub-agent's."""
    AUXILIARY = "auxiliary"
    """One without tools: a title, a summary."""
    COMPACTED = "compacted"
    """The continuation of an earlier conversation after the agent summarised its history."""


TASK_LINEAGES = (Lineage.MAIN, Lineage.COMPACTED)
"""Conversations that work on the task; they train where a run does not say otherwise."""


class FinishReason(StrEnum):
    """Says why one model call ended (vLLM's words)."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class FailureClass(StrEnum):
    """Says who caused it, which decides whether it trains and whether it is tried again."""

    NONE = ""
    """Nothing failed."""
    POLICY = "policy"
    """The policy caused it: the reward stays and it trains."""
    INFRA = "infra"
    """We or the machine caused it: never trains, and is tried again within its own budget, except
    for what EVAL could not score (`UNSCORED`).
    """
    TASK = "task"
    """The task data is wrong: reported, not tried again."""
    CANCELLED = "cancelled"
    """Somebody asked for it."""

    @property
    def trains(self) -> bool:
        """Tells whether a rollout that ended so is scored, committed and trained on."""
        return self is FailureClass.NONE or self is FailureClass.POLICY


class FailureCode(StrEnum):
    """Says what happened. `FAILURE_CLASS` maps each code to its class."""

    NONE = ""
    DEADLINE = "deadline"
    """Model and tool time used up the RUN budget; the artifact is still scored."""
    MAX_TURNS = "max_turns"
    MAX_TOKENS = "max_tokens"
    SANDBOX_BROKEN = "sandbox_broken"
    """The agent killed its own tool server or sandbox."""
    QUEUE_DEADLINE = "queue_deadline"
    """Waiting used up the infrastructure budget."""
    WORKER_LOST = "worker_lost"
    RETURNED = "returned"
    """Its worker was asked to leave and gave the attempt back, or its line broke: charged to
    nobody. Of attempts alone; no rollout ends with it.
    """
    SANDBOX_START = "sandbox_start"
    SANDBOX_LOST = "sandbox_lost"
    TOOL_PROTOCOL = "tool_protocol"
    CALL_UNKNOWN = "call_unknown"
    """A tool call may have run when its worker died, and nobody knows its result."""
    BACKEND_UNAVAILABLE = "backend_unavailable"
    BACKEND_PROTOCOL = "backend_protocol"
    GRADER_ERROR = "grader_error"
    EVAL_FAILED = "eval_failed"
    INVALID_ROW = "invalid_row"
    STAGE_ERROR = "stage_error"
    """An exception in our own code inside a stage."""
    BAD_TASK = "bad_task"
    PROMPT_TOO_LONG = "prompt_too_long"
    """`limits.max_tokens` cannot hold the first prompt; it ends the run, unless `skip_invalid`."""
    UNKNOWN_ENV = "unknown_env"
    CANCELLED = "cancelled"
    REDUNDANT = "redundant"
    """The run had enough informative groups, or it could not change what becomes of its own."""
    STRAGGLER = "straggler"
    """Enough of its siblings had ended, and the time that the others were given was over."""


class BackendFault(StrEnum):
    """Says what is wrong with a model server, as evidence for its health."""

    REFUSED = "refused"
    """Nobody listens there, or the connection broke."""
    SILENT = "silent"
    """Connected, and not a byte."""
    ERROR = "error"
    """It says itself that it failed (HTTP 5xx)."""
    BUSY = "busy"
    """It takes no more just now (HTTP 408, 429, 503)."""
    MALFORMED = "malformed"
    """A reply that cannot be true, or that is not whole."""
    BEHIND = "behind"
    """It serves older weights than it should."""
    DECLINED = "declined"
    """It calls the request wrong (HTTP 4xx): no evidence about the server."""


UNSCORED = frozenset({FailureCode.GRADER_ERROR, FailureCode.BAD_TASK})
"""Codes with which EVAL gives up an artifact for good. The rollout ends as FAILED and its attempt
is stored without a reward: sampling it anew would not mend the grader or the task.
"""

FAILURE_CLASS: Mapping[FailureCode, FailureClass] = {
    FailureCode.NONE: FailureClass.NONE,
    FailureCode.DEADLINE: FailureClass.POLICY,
    FailureCode.MAX_TURNS: FailureClass.POLICY,
    FailureCode.MAX_TOKENS: FailureClass.POLICY,
    FailureCode.SANDBOX_BROKEN: FailureClass.POLICY,
    FailureCode.QUEUE_DEADLINE: FailureClass.INFRA,
    FailureCode.WORKER_LOST: FailureClass.INFRA,
    FailureCode.RETURNED: FailureClass.CANCELLED,
    FailureCode.SANDBOX_START: FailureClass.INFRA,
    FailureCode.SANDBOX_LOST: FailureClass.INFRA,
    FailureCode.TOOL_PROTOCOL: FailureClass.INFRA,
    FailureCode.CALL_UNKNOWN: FailureClass.INFRA,
    FailureCode.BACKEND_UNAVAILABLE: FailureClass.INFRA,
    FailureCode.BACKEND_PROTOCOL: FailureClass.INFRA,
    FailureCode.GRADER_ERROR: FailureClass.INFRA,
    FailureCode.EVAL_FAILED: FailureClass.INFRA,
    FailureCode.INVALID_ROW: FailureClass.INFRA,
    FailureCode.STAGE_ERROR: FailureClass.INFRA,
    FailureCode.BAD_TASK: FailureClass.TASK,
    FailureCode.PROMPT_TOO_LONG: FailureClass.TASK,
    FailureCode.UNKNOWN_ENV: FailureClass.TASK,
    FailureCode.CANCELLED: FailureClass.CANCELLED,
    FailureCode.REDUNDANT: FailureClass.CANCELLED,
    FailureCode.STRAGGLER: FailureClass.CANCELLED,
}
