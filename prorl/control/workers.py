"""What every worker says to the gateway, and hears from it.

The ids in brackets are columns of the row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from prorl.control.payload import Count, Kind, Payload, Request, Version
from prorl.types import AttemptKey, RunWeights, Trouble

# ---- up


class Claim(NamedTuple):
    """An attempt, and its life: 0 for the first, one more with each worker that takes it over."""

    run_id: str
    rollout_id: int
    attempt: int
    epoch: int

    @property
    def key(self) -> AttemptKey:
        return AttemptKey(self.run_id, self.rollout_id, self.attempt)


class Hello(Payload, frozen=True, kw_only=True):
    """A worker's first word on a stream: who it is, and the attempts that it still holds."""

    kind = Kind.HELLO
    role: str
    """`init`, `run`, `eval` or `store`."""
    worker: str
    incarnation: str = ""
    """Tells two lives of one name apart; the same on every stream of a life."""
    node: str = ""
    pid: Count = 0
    location: str = ""
    """Where its own edge is served."""
    slots: Count = 1
    schema_version: int
    held: tuple[AttemptKey, ...] = ()
    remote: bool = False
    """On another host than the gateway: a stream that breaks may be the network."""
    resumes: bool = False
    """Keeps a journal: who comes after it under its name goes on with what it held."""
    claims: tuple[Claim, ...] = ()
    """Attempts of an earlier life of its name, with which it can go on."""
    leaving: bool = False
    """It was asked to leave: what it gives back is charged to nobody."""
    images: tuple[str, ...] | None = None
    """NAME=DIGEST of each image that an INIT of another host has; None: it may have any."""
    home: str = ""
    """Of the node's life: rows with sandboxes pass only between workers of one home."""
    died_at: str = ""
    """`run/rollout/attempt` whose step ended the last life of its name, where that is known."""


class Started(Payload, frozen=True):
    """(run, rollout, attempt, stage): this worker took the row."""

    kind = Kind.STARTED


class Progress(Payload, frozen=True, kw_only=True):
    """(run, rollout, attempt, stage): a heartbeat from the work itself."""

    kind = Kind.PROGRESS
    turn: Count
    tokens: Count
    """Sampled so far."""


class Failed(Payload, frozen=True, kw_only=True):
    """(run, rollout, attempt, stage, code): the attempt ended without a valid row."""

    kind = Kind.FAILED
    message: str = ""


class Released(Payload, frozen=True, kw_only=True):
    """(run, rollout, attempt, stage): no longer held, nothing to report."""

    kind = Kind.RELEASED
    returned: bool = False
    """Whoever should have taken it did not come back: charged to nobody."""


class Leaving(Payload, frozen=True, kw_only=True):
    """This worker was asked to leave, by a signal or by its node's own clock.

    It takes nothing new, and what it gives back from here on is charged to nobody.
    """

    kind = Kind.LEAVING
    reason: str = ""


class Served(NamedTuple):
    """Model calls that ended, in tokens and seconds. Sums."""

    prompt: Count = 0
    cached: Count = 0
    """Tokens of prompts that the server's prefix cache had."""
    repeated: Count = 0
    """Tokens of prompts that the rollout had sent or been given before: what a cache can have."""
    reused: Count = 0
    """Those of them that it had."""
    sampled: Count = 0
    """By calls that were timed: those that ended whole."""
    llm_s: float = 0.0

    @property
    def cached_share(self) -> float | None:
        """Of all prompt tokens, those that were cached; None before the first."""
        return self.cached / self.prompt if self.prompt else None

    @property
    def reused_share(self) -> float | None:
        """Of those that a cache can have, those that it had; None before the first."""
        return self.reused / self.repeated if self.repeated else None

    def plus(self, other: Served) -> Served:
        return Served._make(mine + theirs for mine, theirs in zip(self, other, strict=True))

    def since(self, before: Served) -> Served:
        """What came after `before`; all of it where the count began anew."""
        grown = Served._make(mine - theirs for mine, theirs in zip(self, before, strict=True))
        return self if min(grown) < 0 else grown


