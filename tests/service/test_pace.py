"""The paces of servers, from what RUN workers say of their calls."""

from __future__ import annotations

from prorl.control import Served
from prorl.service.pool.balancer import Balancer
from prorl.service.pool.pace import FADE_S, Paces


class Time:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_a_server_of_a_third_of_the_speed_gets_fewer_and_is_tried_again() -> None:
    clock = Time()
    paces, balancer = Paces(clock), Balancer(["fast", "slow"])
    paces.add("fast", Served(sampled=1000, llm_s=10.0))
    paces.add("slow", Served(sampled=1000, llm_s=30.0))
    balancer.weigh(paces.weights())
    for rollout in range(100):
        balancer.acquire(rollout)
    assert balancer.in_flight("slow") == 10
    clock.now = 20 * FADE_S
    balancer.weigh(paces.weights())
    assert balancer.acquire(100) == "slow", "what was measured long ago is forgotten"
    balancer.weigh({})
    assert balancer.acquire(101) == "slow"


def test_small_differences_and_few_tokens_weigh_nothing() -> None:
    paces = Paces(Time())
    paces.add("a", Served(sampled=1000, llm_s=10.0))
    paces.add("b", Served(sampled=1000, llm_s=12.0))
    paces.add("c", Served(sampled=10, llm_s=10.0))
    assert dict(paces.weights()) == {"a": 1.0, "b": 1.0}
    paces.forget("a")
    assert dict(paces.weights()) == {"b": 1.0}
