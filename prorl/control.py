"""The control protocol: events up, commands down, over one `Channel` (path `control`) per process.

Each row carries a frozen record, whose class has a `Kind`; the class of a request also names the
class of its reply. On the wire a payload is a JSON object with the record's field names
(`AttemptKey` and `Refusal` are arrays); a field that has its default may be left out, an unknown
field is refused. Seconds are floats with `_s`; `at` is microseconds since the epoch. Tokens never
travel here.

An event carries a `seq` of its sender, dense from 1 per connection. The gateway answers a request
with `reply` (re = the request's seq, `code` empty or an error code); events have no reply. After a
lost connection a worker dials again and says `hello` with the attempts it still holds; requests
without a reply are sent again (all are idempotent). The gateway treats a closed control channel as
that worker's death at once.

Who holds an attempt: the gateway keeps a set of workers per current attempt. A chain enters at
lease and stays until the commit is acked; a stage in a process of its own enters with its
`started`, the store at `reserve`. A worker leaves when it dies or says `released`. When the set
becomes empty the attempt is lost and the rollout is leased again with attempt + 1; if the last
worker was leaving (`drain`, `leaving`), nobody is charged.

Both ends compare `SCHEMA_VERSION` at `hello`, before anything else of it is read. A payload that is
not what its kind says raises SchemaError where it is read; a request is then answered `invalid`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from operator import attrgetter
from typing import Annotated, Any, ClassVar, Generic, NamedTuple, TypeVar

import msgspec
import pyarrow as pa

from prorl.errors import SchemaError
from prorl.filters import GroupMember
from prorl.schema import CONTROL, check_version
from prorl.types import (
    AttemptKey,
    BackendFault,
    FailureClass,
    FailureCode,
    RolloutState,
    RunWeights,
)

Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A number of things, or an id that counts from 0."""

Version = Annotated[int, msgspec.Meta(ge=-1, le=2**31 - 1)]
"""A policy version; -1 where nothing was sampled."""


class Kind(StrEnum):
    """The kinds of control rows; the record with this `kind` says who sends it and what it
    holds.
    """

    HELLO = "hello"
    STARTED = "started"
    PROGRESS = "progress"
    FAILED = "failed"
    RELEASED = "released"
    LEAVING = "leaving"
    STATS = "stats"
    RESERVE = "reserve"
    COMMIT = "commit"
    PUBLISHED = "published"
    DISOWNED = "disowned"
    PROPOSE = "propose"
    HANDOUT = "handout"
    CURSOR = "cursor"
    FAILOVER = "failover"
    REPLY = "reply"
    WELCOME = "welcome"
    ENDPOINTS = "endpoints"
    CANCEL = "cancel"
    DRAIN = "drain"
    VERSION = "version"
    PAUSED = "paused"
    BACKENDS = "backends"
    RUN = "run"
    ROWS = "rows"
    TERMINAL = "terminal"
    GROUP_COMPLETE = "group_complete"
    STALLED = "stalled"


class ControlRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A JSON object with these fields and no others; fields that have their default are left
    out.
    """


class Payload(ControlRecord, frozen=True):
    kind: ClassVar[Kind]


ReplyT = TypeVar("ReplyT", bound=Payload)


class Request(Payload, Generic[ReplyT], frozen=True):
    """A payload that is answered by one `ReplyT`. Every request may be sent again."""

    reply: ClassVar[type[Payload]]


# ---- up


class Claim(NamedTuple):
    """An attempt, and how many workers have taken it over: 0 for the first worker."""

    run_id: str
    rollout_id: int
    attempt: int
    resumes: int

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.run_id, self.rollout_id, self.attempt)


class Hello(Payload, frozen=True, kw_only=True):
    """The first message of a worker on a stream: who it is, and the attempts that it still
    holds.
    """

    kind = Kind.HELLO
    roles: Mapping[str, Count]
    """Its stages, in order, or `store`; for each the rows that it takes at a time."""
    worker: str
    incarnation: str = ""
    """Tells two processes of one name apart; the same on every stream of one process."""
    node: str = "local"
    host: str = ""
    """Its machine's own name, for people."""
    pid: Count = 0
    location: str = ""
    """The location where its own edges are served."""
    schema_version: int
    in_flight: Mapping[str, tuple[AttemptKey, ...]] = {}
    """The attempts that each of its roles has in hand."""
    remote: bool = False
    """On another host than the gateway: a stream that breaks may be the network."""
    can_resume: bool = False
    """Keeps a journal: who comes after it under its name goes on with what it held."""
    claims: tuple[Claim, ...] = ()
    """Attempts of an earlier incarnation of its name, with which it can go on."""
    leaving: bool = False
    """It was asked to leave: what it gives back is charged to nobody."""
    images: tuple[str, ...] | None = None
    """NAME=DIGEST of each image that a chain of another host has; None: it may have any."""
    home: str = ""
    """The node's incarnation: a death is charged only where what started the worker lives on."""
    fatal_attempt: str = ""
    """`run/rollout/attempt` whose step ended the last incarnation of its name, where that is
    known.
    """


