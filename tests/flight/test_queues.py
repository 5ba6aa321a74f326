"""The hand-over between a loop and its threads, and the pacing of flushes."""

from __future__ import annotations

import asyncio
import threading

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prorl.flight.pacing import Paced, backoff_s
from prorl.flight.queues import JOIN_BYTES, Inbox, Sender, SizedBatch, join, wire_bytes
from prorl.schema import MAX_BATCH_BYTES
from tests.flight.work_rows import leased
from tests.waiting import until


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(values, pa.int64())})


@given(
    st.lists(
        st.sampled_from([100, JOIN_BYTES, JOIN_BYTES + 1, MAX_BATCH_BYTES, 5 * MAX_BATCH_BYTES]),
        max_size=40,
    )
)
def test_joining_keeps_order_and_stays_below_the_limit(sizes: list[int]) -> None:
    joined = join([SizedBatch(batch(n), size) for n, size in enumerate(sizes)])
    lists = [part.column("n").to_pylist() for part in joined]
    assert [n for part in lists for n in part] == list(range(len(sizes)))
    for part in lists:
        assert len(part) == 1 or sum(sizes[n] for n in part) <= MAX_BATCH_BYTES
        assert len(part) == 1 or max(sizes[n] for n in part) <= JOIN_BYTES


def test_a_slice_weighs_what_it_holds() -> None:
    rows = leased(*range(50))
    assert wire_bytes(rows.slice(7, 1)) < wire_bytes(rows) / 5


def test_a_peer_that_reads_nothing_is_refused_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl.flight.queues.MAX_QUEUED_BYTES", 10_000)
    sender = Sender()
    num_accepted = 0
    while sender.put(batch(*range(100))):
        num_accepted += 1
    assert 1 <= num_accepted <= 10_000 // 800
    assert sender.take(0.01)[1] is False
    assert sender.put(batch(1))


async def test_what_a_thread_puts_is_received_in_order() -> None:
    inbox = Inbox(asyncio.get_running_loop())

    def put() -> None:
        for n in range(5000):
            inbox.put_threadsafe(batch(n))
        inbox.end_threadsafe()

    thread = threading.Thread(target=put)
    thread.start()
    numbers = []
    while (got := await asyncio.wait_for(inbox.receive(), 60)) is not None:
        numbers.append(got.column("n")[0].as_py())
    thread.join()
    assert numbers == list(range(5000))


async def test_flushes_are_quick_when_idle_and_joined_when_busy() -> None:
    flushed: list[float] = []
    loop = asyncio.get_running_loop()
    paced = Paced(lambda: flushed.append(loop.time()), 0.5)
    paced.ask()
    await asyncio.sleep(0)
    assert len(flushed) == 1
    for _ in range(100):
        paced.ask()
    await asyncio.sleep(0)
    assert len(flushed) == 1
    await until(lambda: len(flushed) > 1)
    assert flushed[1] - flushed[0] >= 0.5
    paced.ask()
    paced.now()
    await asyncio.sleep(0.6)
    assert len(flushed) == 3


@pytest.mark.parametrize(("location", "last_s"), [("grpc+unix:///a.sock", 0.2), ("grpc://a:1", 1)])
def test_waits_between_dials_grow_to_a_bound(location: str, last_s: float) -> None:
    waits = [backoff_s(location, tries) for tries in range(2000)]
    assert waits[0] <= 0.02
    assert last_s / 2 <= min(waits[10:]) < max(waits) <= last_s
