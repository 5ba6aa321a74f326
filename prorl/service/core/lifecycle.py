"""The lifecycle as a table: (state, event) -> (state, actions). Pure: no I/O, no clock, no queue.

Everything else in the gateway exists to bring events here and to carry the actions out, after they
are durable.

    QUEUED --lease--> LEASED --started_run--> RUNNING --reserve--> RESERVED --commit--> COMPLETED
      ^                 |                        |                     |
      +- retry, return -+------------------------+---------------------+

    RESERVED --commit--> FAILED            where EVAL could not score the rollout
    LEASED to RESERVED --> FAILED          when the budget for retries is used up
    any open state --cancel--> CANCELLED   from RESERVED only once the store lets go of it: a
                                           commit in flight wins

Rules that the table alone enforces:
- An event that names another attempt than the current one changes nothing and answers FENCE.
- A terminal state never changes.
- Infrastructure failures and deaths of our own workers are counted apart; either budget ends the
  rollout as FAILED.
- An attempt that is returned (its worker left in order, its connection broke) counts nowhere.
- Only LEASE raises `attempt`, by one; only ADOPT raises `resumes`, and charges nothing.

A group: OPEN -> KEPT | DROPPED (first decision stands) -> DELIVERED | STALE (first hand-out stands)
-> COMMITTED.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType

from prorl.types import FAILURE_CLASS, FailureClass, FailureCode, GroupState, RolloutState


class EventKind(StrEnum):
    LEASE = "lease"
    STARTED_RUN = "started_run"
    RESERVE = "reserve"
    UNRESERVE = "unreserve"
    """The store that reserved it is gone or gave up; another holder still has the row."""
    COMMIT = "commit"
    """The part that holds it is durable."""
    FAILED = "failed"
    LOST = "lost"
    """No worker holds the attempt any more."""
    RETURN = "return"
    """Its worker was asked to leave and gives it back: nobody is to blame."""
    CANCEL = "cancel"
    """Asked for, or redundant."""
    EXPIRE = "expire"
    """The waiting budget is used up."""
    ADOPT = "adopt"
    """Another worker goes on with the attempt from its journal."""


class Action(StrEnum):
    """Says what the gateway must do once the new state is durable."""

    GRANT = "grant"
    REQUEUE = "requeue"
    CANCEL_ATTEMPT = "cancel_attempt"
    FENCE = "fence"
    """Refuse: the sender works on an attempt that is superseded or decided."""
    STORE_TERMINAL = "store_terminal"
    """Ask the store for a row: the rollout ended without a committed trajectory."""
    RELEASE = "release"
    """Give back what the rollout held: backend slot, place in the pipeline."""
    CHECK_GROUP = "check_group"
    """A member became terminal: is the group complete?"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """One thing that happened to an attempt. `attempt` is -1 for events that are about the rollout
    itself (LEASE, CANCEL, EXPIRE).
    """

    kind: EventKind
    attempt: int = -1
    code: FailureCode = FailureCode.NONE
    resumes: int = 0
    """ADOPT: the journal's count, which may be more than a restarted gateway remembers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutLife:
    """Holds what the log knows of a rollout's fate."""

    state: RolloutState = RolloutState.QUEUED
    attempt: int = 0
    """0 before the first lease."""
    resumes: int = 0
    """The number of workers that have taken the attempt over."""
    infra_failures: int = 0
    worker_losses: int = 0
    code: FailureCode = FailureCode.NONE
    """The code of the last failure, or of the end."""
    cancel_code: FailureCode = FailureCode.NONE
    """A cancellation that waits for the store to let go."""
    max_attempts: int
    max_worker_losses: int

    @property
    def failure_class(self) -> FailureClass:
        return FAILURE_CLASS[self.code]


Step = tuple[RolloutLife, tuple[Action, ...]]

Rule = Callable[[RolloutLife, Event], Step]

_ENDED = (Action.RELEASE, Action.STORE_TERMINAL, Action.CHECK_GROUP)


def _end(life: RolloutLife, state: RolloutState, code: FailureCode, *first: Action) -> Step:
    return replace(life, state=state, code=code), (*first, *_ENDED)


def _lease(life: RolloutLife, event: Event) -> Step:
    leased = replace(life, state=RolloutState.LEASED, attempt=life.attempt + 1, resumes=0)
    return leased, (Action.GRANT,)


def _started(life: RolloutLife, event: Event) -> Step:
    return replace(life, state=RolloutState.RUNNING), ()


def _adopt(life: RolloutLife, event: Event) -> Step:
    """Go on with the same attempt under another worker: nothing failed, so nothing is charged."""
    resumes = max(life.resumes, event.resumes) + 1
    return replace(life, state=RolloutState.RUNNING, resumes=resumes), ()


def _reserve(life: RolloutLife, event: Event) -> Step:
    return replace(life, state=RolloutState.RESERVED), ()


def _unreserve(life: RolloutLife, event: Event) -> Step:
    if life.cancel_code:
        return _end(life, RolloutState.CANCELLED, life.cancel_code, Action.CANCEL_ATTEMPT)
    return replace(life, state=RolloutState.RUNNING), ()


def _commit(life: RolloutLife, event: Event) -> Step:
    """Stored. What EVAL could not score has failed: sampling it anew would not mend the grader."""
    trains = FAILURE_CLASS[event.code].trains
    state = RolloutState.COMPLETED if trains else RolloutState.FAILED
    return replace(life, state=state, code=event.code), (
        Action.RELEASE,
        Action.CHECK_GROUP,
    )


