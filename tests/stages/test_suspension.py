"""Attempts that stand still between turns, and the slots that they lend."""

from __future__ import annotations

import asyncio

import pyarrow as pa

from prorl.control import Payload, Suspended
from prorl.flight import LocalNetwork
from prorl.flight.inlet import Inlet, Taken
from prorl.limits import Deadline
from prorl.rows import Row
from prorl.stages.suspension import Suspensions
from prorl.types import AttemptKey

EMPTY = pa.RecordBatch.from_pylist([], pa.schema([]))
A, B, C = (AttemptKey("r", number, 1) for number in range(3))


class Slots:
    """An inlet's slots, as a stage host has them."""

    def __init__(self, slots: int) -> None:
        self.inlet = Inlet(LocalNetwork(), "ready", {"worker": "run-0", "role": "run"}, slots=slots)

    def take(self, *keys: AttemptKey) -> None:
        """Rows come."""
        for key in keys:
            self.inlet.adopt(Taken(key, Row(EMPTY, 0), 0))

    def holds(self, key: AttemptKey) -> bool:
        return key in self.inlet

    def lend(self, key: AttemptKey) -> None:
        self.inlet.lend(key)

    async def take_back(self, key: AttemptKey) -> None:
        await self.inlet.take_back(key)


class Attempts:
    """Suspensions, and what was said of them."""

    def __init__(self, slots: int = 2) -> None:
        self.slots, self.said, self.now = Slots(slots), list[tuple[int, bool]](), 0.0
        self.suspensions = Suspensions(lambda: self.slots, self._emit)
        self.deadline = Deadline(10.0, clock=lambda: self.now)

    def _emit(self, payload: Payload, key: AttemptKey, *, stage: str, code: str = "") -> None:
        assert isinstance(payload, Suspended)
        self.said.append((key.rollout_id, payload.suspended))

    def boundary(self, key: AttemptKey) -> asyncio.Task[float]:
        """An attempt has ended its turn."""
        return asyncio.ensure_future(self.suspensions.boundary(key, self.deadline))


async def _settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_who_stands_still_lends_its_slot_and_spends_no_budget() -> None:
    attempts = Attempts()
    attempts.slots.take(A, B)
    attempts.suspensions.ask(A, True)
    stands = attempts.boundary(A)
    await _settled()
    assert attempts.said == [(0, True)]
    assert attempts.slots.inlet.in_hand == 1
    attempts.now = 3600.0
    attempts.suspensions.ask(A, False)
    assert await stands == 3600.0
    assert (attempts.said[1:], attempts.slots.inlet.in_hand) == ([(0, False)], 2)
    attempts.now += 4.0
    assert attempts.deadline.remaining_s == 6.0


async def test_it_goes_on_with_the_slot_of_the_next_row_that_ends() -> None:
    attempts = Attempts()
    attempts.slots.take(A, B)
    attempts.suspensions.ask(A, True)
    stands = attempts.boundary(A)
    await _settled()
    attempts.slots.take(C)
    attempts.suspensions.ask(A, False)
    await _settled()
    assert not stands.done(), "B and C have the slots"
    attempts.slots.inlet.done(B)
    await asyncio.wait_for(stands, 5)
    assert attempts.slots.inlet.in_hand == 2


async def test_two_that_wait_for_slots_get_one_each_as_they_come_free() -> None:
    attempts = Attempts()
    attempts.slots.take(A, B)
    for key in (A, B):
        attempts.suspensions.ask(key, True)
    stands = [attempts.boundary(key) for key in (A, B)]
    await _settled()
    others = [AttemptKey("s", number, 1) for number in range(2)]
    attempts.slots.take(*others)
    for key in (A, B):
        attempts.suspensions.ask(key, False)
    await _settled()
    attempts.slots.inlet.done(others[0])
    await _settled()
    assert [task.done() for task in stands].count(True) == 1, "one slot, one attempt"
    attempts.slots.inlet.done(others[1])
    await asyncio.wait_for(asyncio.gather(*stands), 5)


async def test_who_is_not_asked_or_not_here_passes() -> None:
    attempts = Attempts()
    attempts.slots.take(A)
    attempts.suspensions.ask(B, True)
    assert await attempts.boundary(A) == await attempts.boundary(B) == 0.0
    attempts.suspensions.ask(A, True)
    attempts.suspensions.ask(A, False)
    assert await attempts.boundary(A) == 0.0
    assert attempts.said == []


async def test_a_cancelled_one_gives_its_place_up_and_no_slot_is_lost() -> None:
    attempts = Attempts()
    attempts.slots.take(A, B)
    attempts.suspensions.ask(A, True)
    stands = attempts.boundary(A)
    await _settled()
    stands.cancel()
    await asyncio.gather(stands, return_exceptions=True)
    attempts.slots.inlet.done(A)
    assert attempts.slots.inlet.in_hand == 1
    attempts.slots.inlet.done(B)
    assert attempts.slots.inlet.in_hand == 0


async def test_a_node_that_leaves_wakes_everybody() -> None:
    attempts = Attempts()
    attempts.slots.take(A, B)
    attempts.suspensions.ask(A, True)
    stands = attempts.boundary(A)
    await _settled()
    attempts.suspensions.leave()
    await asyncio.wait_for(stands, 5)
    attempts.suspensions.ask(B, True)
    assert await attempts.boundary(B) == 0.0