class Started(Payload, frozen=True):
    """(run, rollout, attempt, stage): this worker took the row."""

    kind = Kind.STARTED


class Progress(Payload, frozen=True, kw_only=True):
    """(run, rollout, attempt, stage): a heartbeat from the work itself."""

    kind = Kind.PROGRESS
    turn: Count
    tokens: Count


class Failed(Payload, frozen=True, kw_only=True):
    """(run, rollout, attempt, stage, code): the attempt ended without a valid row."""

    kind = Kind.FAILED
    message: str = ""
    num_sampled: Count = 0
    """Tokens."""


class Released(Payload, frozen=True):
    """(run, rollout, attempt, stage): no longer held, nothing to report."""

    kind = Kind.RELEASED


class Leaving(Payload, frozen=True):
    """This worker was asked to leave, by a signal or by its node's own clock. It takes nothing new,
    and what it gives back from here on is charged to nobody.
    """

    kind = Kind.LEAVING


class CallTotals(NamedTuple):
    """Model calls that ended, in tokens and seconds. Sums."""

    prompt: Count = 0
    cached: Count = 0
    """Tokens of prompts that the server's prefix cache had."""
    reusable: Count = 0
    """Tokens of prompts that the rollout had sent or been given before: what a cache can have."""
    reused: Count = 0
    """The number of those that it had."""
    sampled: Count = 0
    """The tokens that were sampled by calls that were timed: those that ended whole."""
    llm_s: float = 0.0

    @property
    def cached_share(self) -> float | None:
        """Returns the share of all prompt tokens that were cached; None before the first."""
        return self.cached / self.prompt if self.prompt else None

    @property
    def reused_share(self) -> float | None:
        """Returns the share of the cacheable prompt tokens that were cached; None before the
        first.
        """
        return self.reused / self.reusable if self.reusable else None

    def plus(self, other: CallTotals) -> CallTotals:
        return CallTotals._make(mine + theirs for mine, theirs in zip(self, other, strict=True))

    def since(self, before: CallTotals) -> CallTotals:
        """Returns what came after `before`; all of it where the count began anew."""
        grown = CallTotals._make(mine - theirs for mine, theirs in zip(self, before, strict=True))
        return self if min(grown) < 0 else grown


class Stats(Payload, frozen=True, kw_only=True):
    """(stage): gauges of one role of a worker, each half second."""

    kind = Kind.STATS
    slots: Count = 0
    busy: Count = 0
    queued: Count = 0
    """Finished rows that wait for downstream."""
    done: Count = 0
    failed: Count = 0
    busy_s: float = 0.0
    tokens: Count = 0
    stalled_s: float = 0.0
    """For how long finished rows have waited since a stream to downstream broke."""
    sources: Mapping[str, bool] = {}
    """The endpoints that it reads rows from; of each, whether they come without a socket."""
    backends: Mapping[str, CallTotals] = {}
    """RUN: model calls so far by backend."""
    runs: Mapping[str, CallTotals] = {}
    """RUN: the same by run, of those that it worked for lately."""
    waits_for: Mapping[str, Mapping[str, Count]] = {}
    """RUN: rows that wait for a guest from elsewhere, by run and the guest's name."""


# ---- down