class Stats(Payload, frozen=True, kw_only=True):
    """(stage): gauges of a worker, each half second."""

    kind = Kind.STATS
    slots: Count = 0
    busy: Count = 0
    queued: Count = 0
    """Finished rows that wait for downstream."""
    done: Count = 0
    failed: Count = 0
    busy_s: float = 0.0
    """Seconds of all slots together."""
    tokens: Count = 0
    """Sampled so far."""
    stalled_s: float = 0.0
    """For how long finished rows have waited since a stream to downstream broke."""
    backends: Mapping[str, Served] = {}
    """RUN: model calls so far by backend."""
    runs: Mapping[str, Served] = {}
    """RUN: the same by run, of those that it worked for lately."""


# ---- down


class Welcome(Payload, frozen=True, kw_only=True):
    """The gateway's answer to `Hello`; `re` is its seq."""

    kind = Kind.WELCOME
    worker: str
    endpoints: Mapping[str, tuple[str, ...]]
    """Locations by role."""
    superseded: bool = False
    """A later life of that name is there: end yourself."""
    refused: tuple[AttemptKey, ...] = ()
    """Attempts that it said it holds, and must stop."""
    adopted: tuple[Claim, ...] = ()
    """Attempts that it claimed and has now, in the life that begins; the others are not its."""
    elsewhere: tuple[AttemptKey, ...] = ()
    """Attempts that it claimed and another worker has: their sandboxes are that worker's."""


class Endpoints(Payload, frozen=True, kw_only=True):
    """Where the workers of each role are, whenever it changes."""

    kind = Kind.ENDPOINTS
    locations: Mapping[str, tuple[str, ...]]


class Cancel(Payload, frozen=True):
    """(run, rollout, attempt): stop it, keep partial turns, say `released` or `failed`."""

    kind = Kind.CANCEL


class Drain(Payload, frozen=True, kw_only=True):
    """Take nothing new; finish what is in hand, or give it back after `deadline_s`; then leave.
    What is finished waits for the store. Said again, the earlier deadline counts.
    """

    kind = Kind.DRAIN
    deadline_s: float | None = None
    """None: everything in hand ends first."""
    reason: str = ""


class VersionPublished(Payload, frozen=True, kw_only=True):
    """(run): newest published policy version, and how to read what servers state of theirs."""

    kind = Kind.VERSION
    version: Version
    weights: RunWeights


class Paused(Payload, frozen=True, kw_only=True):
    """To RUN: a backend takes new weights, or serves again; waiting for it costs no budget."""

    kind = Kind.PAUSED
    backend: str
    paused: bool


# ---- model servers: the gateway assigns; RUN, which makes the calls, knows first that one fails


class Assigned(Payload, frozen=True, kw_only=True):
    """The backend that serves the attempt from here on; the same one when there is no other."""

    kind = Kind.REPLY
    backend: str


class Failover(Request[Assigned], frozen=True, kw_only=True):
    """(run): a model call of this attempt went wrong; which backend goes on with it?

    Answered when there is one, which may take as long as a rollout may wait. Code `fenced`: the
    attempt is superseded or has ended.
    """

    kind, reply = Kind.FAILOVER, Assigned
    attempt: AttemptKey
    backend: str
    """That went wrong; asked again, what stands is answered."""
    trouble: Trouble
    message: str = ""
    faults: Count = 1
    """Calls that went wrong alike, of this worker's last `calls` to that backend."""
    calls: Count = 1
    min_version: Version = 0
    """No backend with older weights may go on."""


class BackendsTold(Payload, frozen=True, kw_only=True):
    """To RUN, on its hello and whenever it changes: what it must know of model servers."""

    kind = Kind.BACKENDS
    gone: tuple[str, ...] = ()
    """Dead or silent: calls that wait for them are given up."""
    keyed: tuple[str, ...] = ()
    """May be sent the key: the operator named them."""
