"""What the store asks of the gateway, each request with its reply.

The run is a column of the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from prorl.control.payload import Count, Kind, Payload, Record, Request, Version
from prorl.types import AttemptKey, FailureCode


class RefusalReason(StrEnum):
    """Why the log does not take an attempt."""

    FENCED = "fenced"
    """Superseded, or its rollout has ended."""
    COMMITTED = "committed"
    """This very attempt is durable: ack it."""
    FAILED = "failed"
    """Its row carries a failure that does not train."""
    OPEN = "open"
    """A row of an ended rollout, and the rollout has not ended."""


class Refusal(NamedTuple):
    """An attempt that the log does not take."""

    key: AttemptKey
    reason: RefusalReason


class Done(Payload, frozen=True):
    """Reply to a request that has no other: it took effect."""

    kind = Kind.REPLY


class Problem(Payload, frozen=True, kw_only=True):
    """Why a request did not take effect; the row's `code` says of which sort it is."""

    kind = Kind.REPLY
    message: str = ""
    refused: tuple[Refusal, ...] = ()
    """With code `fenced`."""


class Reserved(Payload, frozen=True, kw_only=True):
    """What became of a `Reserve`."""

    kind = Kind.REPLY
    granted: tuple[AttemptKey, ...] = ()
    refused: tuple[Refusal, ...] = ()


class Reserve(Request[Reserved], frozen=True, kw_only=True):
    """The store is about to write these attempts; from here on a cancellation waits for it."""

    kind, reply = Kind.RESERVE, Reserved
    attempts: tuple[AttemptKey, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PartFile:
    """One immutable file of a table."""

    table: str
    path: str
    """Relative to the run directory."""
    rows: int
    bytes: int
    sha256: str
    first: int = -1
    last: int = -1
    """Its rows are of rollouts from `first` to `last`; -1 where that is not known."""


class TrajectorySummary(Record, frozen=True, kw_only=True):
    """What the log keeps of a committed trajectory besides its reward.

    Columns of `rollouts`, in the log and in the run directory, under these names.
    """

    min_version: Version = -1
    """Of its sampled tokens."""
    max_version: Version = -1
    num_turns: Count = 0
    num_tokens: Count = 0
    num_sampled: Count = 0
    num_trained: Count = 0


class CommittedRollout(Record, frozen=True, kw_only=True):
    """One row of a part, as the log must know it."""

    rollout_id: Count
    attempt: Count
    reward: float | None = None
    failure_code: FailureCode = FailureCode.NONE
    summary: TrajectorySummary = TrajectorySummary()


class Committed(Payload, frozen=True, kw_only=True):
    """Reply to `CommitPart`: the part counts."""

    kind = Kind.REPLY
    commit_seq: int
    """Dense from 1."""


class CommitPart(Request[Committed], frozen=True, kw_only=True):
    """(run): make a part's content count, in one transaction of the log, all of it or nothing.

    The same `part` again gives the same answer. Code `fenced` with `Problem.refused`: nothing was
    committed; leave those rows out and try again as another part.
    """

    kind, reply = Kind.COMMIT, Committed
    part: str
    files: tuple[PartFile, ...] = ()
    rollouts: tuple[CommittedRollout, ...] = ()
    terminals: tuple[Count, ...] = ()
    """Rollouts whose `Terminal` became a row of this part."""
    outbox_upto: Count = 0
    """Every row that the run's outbox had up to it is in this part or an earlier one."""


class PartPublished(Request[Done], frozen=True, kw_only=True):
    """(run): commits/<seq>.json is on disk."""

    kind, reply = Kind.PUBLISHED, Done
    commit_seq: int


class Disowned(Request[Done], frozen=True, kw_only=True):
    """(run): its directory is not the one that the log tells of; nothing of it can be stored."""

    kind, reply = Kind.DISOWNED, Done
    reason: str


class Decision(Record, frozen=True, kw_only=True):
    """What is proposed for a complete group."""

    group_id: Count
    kept: bool
    reason: str = ""
    num_valid: Count = 0
    mean_reward: float | None = None
    """Of the valid members."""
    min_version: Version = -1
    rest: Count = 0
    """Epochs that its task sits out, where the run feeds itself."""
    siblings: Count = 0
    """Rollouts of its task's next groups; 0 = as before."""


class Propose(Request[Done], frozen=True, kw_only=True):
    """(run): the filter's verdicts on complete groups; the first of each stands."""

    kind, reply = Kind.PROPOSE, Done
    decisions: tuple[Decision, ...]


class KeptGroup(NamedTuple):
    """A group that may be handed out."""

    group_id: int
    min_version: int
    num_bytes: int


class Delivered(NamedTuple):
    """A group's place in the delivery order."""

    group_id: int
    delivery_seq: int


class HandedOut(Payload, frozen=True, kw_only=True):
    """What became of the groups of a `Handout`; those that the log does not know are left out."""

    kind = Kind.REPLY
    delivered: tuple[Delivered, ...] = ()
    stale: tuple[int, ...] = ()
    """Too old: nobody gets them."""


class Handout(Request[HandedOut], frozen=True, kw_only=True):
    """(run): give these groups their `delivery_seq`, dense in the order asked for."""

    kind, reply = Kind.HANDOUT, HandedOut
    consumer: str
    groups: tuple[KeptGroup, ...] = ()


class CommitCursor(Request[Done], frozen=True, kw_only=True):
    """(run): everything below `seq` is trained and durable. Code `conflict` when it is ahead."""

    kind, reply = Kind.CURSOR, Done
    consumer: str
    seq: int
