"""The balancer: work in flight decides, rollouts stay where they are."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

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


def test_a_slow_backend_gets_less() -> None:
    balancer = Balancer(["slow", "fast"])
    for i in range(100):
        name = balancer.acquire(i)
        if name == "fast":
            balancer.release(i)
    assert balancer.in_flight("slow") == 1


def test_sticky_through_drain_and_removal() -> None:
    balancer = Balancer(["a", "b"])
    assert balancer.acquire(1) == "a"
    balancer.drain("a")
    assert balancer.acquire(1) == "a"
    balancer.remove("a")
    assert balancer.acquire(1) == "a"
    assert balancer.acquire(2) == "b"
    balancer.release(1)
    assert balancer.in_flight("a") == 0


def test_slow_answers_never_eject_more_than_half_and_the_dead_are_out_whoever_is_left() -> None:
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


def test_a_run_with_backends_of_its_own() -> None:
    balancer = Balancer(["a"])
    assert balancer.acquire(1, ("mine",)) == "mine"
    assert balancer.acquire(2) == "a"
    assert Balancer().acquire(1) is None


class Machine(RuleBasedStateMachine):
    """Against plain counting."""

    def __init__(self) -> None:
        super().__init__()
        self.balancer = Balancer()
        self.owner: dict[int, str] = {}

    @rule(name=NAMES)
    def add(self, name: str) -> None:
        """A backend comes."""
        self.balancer.add(name)

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        """A backend goes."""
        self.balancer.remove(name)

    @rule(name=NAMES, drain=st.booleans())
    def rest(self, name: str, drain: bool) -> None:
        """A backend is drained or ejected."""
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
        """A backend is known to be dead."""
        assert self.balancer.eject(name)

    @rule(name=NAMES)
    def restore(self, name: str) -> None:
        """A backend is well again."""
        if name in self.balancer.states:
            self.balancer.restore(name)

    @rule(rollout=ROLLOUTS)
    def acquire(self, rollout: int) -> None:
        """A rollout wants a backend."""
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
        """A rollout ends."""
        self.balancer.release(rollout)
        self.owner.pop(rollout, None)

    @invariant()
    def counts(self) -> None:
        """In-flight counts are what is assigned."""
        for name in {*self.owner.values(), *self.balancer.states}:
            assert self.balancer.in_flight(name) == sum(
                owner == name for owner in self.owner.values()
            )


TestMachine = Machine.TestCase