class Welcome(Payload, frozen=True, kw_only=True):
    """The gateway's answer to `Hello`; `re` is its seq."""

    kind = Kind.WELCOME
    endpoints: Mapping[str, tuple[str, ...]]
    superseded: bool = False
    """A later incarnation of that name is there: end yourself."""
    refused: tuple[AttemptKey, ...] = ()
    """Attempts that it said it holds, and must stop."""
    adopted: tuple[Claim, ...] = ()
    """Attempts that it claimed and has now, in the incarnation that begins; the others are not
    its.
    """


class Endpoints(Payload, frozen=True, kw_only=True):
    """Tells the store where the last stages of all hosts are, whenever that changes."""

    kind = Kind.ENDPOINTS
    locations: Mapping[str, tuple[str, ...]]


class Cancel(Payload, frozen=True):
    """(run, rollout, attempt): stop it, keep partial turns, say `released` or `failed`."""

    kind = Kind.CANCEL


class Drain(Payload, frozen=True, kw_only=True):
    """Take nothing new; finish what is in hand, or give it back after `deadline_s`; then leave.
    Finished rows wait for the store. When it is repeated, the earlier deadline counts.
    """

    kind = Kind.DRAIN
    deadline_s: float | None = None
    """None: everything in hand ends first."""


class VersionPublished(Payload, frozen=True, kw_only=True):
    """(run): newest published policy version, and how to read what servers state of theirs."""

    kind = Kind.VERSION
    version: Version
    weights: RunWeights


class Paused(Payload, frozen=True, kw_only=True):
    """Tells RUN that a backend takes new weights, or serves again; waiting for it costs no
    budget.
    """

    kind = Kind.PAUSED
    backend: str
    paused: bool


# ---- model servers: the gateway assigns; RUN, which makes the calls, knows first that one fails


class Assigned(Payload, frozen=True, kw_only=True):
    """The backend that serves the attempt from here on; the same one when there is no other."""

    kind = Kind.REPLY
    backend: str


class Failover(Request[Assigned], frozen=True, kw_only=True):
    """(run): a model call of this attempt went wrong; which backend goes on with it? Answered when
    there is one, which may take as long as a rollout may wait. Code `fenced`: the attempt is
    superseded or has ended.
    """

    kind, reply = Kind.FAILOVER, Assigned
    attempt: AttemptKey
    backend: str
    """The backend that went wrong; asked again, what stands is answered."""
    trouble: BackendFault
    message: str = ""
    faults: Count = 1
    """Calls that went wrong alike, of this worker's last `calls` to that backend."""
    calls: Count = 1
    min_version: Version = 0
    """No backend with older weights may go on."""


class BackendStatus(Payload, frozen=True, kw_only=True):
    """Tells RUN the state of model servers, on its hello and whenever it changes."""

    kind = Kind.BACKENDS
    unreachable: tuple[str, ...] = ()
    """Dead or silent: calls that wait for them are given up."""
    keyed: tuple[str, ...] = ()
    """May be sent the key: the operator named them."""


class RefusalReason(StrEnum):
    """Says why the log does not take an attempt."""

    FENCED = "fenced"
    """Superseded, or its rollout has ended."""
    COMMITTED = "committed"
    """This very attempt is durable: ack it."""
    FAILED = "failed"
    """Its row carries a failure that does not train."""
    OPEN = "open"
    """A row of an ended rollout, and the rollout has not ended."""


class Refusal(NamedTuple):
    key: AttemptKey
    reason: RefusalReason


class Done(Payload, frozen=True):
    """Reply to a request that has no other: it took effect."""

    kind = Kind.REPLY


class Problem(Payload, frozen=True, kw_only=True):
    """The reason why a request had no effect; the row's `code` is its error code."""

    kind = Kind.REPLY
    message: str = ""
    refused: tuple[Refusal, ...] = ()
    """With code `fenced`."""


class Reserved(Payload, frozen=True, kw_only=True):
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


class TrajectorySummary(ControlRecord, frozen=True, kw_only=True):
    """Holds what the log keeps of a committed trajectory besides its reward. Columns of `rollouts`,
    in the log and in the run directory, under these names.
    """

    min_version: Version = -1
    """The least version of its sampled tokens."""
    max_version: Version = -1
    num_turns: Count = 0
    num_tokens: Count = 0
    num_sampled: Count = 0
    num_trained: Count = 0


