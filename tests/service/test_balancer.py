"""The balancer: work in flight decides, rollouts stay where they are."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from prorl.errors import NotFoundError
from prorl.service.pool.balancer import BackendState, Balancer

NAMES = st.sampled_from(["a", "b", "c", "d", "e"])
ROLLOUTS = st.integers(0, 30)


def test_equal_loads_take_turns_and_a_release_counts() -> None:
    balancer = Balancer(["a", "b"])
    assert [balancer.acquire(i) for i in range(4)] == ["a", "b", "a", "b"]
    balancer.release(1)
    assert balancer.acquire(9) == "b", (
        "the one with less in flight now, not the one whose turn it is"
    )


def test_slow_answers_eject_at_most_half_while_the_dead_are_always_ejected() -> None:
    balancer = Balancer("abcd")
    assert [balancer.eject(name, dead=False) for name in "abcd"] == [True, True, False, False]
    assert {balancer.acquire(i) for i in range(10)} == {"c", "d"}
    balancer.restore("a")
    assert balancer.acquire(99) == "a"
    assert all(balancer.eject(name) for name in "abcd")
    assert balancer.acquire(100) is None
    assert not balancer.able()
    sole = Balancer("x")
    assert not sole.eject("x", dead=False)
    assert sole.eject("x")


def test_a_retry_goes_elsewhere_when_it_can() -> None:
    balancer = Balancer("ab")
    balancer.assign("load", "b")
    assert balancer.acquire(1, avoid=["a"]) == "b"
    assert balancer.acquire(2, avoid=["a"], suits=lambda name: name == "a") == "a"
    assert balancer.acquire(3, suits=lambda name: False) is None


def test_of_equal_loads_a_never_chosen_backend_comes_first() -> None:
    balancer = Balancer(["a", "b"])
    assert balancer.acquire(1) == "a"
    balancer.release(1)
    assert balancer.acquire(2) == "b"
    balancer.release(2)
    assert balancer.acquire(3, ("a", "mine")) == "mine"
    assert balancer.in_flight("mine") == 1


def test_a_rollout_weighs_more_where_answers_are_slow() -> None:
    balancer = Balancer(["slow", "fast"])
    balancer.weigh({"slow": 3.0})
    assert (balancer.load("slow"), balancer.load("fast")) == (3.0, 1.0)
    chosen = [balancer.acquire(i) for i in range(7)]
    assert chosen == ["fast", "fast", "slow", "fast", "fast", "fast", "slow"]
    balancer.weigh({"slow": 0.5, "fast": 1.0})
    assert balancer.acquire(7) == "slow", "it has less, weighed anew"
    balancer.weigh({})
    assert balancer.load("slow") == 4.0, "where nothing is said a rollout weighs 1"
    assert balancer.acquire(8) == "slow"


def test_the_limit_of_a_backend_is_reported_and_obeyed() -> None:
    balancer = Balancer(["a"])
    balancer.fence("a")
    assert balancer.fenced == {"a"}
    assert balancer.states == {"a": BackendState.FENCED}
    assert balancer.acquire(1) is None
    assert balancer.eject("a")
    assert balancer.state("a") is BackendState.EJECTED, "illness is said first"
    balancer.restore("a")
    assert balancer.acquire(1) is None, "being well ends no fence"
    balancer.unfence("a")
    assert balancer.acquire(1) == "a"
    balancer.drain("a")
    assert balancer.state("a") is BackendState.DRAINING
    assert balancer.acquire(2) is None
    with pytest.raises(NotFoundError, match="'b' is not in the pool"):
        balancer.drain("b")
    balancer.add("a")
    assert balancer.acquire(2) == "a"
    balancer.remove("a")
    assert not balancer.states
    assert balancer.acquire(3) is None


def test_asking_again_changes_nothing() -> None:
    balancer = Balancer("abcd")
    assert [balancer.eject(name, dead=False) for name in "ababc"] == [True, True, True, True, False]
    for unknown in (balancer.restore, balancer.unfence, balancer.remove):
        unknown("z")
    assert "z" not in balancer.states
    assert (balancer.acquire(1), balancer.acquire(1)) == ("c", "c")
    balancer.release(1)
    balancer.release(1)
    assert balancer.in_flight("c") == 0


def test_a_rollout_that_is_assigned_anew_counts_once() -> None:
    balancer = Balancer(["a", "b"])
    balancer.assign(1, "a")
    balancer.assign(1, "b")
    assert balancer.acquire(1) == "b"
    assert (balancer.in_flight("a"), balancer.in_flight("b")) == (0, 1)


def test_a_backend_of_a_run_is_able_without_being_in_the_pool() -> None:
    balancer = Balancer(["a"])
    assert balancer.able()
    assert balancer.able(suits=lambda name: name == "a")
    balancer.drain("a")
    assert not balancer.able()
    assert balancer.able(("mine",))
    assert not balancer.able(("mine",), lambda name: name == "a")


def test_what_is_kept_of_backends_and_loads_is_bounded() -> None:
    balancer = Balancer("ab")
    for i in range(2000):
        balancer.acquire(i)
        balancer.release(i)
    assert len(balancer._heap) < 200
    assert balancer.acquire("x", ("mine",)) == "mine"
    balancer.remove("a")
    balancer.remove("b")
    balancer.release("x")
    assert not {*balancer._chosen, *balancer._in_flight}, "nothing of who is gone and idle"


class Machine(RuleBasedStateMachine):
    """Against plain counting."""

    def __init__(self) -> None:
        super().__init__()
        self.balancer = Balancer()
        self.owner: dict[int, str] = {}

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        self.balancer.add(name)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.balancer.remove(name)

    @rule(name=NAMES, drain=st.booleans())
    def rest(self, name: str, drain: bool) -> None:
        if name in self.balancer.states:
            if drain:
                self.balancer.drain(name)
                return
            before = self.balancer.states[name]
            ejected = self.balancer.eject(name, dead=False)
            if ejected and before is not BackendState.EJECTED:
                out = sum(state is BackendState.EJECTED for state in self.balancer.states.values())
                assert 2 * out <= len(self.balancer.states)

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        assert self.balancer.eject(name)

    @rule(name=NAMES)
    def restore(self, name: str) -> None:
        if name in self.balancer.states:
            self.balancer.restore(name)

    @rule(rollout=ROLLOUTS)
    def acquire(self, rollout: int) -> None:
        ready = [n for n, state in self.balancer.states.items() if state is BackendState.READY]
        least = min((self.balancer.in_flight(n) for n in ready), default=None)
        name = self.balancer.acquire(rollout)
        if rollout in self.owner:
            assert name == self.owner[rollout]
        elif name is None:
            assert not ready
        else:
            assert name in ready
            assert self.balancer.in_flight(name) - 1 == least
            self.owner[rollout] = name

    @rule(rollout=ROLLOUTS)
    def release(self, rollout: int) -> None:
        self.balancer.release(rollout)
        self.owner.pop(rollout, None)

    @invariant()
    def counts(self) -> None:
        for name in {*self.owner.values(), *self.balancer.states}:
            assert self.balancer.in_flight(name) == sum(
                owner == name for owner in self.owner.values()
            )


TestMachine = Machine.TestCase
