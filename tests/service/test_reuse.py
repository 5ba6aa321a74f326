"""Prefix reuse and the paces of servers, from what RUN workers say of their calls."""

from __future__ import annotations

import logging

import pytest

from prorl.control import Served
from prorl.service.balancer import Balancer
from prorl.service.pace import FADE_S, Paces
from prorl.service.reuse import MIN_TOKENS, WINDOW_S, Share, grown, note


class Time:
    """A clock that is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def _calls(share: float, tokens: int = MIN_TOKENS) -> Served:
    return Served(prompt=2 * tokens, repeated=tokens, reused=round(share * tokens))


def test_a_collapse_is_said_once_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    share, now = Share(), 0.0

    def after(seconds: float, part: float) -> str:
        nonlocal now
        now += seconds
        note(share, "backend x", _calls(part), now)
        return share.alarm

    assert not any(after(20, 0.9) for _ in range(12))
    assert share.reused == pytest.approx(0.9, abs=0.001)
    assert share.cached == 0
    first = next(text for text in iter(lambda: after(20, 0.02), None) if text)
    assert "it was 90%" in first
    assert after(20, 0.02), "it lasts"
    assert not [text for text in [after(20, 0.9) for _ in range(6)] if text][4:]
    assert [r.levelname for r in caplog.records if "prefix reuse" in r.message] == [
        "WARNING",
        "INFO",
    ]


def test_little_evidence_and_a_share_that_was_never_high_are_no_alarm() -> None:
    few = Share()
    few.add(_calls(1.0), 0.0)
    few.add(_calls(0.0, 100), 2 * WINDOW_S)
    assert not few.alarm
    low = Share()
    for second in range(20):
        low.add(_calls(0.1), second * 20.0)
    low.add(_calls(0.0), 1000.0)
    assert not low.alarm


def test_sums_grow_whatever_workers_come_and_go() -> None:
    first, later = Served(10, 5, 8, 4, 3, 1.0), Served(20, 9, 16, 8, 6, 2.0)
    assert grown({}, {"a": first}) == {"a": first}
    assert grown({"a": first}, {"a": first}) == {}
    assert grown({"a": first}, {"a": later}) == {"a": Served(10, 4, 8, 4, 3, 1.0)}
    assert grown({"a": later}, {"a": first}) == {"a": first}, "a worker that was started anew"


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