class CommittedRollout(ControlRecord, frozen=True, kw_only=True):
    """The facts about one row of a part that the log keeps."""

    rollout_id: Count
    attempt: Count
    reward: float | None = None
    failure_code: FailureCode = FailureCode.NONE
    failure_message: str = ""
    trace: str = ""
    """The traceback of a grader that failed."""
    summary: TrajectorySummary = TrajectorySummary()


class Committed(Payload, frozen=True, kw_only=True):
    """Reply to `CommitPart`: the part counts."""

    kind = Kind.REPLY
    commit_seq: int
    """Dense from 1."""


class CommitPart(Request[Committed], frozen=True, kw_only=True):
    """(run): make a part's content count, in one transaction of the log, all of it or nothing. The
    same `part` again gives the same answer. Code `fenced` with `Problem.refused`: nothing was
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


class RunRejected(Request[Done], frozen=True, kw_only=True):
    """(run): its directory is not the one that the log expects; nothing of it can be stored."""

    kind, reply = Kind.DISOWNED, Done
    reason: str


class Decision(ControlRecord, frozen=True, kw_only=True):
    group_id: Count
    kept: bool
    reason: str = ""
    num_valid: Count = 0
    mean_reward: float | None = None
    """The mean reward of the valid members."""
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
    group_id: int
    min_version: int


class Delivered(NamedTuple):
    group_id: int
    delivery_seq: int


class HandedOut(Payload, frozen=True, kw_only=True):
    """Holds what became of the groups of a `Handout`; those that the log does not know are left
    out.
    """

    kind = Kind.REPLY
    delivered: tuple[Delivered, ...] = ()
    stale: tuple[int, ...] = ()
    """Too old: nobody gets them."""


class Handout(Request[HandedOut], frozen=True, kw_only=True):
    """(run): give these groups their `delivery_seq`, dense in the order asked for."""

    kind, reply = Kind.HANDOUT, HandedOut
    groups: tuple[KeptGroup, ...] = ()


class CommitCursor(Request[Done], frozen=True, kw_only=True):
    """(run): everything below `seq` is trained and durable. Code `conflict` when it is ahead."""

    kind, reply = Kind.CURSOR, Done
    consumer: str
    seq: int


class TaskRow(ControlRecord, frozen=True, kw_only=True):
    """A row of `tasks`: an accepted group."""

    group_id: Count
    task_id: str
    data_source: str
    env: str
    n: Count
    task: str
    sampling: str
    extra: str


class GroupEventRow(ControlRecord, frozen=True, kw_only=True):
    """One row of the table `groups`, for the store to write."""

    event_seq: Count
    group_id: Count
    event: str
    """`decided`, `delivered` or `stale`."""
    kept: bool
    reason: str
    delivery_seq: int
    """-1 unless delivered."""
    num_members: Count
    num_valid: Count
    min_version: Version
    mean_reward: float | None
    event_at: int


class AttemptRow(ControlRecord, frozen=True, kw_only=True):
    """A row of `attempts`: an attempt that began and did not commit."""

    rollout_id: Count
    group_id: Count
    attempt: Count
    stage: str
    worker: str
    node: str
    server: str
    failure_class: FailureClass
    failure_code: FailureCode
    failure_message: str
    seconds: float
    num_sampled: Count
    ended_at: int


class Rows(Payload, frozen=True, kw_only=True):
    """(run): new rows of `tasks`, `groups` and `attempts`."""

    kind = Kind.ROWS
    tasks: tuple[TaskRow, ...] = ()
    events: tuple[GroupEventRow, ...] = ()
    attempts: tuple[AttemptRow, ...] = ()


class Terminal(Payload, frozen=True, kw_only=True):
    """(run, group): a rollout that ended without a stored trajectory; write its row."""

    kind = Kind.TERMINAL
    rollout_id: Count
    group_id: Count
    sample_index: Count
    rollout_key: str
    attempt: Count
    status: RolloutState
    failure_class: FailureClass
    failure_code: FailureCode
    failure_message: str = ""
    task_id: str
    data_source: str
    env: str
    agent: str
    queue_s: float
    extra: str
    worker: str = ""
    node: str = ""
    server: str = ""


class GroupComplete(Payload, frozen=True, kw_only=True):
    """(run, group): every member is terminal; propose a decision."""

    kind = Kind.GROUP_COMPLETE
    group_id: Count
    task_id: str
    members: tuple[GroupMember, ...]


class Stalled(Payload, frozen=True, kw_only=True):
    """(run): why it has no new rows: it is stalled or idle; empty when it moves again."""

    kind = Kind.STALLED
    reason: str


class Unpublished(ControlRecord, frozen=True, kw_only=True):
    commit_seq: int
    part: str
    files: tuple[PartFile, ...]


class RunNews(Payload, frozen=True, kw_only=True):
    """(run): the state of a run, sent before anything else about it and again when it ends. What
    must be written and decided follows, in the order of the outbox.
    """

    kind = Kind.RUN
    filter: str
    """A filter's name, or its SQL."""
    delivery: str
    group_size: Count
    state: str
    """`open` or `finished`: no group is open any more and everything is stored."""
    cursors: Mapping[str, int] = {}
    unpublished: tuple[Unpublished, ...] = ()
    num_commits: Count = 0
    """The number of commits that the log knows. Files that neither `unpublished` nor a commit on
    disk names are orphans.
    """


