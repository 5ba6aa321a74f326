"""The delivery order: dense, stable, oldest version first, whoever asks, waits, leaves or dies."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prorl.control import Delivered, HandedOut, KeptGroup
from prorl.errors import ConflictError, UnavailableError
from prorl.storage.serve.delivery import HANDED_AT_ONCE, LiveOrder, OrderReply, OrderRequest
from tests.storage.run_directories import event


class Log:
    """Numbers groups as the gateway does: dense, once each, in the order asked for."""

    def __init__(self, stale: Callable[[int], bool] = lambda group: False) -> None:
        self.seqs: dict[int, int] = {}
        self.requests = 0
        self.cursors: dict[str, int] = {}
        self._stale = stale
        self.gate = asyncio.Event()
        self.gate.set()

    async def handout(self, groups: list[KeptGroup]) -> HandedOut:
        self.requests += 1
        stale = [group.group_id for group in groups if self._stale(group.group_id)]
        for group in groups:
            if group.group_id not in stale:
                self.seqs.setdefault(group.group_id, len(self.seqs))
        await self.gate.wait()
        delivered = tuple(
            Delivered(group.group_id, self.seqs[group.group_id])
            for group in groups
            if group.group_id not in stale
        )
        return HandedOut(delivered=delivered, stale=tuple(stale))

    async def cursor(self, consumer: str, seq: int) -> None:
        self.cursors[consumer] = seq


def order(log: Log) -> LiveOrder:
    return LiveOrder("r", size=lambda group: 10, handout=log.handout, save_cursor=log.cursor)


def request(
    seq: int, *, max_groups: int = 0, max_bytes: int = 1000, wait_s: float = 0.0
) -> OrderRequest:
    return OrderRequest(seq, max_groups, max_bytes, wait_s)


async def test_groups_wait_for_a_trainer_and_trainers_for_groups() -> None:
    log = Log()
    made = order(log)
    assert await made.take(request(0)) == OrderReply((), end=False)
    waiting = asyncio.create_task(made.take(request(0, wait_s=5)))
    await asyncio.sleep(0)
    made.keep(7, 0)
    assert await waiting == OrderReply((7,), end=False)
    made.finish()
    assert await made.take(request(0)) == OrderReply((7,), end=True)
    assert await made.take(request(1, wait_s=5)) == OrderReply((), end=True)


async def test_a_long_handout_is_requested_in_pieces_and_served_whole() -> None:
    log = Log()
    made = order(log)
    for group in range(2 * HANDED_AT_ONCE + 1):
        made.keep(group, 0)
    delivered = await made.take(request(0, max_bytes=10**9))
    assert delivered.groups == tuple(range(2 * HANDED_AT_ONCE + 1))
    assert log.requests == 3


async def test_oldest_version_first_then_decision_order() -> None:
    made = order(Log())
    for group, version in ((1, 5), (2, 3), (3, 5), (4, 3)):
        made.keep(group, version)
    assert (await made.take(request(0))).groups == (2, 4, 1, 3)


async def test_a_take_costs_by_what_it_takes_not_by_what_is_kept() -> None:
    log, measured = Log(), list[int]()

    def size(group: int) -> int:
        measured.append(group)
        return 10

    made = LiveOrder("r", size=size, handout=log.handout, save_cursor=log.cursor)
    for group in range(1000):
        made.keep(group, 0)
    for seq in range(100):
        await made.take(request(seq, max_groups=1))
    assert len(measured) < 100 * 5
    assert log.seqs == {group: group for group in range(100)}


async def test_bounds_cut_but_never_to_nothing() -> None:
    made = order(Log())
    for group in range(5):
        made.keep(group, 0)
    assert (await made.take(request(0, max_groups=2))).groups == (0, 1)
    assert (await made.take(request(2, max_bytes=25))).groups == (2, 3)
    assert (await made.take(request(4, max_bytes=1))).groups == (4,)
    assert (await made.take(request(0))).groups == (0, 1, 2, 3, 4)


async def test_stale_groups_are_passed_over() -> None:
    made = order(Log(stale=lambda group: group != 3))
    for group in range(5):
        made.keep(group, 0)
    assert (await made.take(request(0, max_groups=1, wait_s=5))).groups == (3,)
    made.finish()
    assert await made.take(request(1)) == OrderReply((), end=True)


async def test_a_trainer_that_disconnects_during_a_handout_changes_nothing() -> None:
    log = Log()
    made = order(log)
    log.gate.clear()
    made.keep(1, 0)
    leaving = asyncio.create_task(made.take(request(0, wait_s=5)))
    await asyncio.sleep(0.01)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    staying = asyncio.create_task(made.take(request(0, wait_s=5)))
    await asyncio.sleep(0.01)
    log.gate.set()
    assert (await staying).groups == (1,)
    assert log.requests == 1


async def test_an_unreachable_log_is_an_error_and_the_group_stays() -> None:
    log = Log()
    made = order(log)
    made.keep(1, 0)
    made._handout = _broken
    with pytest.raises(UnavailableError):
        await made.take(request(0))
    made._handout = log.handout
    assert (await made.take(request(0))).groups == (1,)


async def _broken(groups: list[KeptGroup]) -> HandedOut:
    raise UnavailableError("gone")


async def test_a_cursor_ahead_of_the_order_is_refused() -> None:
    log = Log()
    made = order(log)
    made.keep(1, 0)
    await made.take(request(0))
    with pytest.raises(ConflictError, match="ahead of run r, which has delivered 1 group"):
        await made.take(request(2))
    with pytest.raises(ConflictError):
        await made.commit("primary", 2)
    await made.commit("primary", 1)
    assert (log.cursors, made.committed("primary"), made.committed("other")) == (
        {"primary": 1},
        1,
        0,
    )


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("keep"), st.integers(0, 3)),
            st.tuples(st.just("take"), st.integers(1, 4)),
            st.just(("restart", 0)),
        )
    ),
)
def test_every_kept_group_is_delivered_once_and_in_order(steps: list[tuple[str, int]]) -> None:
    """Two consumers, hand-outs of every size and restarts of the store: both see the same dense
    order.
    """

    async def play() -> None:
        log = Log()
        made = order(log)
        kept: list[tuple[int, int]] = []
        seen: dict[str, list[int]] = {"primary": [], "other": []}
        for kind, number in [*steps, ("take", 1000), ("take", 1000)]:
            if kind == "keep":
                kept.append((len(kept), number))
                made.keep(*kept[-1])
            elif kind == "restart":
                made = order(log)
                order_before = sorted(log.seqs, key=log.seqs.__getitem__)
                made.restore(np.array(order_before, np.int64))
                for group, version in kept:
                    if group not in log.seqs:
                        made.keep(group, version)
            else:
                for groups in seen.values():
                    delivered = await made.take(
                        request(len(groups), max_groups=number, max_bytes=10**9)
                    )
                    groups.extend(delivered.groups)
        assert seen["primary"] == seen["other"] == sorted(log.seqs, key=log.seqs.__getitem__)
        assert sorted(seen["primary"]) == [group for group, _ in kept]
        assert sorted(log.seqs.values()) == list(range(len(kept)))

    asyncio.run(play())


def test_what_the_log_tells_of_hand_outs_has_its_place_once() -> None:
    made = order(Log())
    made.restore(np.array([4, 2], np.int64))
    events = [event(seq, group, "delivered", delivery_seq=seq) for seq, group in ((1, 2), (2, 7))]
    for _ in range(2):
        made.apply_events(events)
        made.restore_cursors({"primary": 1})
    made.keep(7, 0)
    assert (made.delivered, made.num_kept, made.committed("primary")) == (3, 0, 1)


async def test_who_waits_hears_at_once_why_the_run_does_not_move() -> None:
    made = order(Log())
    waiting = asyncio.create_task(made.take(request(0, wait_s=600)))
    await asyncio.sleep(0)
    made.tell("the filter is slow")
    assert await waiting == OrderReply((), end=False, stalled="the filter is slow")
    made.tell("")
    assert (await made.take(request(0))).stalled == ""
    made.tell("again")
    made.keep(7, 0)
    assert (await made.take(request(0))).stalled == "", "groups say that it moves"
