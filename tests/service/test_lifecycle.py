"""The lifecycle's table against a model: whatever comes in whatever order, a rollout ends once and
is never lost.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.service.core.lifecycle import (
    Action,
    Event,
    EventKind,
    GroupEvent,
    RolloutLife,
    group_step,
    step,
)
from prorl.types import FAILURE_CLASS, FailureCode, GroupState, RolloutState

Happening = tuple[EventKind, int, FailureCode]

CODES = st.sampled_from([code for code in FailureCode if code])
EVENTS = st.builds(
    lambda kind, back, code: (kind, back, code),
    st.sampled_from(list(EventKind)),
    st.sampled_from([0, 0, 0, 1, -1]),
    CODES,
)
LIVES = st.builds(RolloutLife, max_attempts=st.integers(1, 3), max_worker_losses=st.integers(0, 3))


def happen(
    life: RolloutLife, kind: EventKind, back: int, code: FailureCode
) -> tuple[RolloutLife, tuple[Action, ...]]:
    """An event about the current attempt, or `back` attempts ago."""
    return step(life, Event(kind=kind, attempt=life.attempt - back, code=code))


@given(LIVES, st.lists(EVENTS, max_size=60))
def test_terminal_never_changes_and_only_a_lease_raises_the_attempt(
    life: RolloutLife, events: list[Happening]
) -> None:
    for kind, back, code in events:
        after, actions = happen(life, kind, back, code)
        if life.state.terminal:
            assert after is life
        assert after.attempt - life.attempt == (Action.GRANT in actions)
        assert (Action.GRANT in actions) == (
            kind is EventKind.LEASE and life.state is RolloutState.QUEUED
        )
        if back and kind not in (EventKind.LEASE, EventKind.CANCEL, EventKind.EXPIRE):
            assert after is life, "a superseded attempt changes nothing"
            assert actions == (Action.FENCE,)
        life = after


QUEUED, LEASED, RUNNING, RESERVED, COMPLETED, FAILED, CANCELLED = RolloutState
AGAIN = (Action.RELEASE, Action.REQUEUE)
ENDED = (Action.RELEASE, Action.STORE_TERMINAL, Action.CHECK_GROUP)
STORED = (Action.RELEASE, Action.CHECK_GROUP)
STOPPED = (Action.CANCEL_ATTEMPT, *ENDED)
FENCED = (Action.FENCE,)
INFRA, TASK, REDUNDANT = FailureCode.SANDBOX_LOST, FailureCode.BAD_TASK, FailureCode.REDUNDANT
POLICY, UNGRADED = FailureCode.MAX_TURNS, FailureCode.GRADER_ERROR
LOST = FailureCode.WORKER_LOST

LIFE = RolloutLife(attempt=1, max_attempts=2, max_worker_losses=1)
WHOLE = {
    (QUEUED, EventKind.LEASE): (LEASED, (Action.GRANT,)),
    (QUEUED, EventKind.CANCEL): (CANCELLED, ENDED),
    (QUEUED, EventKind.EXPIRE): (FAILED, ENDED),
    **{
        (state, kind): after
        for state in (LEASED, RUNNING)
        for kind, after in {
            EventKind.STARTED_RUN: (RUNNING, ()),
            EventKind.ADOPT: (RUNNING, ()),
            EventKind.RESERVE: (RESERVED, ()),
            EventKind.FAILED: (QUEUED, AGAIN),
            EventKind.LOST: (QUEUED, AGAIN),
            EventKind.RETURN: (QUEUED, AGAIN),
            EventKind.CANCEL: (CANCELLED, STOPPED),
        }.items()
    },
    (RESERVED, EventKind.COMMIT): (FAILED, STORED),
    (RESERVED, EventKind.UNRESERVE): (RUNNING, ()),
    (RESERVED, EventKind.FAILED): (QUEUED, AGAIN),
    (RESERVED, EventKind.LOST): (QUEUED, AGAIN),
    (RESERVED, EventKind.RETURN): (QUEUED, AGAIN),
    (RESERVED, EventKind.CANCEL): (RESERVED, ()),
}


@pytest.mark.parametrize("state", RolloutState)
@pytest.mark.parametrize("kind", EventKind)
def test_where_each_event_leads_from_each_state(state: RolloutState, kind: EventKind) -> None:
    life = replace(LIFE, state=state)
    after, actions = step(life, Event(kind=kind, attempt=1, code=INFRA))
    about_rollout = kind in (EventKind.LEASE, EventKind.CANCEL, EventKind.EXPIRE)
    unknown = (state, () if about_rollout else FENCED)
    assert (after.state, actions) == WHOLE.get((state, kind), unknown)
    if (state, kind) not in WHOLE:
        assert after is life


@pytest.mark.parametrize(
    ("kind", "code", "fields", "after"),
    [
        (EventKind.COMMIT, FailureCode.NONE, {}, (COMPLETED, FailureCode.NONE, STORED)),
        (EventKind.COMMIT, POLICY, {}, (COMPLETED, POLICY, STORED)),
        (EventKind.COMMIT, UNGRADED, {}, (FAILED, UNGRADED, STORED)),
        (EventKind.FAILED, INFRA, {"infra_failures": 1}, (FAILED, INFRA, ENDED)),
        (EventKind.FAILED, INFRA, {"worker_losses": 1}, (QUEUED, INFRA, AGAIN)),
        (EventKind.LOST, INFRA, {}, (QUEUED, FailureCode.WORKER_LOST, AGAIN)),
        (EventKind.LOST, INFRA, {"worker_losses": 1}, (FAILED, FailureCode.WORKER_LOST, ENDED)),
        (EventKind.LOST, INFRA, {"infra_failures": 1}, (QUEUED, FailureCode.WORKER_LOST, AGAIN)),
        (EventKind.FAILED, LOST, {"infra_failures": 1}, (QUEUED, LOST, AGAIN)),
        (EventKind.FAILED, LOST, {"worker_losses": 1}, (FAILED, LOST, ENDED)),
        (EventKind.FAILED, TASK, {}, (FAILED, TASK, ENDED)),
        (EventKind.FAILED, REDUNDANT, {}, (CANCELLED, REDUNDANT, ENDED)),
        (EventKind.FAILED, INFRA, {"cancel_code": REDUNDANT}, (CANCELLED, REDUNDANT, ENDED)),
        (EventKind.LOST, INFRA, {"cancel_code": REDUNDANT}, (CANCELLED, REDUNDANT, ENDED)),
        (EventKind.RETURN, INFRA, {"cancel_code": REDUNDANT}, (CANCELLED, REDUNDANT, ENDED)),
        (EventKind.UNRESERVE, INFRA, {"cancel_code": REDUNDANT}, (CANCELLED, REDUNDANT, STOPPED)),
    ],
)
def test_how_what_is_reserved_ends_and_why(
    kind: EventKind,
    code: FailureCode,
    fields: dict[str, Any],
    after: tuple[RolloutState, FailureCode, tuple[Action, ...]],
) -> None:
    life = replace(LIFE, state=RESERVED, **fields)
    ended, actions = step(life, Event(kind=kind, attempt=1, code=code))
    assert (ended.state, ended.code, actions) == after
    assert ended.failure_class is FAILURE_CLASS[ended.code]


def test_what_an_event_says_is_kept() -> None:
    cancel = Event(kind=EventKind.CANCEL, code=REDUNDANT)
    assert step(replace(LIFE, state=RESERVED), cancel)[0].cancel_code is REDUNDANT
    assert step(replace(LIFE, state=RUNNING), cancel)[0].code is REDUNDANT
    late, _ = step(replace(LIFE, state=QUEUED), Event(kind=EventKind.EXPIRE))
    assert late.code is FailureCode.QUEUE_DEADLINE
    cut = Event(kind=EventKind.COMMIT, attempt=1, code=FailureCode.MAX_TURNS)
    assert step(replace(LIFE, state=RESERVED), cut)[0].code is FailureCode.MAX_TURNS


def test_a_lease_begins_a_new_attempt_that_nobody_has_resumed() -> None:
    again, _ = step(replace(LIFE, resumes=3), Event(kind=EventKind.LEASE))
    assert (again.attempt, again.resumes) == (2, 0)
    fresh = RolloutLife(max_attempts=2, max_worker_losses=1)
    assert (fresh.state, fresh.attempt, fresh.resumes) == (QUEUED, 0, 0)
    first, _ = step(fresh, Event(kind=EventKind.LEASE))
    assert (first.attempt, first.resumes) == (1, 0)
    for claimed_resumes, resumes in ((0, 1), (4, 5)):
        adopted, _ = step(first, Event(kind=EventKind.ADOPT, attempt=1, resumes=claimed_resumes))
        assert adopted == replace(first, state=RUNNING, resumes=resumes), "charged to nobody"
    for attempt in (0, 1):
        unsaid = step(replace(first, attempt=attempt), Event(kind=EventKind.STARTED_RUN))
        assert unsaid[1] == FENCED, "no attempt is none of them"


def test_a_group_is_decided_once_handed_out_once_and_then_acknowledged() -> None:
    whole = {
        (GroupState.OPEN, GroupEvent.KEEP): GroupState.KEPT,
        (GroupState.OPEN, GroupEvent.DROP): GroupState.DROPPED,
        (GroupState.KEPT, GroupEvent.DELIVER): GroupState.DELIVERED,
        (GroupState.KEPT, GroupEvent.EXPIRE): GroupState.STALE,
        (GroupState.DELIVERED, GroupEvent.COMMIT): GroupState.COMMITTED,
    }
    for state in GroupState:
        for event in GroupEvent:
            assert group_step(state, event) is whole.get((state, event), state)