PayloadT = TypeVar("PayloadT", bound=Payload)

_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class ControlRow:
    """One event or command, in the order of `CONTROL` but for `kind`. A payload is checked when it
    is read, so that unread rows cost nothing.
    """

    kind: Kind
    seq: int = 0
    re: int = 0
    run_id: str = ""
    rollout_id: int = -1
    group_id: int = -1
    attempt: int = -1
    stage: str = ""
    code: str = ""
    payload: str = "{}"

    @classmethod
    def of(cls, payload: Payload, **columns: Any) -> ControlRow:
        """A row that carries `payload`; `columns`: the other fields."""
        return cls(kind=payload.kind, payload=_encode(payload).decode(), **columns)

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.run_id, self.rollout_id, self.attempt)

    def read(self, record: type[PayloadT]) -> PayloadT:
        """The payload. Raises SchemaError when it is not a `record`."""
        assert record.kind is self.kind, f"{record.__name__} of a {self.kind} row"
        try:
            payload: PayloadT = _decoder(record).decode(self.payload)
            return payload
        except msgspec.DecodeError as error:
            raise SchemaError(
                f"the payload of a {self.kind.value!r} row: {error}: {self.payload[:200]}",
                f"{record.__name__} with {', '.join(record.__struct_fields__) or 'no fields'}",
            ) from None

    def read_hello(self, where: str) -> Hello:
        """The payload of a `hello`. Raises SchemaError for a peer of another version, whatever else
        it says.
        """
        try:
            versioned = _versions.decode(self.payload)
        except msgspec.DecodeError:
            versioned = _Versioned()
        check_version(versioned.schema_version, where)
        return self.read(Hello)


class _Versioned(msgspec.Struct):
    """All that is read of a hello before its version is known."""

    schema_version: int | None = None


_versions = msgspec.json.Decoder(_Versioned)


@cache
def _decoder(record: type[PayloadT]) -> msgspec.json.Decoder[PayloadT]:
    return msgspec.json.Decoder(record)


_STRUCT = pa.struct(list(CONTROL))
_values = attrgetter(*CONTROL.names)


def to_batch(rows: Iterable[ControlRow]) -> pa.RecordBatch:
    values = pa.array([_values(row) for row in rows], _STRUCT)
    return pa.RecordBatch.from_arrays(values.flatten(), schema=CONTROL)


def from_batch(batch: pa.RecordBatch | tuple[ControlRow, ...]) -> Sequence[ControlRow]:
    """The rows of a batch in order; a tuple is what `send_rows` has sent within one process. Raises
    ValueError for an unknown kind.
    """
    if isinstance(batch, tuple):
        return batch
    seq, re, kind, *others = (column.to_pylist() for column in batch.columns)
    return [ControlRow(*row) for row in zip(map(Kind, kind), seq, re, *others, strict=True)]


REQUESTS = frozenset(request.kind for request in Request.__subclasses__())