def _retry(life: RolloutLife, code: FailureCode) -> Step:
    if life.cancel_code:
        return _end(life, RolloutState.CANCELLED, life.cancel_code)
    spent = life.infra_failures >= life.max_attempts or life.worker_losses > life.max_worker_losses
    if spent:
        return _end(life, RolloutState.FAILED, code)
    return _queue(replace(life, code=code))


def _queue(life: RolloutLife) -> Step:
    return replace(life, state=RolloutState.QUEUED), (Action.RELEASE, Action.REQUEUE)


def _failed(life: RolloutLife, event: Event) -> Step:
    match FAILURE_CLASS[event.code]:
        case FailureClass.CANCELLED:
            return _end(life, RolloutState.CANCELLED, event.code)
        case FailureClass.TASK:
            return _end(life, RolloutState.FAILED, event.code)
        case _ if event.code is FailureCode.WORKER_LOST:  # a program, which died with its worker
            return _lost(life, event)
        case _:
            return _retry(replace(life, infra_failures=life.infra_failures + 1), event.code)


def _lost(life: RolloutLife, event: Event) -> Step:
    return _retry(replace(life, worker_losses=life.worker_losses + 1), FailureCode.WORKER_LOST)


def _return(life: RolloutLife, event: Event) -> Step:
    if life.cancel_code:
        return _end(life, RolloutState.CANCELLED, life.cancel_code)
    return _queue(life)


def _cancel(life: RolloutLife, event: Event) -> Step:
    stop = () if life.state is RolloutState.QUEUED else (Action.CANCEL_ATTEMPT,)
    return _end(life, RolloutState.CANCELLED, event.code, *stop)


def _cancel_later(life: RolloutLife, event: Event) -> Step:
    return replace(life, cancel_code=event.code), ()


def _expire(life: RolloutLife, event: Event) -> Step:
    return _end(life, RolloutState.FAILED, FailureCode.QUEUE_DEADLINE)


_IN_HAND: dict[EventKind, Rule] = {
    EventKind.RESERVE: _reserve,
    EventKind.FAILED: _failed,
    EventKind.LOST: _lost,
    EventKind.RETURN: _return,
    EventKind.CANCEL: _cancel,
}

TABLE: Mapping[RolloutState, Mapping[EventKind, Rule]] = MappingProxyType(
    {
        RolloutState.QUEUED: {
            EventKind.LEASE: _lease,
            EventKind.CANCEL: _cancel,
            EventKind.EXPIRE: _expire,
        },
        RolloutState.LEASED: {
            **_IN_HAND,
            EventKind.STARTED_RUN: _started,
            EventKind.ADOPT: _adopt,
        },
        RolloutState.RUNNING: {
            **_IN_HAND,
            EventKind.STARTED_RUN: _started,
            EventKind.ADOPT: _adopt,
        },
        RolloutState.RESERVED: {
            EventKind.COMMIT: _commit,
            EventKind.UNRESERVE: _unreserve,
            EventKind.FAILED: _failed,
            EventKind.LOST: _lost,
            EventKind.RETURN: _return,
            EventKind.CANCEL: _cancel_later,
        },
        RolloutState.COMPLETED: {},
        RolloutState.FAILED: {},
        RolloutState.CANCELLED: {},
    }
)
"""Every legal (state, event). What is not here changes nothing."""

_ABOUT_ROLLOUT = frozenset({EventKind.LEASE, EventKind.CANCEL, EventKind.EXPIRE})


def step(life: RolloutLife, event: Event) -> Step:
    """Apply one event to a rollout's state.

    >>> fresh = RolloutLife(max_attempts=3, max_worker_losses=10)
    >>> life, actions = step(fresh, Event(kind=EventKind.LEASE))
    >>> life.state.value, life.attempt, [a.value for a in actions]
    ('leased', 1, ['grant'])
    >>> step(life, Event(kind=EventKind.RESERVE, attempt=7))[1]
    (<Action.FENCE: 'fence'>,)
    """
    if event.kind not in _ABOUT_ROLLOUT and event.attempt != life.attempt:
        return life, (Action.FENCE,)
    rule = TABLE[life.state].get(event.kind)
    if rule is None:
        return life, () if event.kind in _ABOUT_ROLLOUT else (Action.FENCE,)
    return rule(life, event)


class GroupEvent(StrEnum):
    KEEP = "keep"
    DROP = "drop"
    DELIVER = "deliver"
    EXPIRE = "expire"
    COMMIT = "commit"


GROUP_TABLE: Mapping[tuple[GroupState, GroupEvent], GroupState] = MappingProxyType(
    {
        (GroupState.OPEN, GroupEvent.KEEP): GroupState.KEPT,
        (GroupState.OPEN, GroupEvent.DROP): GroupState.DROPPED,
        (GroupState.KEPT, GroupEvent.DELIVER): GroupState.DELIVERED,
        (GroupState.KEPT, GroupEvent.EXPIRE): GroupState.STALE,
        (GroupState.DELIVERED, GroupEvent.COMMIT): GroupState.COMMITTED,
    }
)


def group_step(state: GroupState, event: GroupEvent) -> GroupState:
    """Next state; an event that the table does not hold changes nothing.

    >>> group_step(GroupState.KEPT, GroupEvent.DROP).value
    'kept'
    """
    return GROUP_TABLE.get((state, event), state)
