"""The lifecycle's table against a model: whatever comes in whatever order, a rollout ends once and
is never lost.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from prorl.service.core.lifecycle import (
    TABLE,
    Action,
    Event,
    EventKind,
    GroupEvent,
    RolloutLife,
    group_step,
    step,
)
from prorl.types import FAILURE_CLASS, FailureClass, FailureCode, GroupState, RolloutState

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


@given(LIVES, st.lists(EVENTS, max_size=60))
def test_an_end_happens_once_and_is_told(life: RolloutLife, events: list[Happening]) -> None:
    checks = rows = 0
    for kind, back, code in events:
        before, (life, actions) = life, happen(life, kind, back, code)
        checks += Action.CHECK_GROUP in actions
        rows += Action.STORE_TERMINAL in actions
        assert (Action.CHECK_GROUP in actions) == (
            life.state.terminal and not before.state.terminal
        )
        if (
            before.state in TABLE
            and life.state is RolloutState.QUEUED
            and before.state is not RolloutState.QUEUED
        ):
            assert {Action.REQUEUE, Action.RELEASE} <= set(actions), (
                "who goes back to the queue must be leased again"
            )
    assert checks == life.state.terminal
    assert rows == (life.state in (RolloutState.FAILED, RolloutState.CANCELLED))


@given(LIVES, st.lists(EVENTS, max_size=40))
def test_from_any_state_a_rollout_can_end(life: RolloutLife, events: list[Happening]) -> None:
    for kind, back, code in events:
        life, _ = happen(life, kind, back, code)
    while not life.state.terminal:
        kind = EventKind.LEASE if life.state is RolloutState.QUEUED else EventKind.LOST
        life, _ = step(life, Event(kind=kind, attempt=life.attempt))
    assert life.worker_losses <= life.max_worker_losses + 1


def test_what_is_given_back_however_often_never_fails() -> None:
    life = RolloutLife(max_worker_losses=0, max_attempts=1)
    for _ in range(5):
        life, _ = step(life, Event(kind=EventKind.LEASE))
        life, actions = step(life, Event(kind=EventKind.RETURN, attempt=life.attempt))
        assert life.state is RolloutState.QUEUED
        assert actions == (Action.RELEASE, Action.REQUEUE)
    assert life.attempt == 5


@given(LIVES, st.lists(EVENTS, max_size=60))
def test_budgets_are_kept_apart(life: RolloutLife, events: list[Happening]) -> None:
    for kind, back, code in events:
        before, (life, _) = life, happen(life, kind, back, code)
        assert life.infra_failures - before.infra_failures in (0, 1)
        if life.infra_failures > before.infra_failures:
            assert kind is EventKind.FAILED
            assert FAILURE_CLASS[code] in (FailureClass.INFRA, FailureClass.POLICY)
        if life.worker_losses > before.worker_losses:
            assert kind is EventKind.LOST
        if kind is EventKind.RETURN:
            assert (life.infra_failures, life.worker_losses) == (
                before.infra_failures,
                before.worker_losses,
            ), "what a leaving worker gives back is charged to nobody"
    if life.state is RolloutState.QUEUED:
        assert life.infra_failures < life.max_attempts
        assert life.worker_losses <= life.max_worker_losses


@given(st.lists(st.sampled_from(list(GroupEvent)), max_size=20))
def test_the_first_decision_and_the_first_hand_out_stand(events: list[GroupEvent]) -> None:
    state, decided, handed = GroupState.OPEN, None, None
    for event in events:
        after = group_step(state, event)
        if state is not GroupState.OPEN and decided is None:
            decided = state
        if after in (GroupState.DELIVERED, GroupState.STALE) and handed is None:
            handed = after
        state = after
    if decided is GroupState.DROPPED:
        assert state is GroupState.DROPPED
    if handed is not None:
        assert state in (handed, GroupState.ACKED)
    assert state is not GroupState.ACKED or handed is GroupState.DELIVERED


@given(LIVES, st.lists(EVENTS, max_size=60), st.integers(0, 5))
def test_adoption_keeps_the_attempt_and_charges_nothing(
    life: RolloutLife, events: list[Happening], known: int
) -> None:
    for kind, back, code in events:
        life, _ = happen(life, kind, back, code)
    adopt = Event(kind=EventKind.ADOPT, attempt=life.attempt, epoch=known)
    after, actions = step(life, adopt)
    in_hand = life.state in (RolloutState.LEASED, RolloutState.RUNNING)
    assert actions == (() if in_hand else (Action.FENCE,))
    if in_hand:
        assert after.epoch == max(life.epoch, known) + 1
        charged = (life.attempt, life.infra_failures, life.worker_losses)
        assert (after.attempt, after.infra_failures, after.worker_losses) == charged
    else:
        assert after is life
