"""Outlet and Inlet joined by a channel: one body over both networks."""

from __future__ import annotations

import asyncio

import pytest

from prorl.flight import Inlet, Outlet, this_incarnation
from prorl.flight.inlet import ReceivedRow
from prorl.flight.queues import wire_bytes
from prorl.schema.rows import Row
from prorl.types import AttemptKey
from tests.edge_rows import put
from tests.flight.conftest import Net
from tests.flight.work_rows import key, leased, ran, ready
from tests.waiting import until


async def take(inlet: Inlet, count: int) -> list[ReceivedRow]:
    received: list[ReceivedRow] = []
    while len(received) < count:
        received += await asyncio.wait_for(inlet.take(), 30)
    return received


async def serve(net: Net, outlet: Outlet, name: str = "up") -> str:
    return await net.network.listen(net.name(name), {outlet.path: outlet.route})


def inlet_of(net: Net, edge: str, *locations: str, slots: int = 4, worker: str = "w") -> Inlet:
    inlet = Inlet(net.network, edge, this_incarnation(roles={"run": 1}, worker=worker), slots=slots)
    inlet.set_upstreams(locations)
    return inlet


async def test_rows_flow_within_credit_and_in_order(net: Net) -> None:
    outlet = Outlet("ready")
    inlet = inlet_of(net, "ready", await serve(net, outlet), slots=3)
    for n in range(10):
        await put(outlet, ready(n))
    seen: list[AttemptKey] = []
    while len(seen) < 10:
        for name, *_ in await take(inlet, 1):
            assert inlet.in_hand <= 3
            seen.append(name)
            inlet.done(name)
    assert seen == [key(n) for n in range(10)]
    await inlet.close()


async def test_put_waits_while_the_bound_is_reached(net: Net) -> None:
    size = wire_bytes(ran(0))
    acked: list[AttemptKey] = []
    outlet = Outlet("ran", limit_bytes=2 * size, on_acked=acked.extend)
    location = await serve(net, outlet)
    await put(outlet, ran(0))
    await put(outlet, ran(1))
    third = asyncio.ensure_future(put(outlet, ran(2)))
    inlet = inlet_of(net, "ran", location)
    await take(inlet, 2)
    await asyncio.sleep(0.05)
    assert not third.done()
    inlet.ack([key(0)])
    await asyncio.wait_for(third, 30)
    assert acked == [key(0)]
    await inlet.close()


async def test_a_lost_consumer_gives_unacked_rows_to_another_on_redelivered_edges(net: Net) -> None:
    acked: list[AttemptKey] = []
    outlet = Outlet("ran", on_acked=acked.extend)
    location = await serve(net, outlet)
    first = inlet_of(net, "ran", location, slots=4)
    for n in range(4):
        await put(outlet, ran(n))
    await take(first, 4)
    first.ack([key(1)])
    await until(lambda: acked == [key(1)])
    await first.close()
    second = inlet_of(net, "ran", location, slots=4)
    again = await take(second, 3)
    assert [row.key for row in again] == [key(0), key(2), key(3)]
    second.ack(row.key for row in again)
    await until(lambda: outlet.buffered_bytes == 0)
    await second.close()


async def test_rows_of_a_broken_stream_are_stalled_until_an_ack(net: Net) -> None:
    """Consumers that come and go again without an ack change nothing."""
    outlet = Outlet("ran")
    location = await serve(net, outlet)
    await put(outlet, ran(0))
    await until(lambda: outlet.stalled_s > 0, "no stream is there")
    for _ in range(2):
        before_s = outlet.stalled_s
        inlet = inlet_of(net, "ran", location)
        await take(inlet, 1)
        await inlet.close()
        assert outlet.stalled_s > before_s
    inlet = inlet_of(net, "ran", location)
    await take(inlet, 1)
    await put(outlet, ran(1))
    await take(inlet, 1)
    inlet.ack([key(0)])
    await until(lambda: outlet.stalled_s == 0.0, "the line works")
    inlet.ack([key(1)])
    await inlet.close()


async def test_a_lost_consumer_loses_nothing_that_it_received_without_redelivery(net: Net) -> None:
    acked: list[AttemptKey] = []
    lost: list[AttemptKey] = []
    outlet = Outlet("ready", on_acked=acked.extend, on_lost=lost.extend)
    location = await serve(net, outlet)
    first = inlet_of(net, "ready", location, slots=2)
    for n in range(4):
        await put(outlet, ready(n))
    await take(first, 2)
    await until(lambda: len(acked) == 2)
    await first.close()
    second = inlet_of(net, "ready", location, slots=4)
    assert [row.key for row in await take(second, 2)] == [key(2), key(3)]
    assert lost == []
    await second.close()


async def test_a_redelivered_row_in_hand_is_not_delivered_twice_and_its_ack_finds_the_way(
    net: Net,
) -> None:
    """The stream breaks, not the consumer: what it holds comes again and is acked over the stream
    that is there.
    """
    acked: list[AttemptKey] = []
    first, second = Outlet("ran"), Outlet("ran", on_acked=acked.extend)
    location_1, location_2 = await serve(net, first, "one"), await serve(net, second, "two")
    inlet = inlet_of(net, "ran", location_1, location_2)
    await put(first, ran(7))
    assert [row.key for row in await take(inlet, 1)] == [key(7)]
    await put(second, ran(7))
    await asyncio.sleep(0.05)
    inlet.ack([key(7)])
    await until(lambda: acked == [key(7)])
    await put(second, ran(7))
    await until(lambda: acked == [key(7), key(7)])
    await inlet.close()


async def test_a_supplier_makes_rows_when_there_is_credit(net: Net) -> None:
    """The gateway's side of the lease edge."""
    credits: list[int] = []
    sent: list[tuple[list[AttemptKey], object]] = []
    numbers = iter(range(100))

    def supply(free_rows: int) -> None:
        credits.append(free_rows)
        outlet.send(leased(*(next(numbers) for _ in range(free_rows))))

    outlet = Outlet(
        "lease",
        on_credit=supply,
        on_sent=lambda names, hello: sent.append((names, hello["worker"])),
    )
    inlet = inlet_of(net, "lease", await serve(net, outlet), slots=3)
    assert [row.key for row in await take(inlet, 3)] == [key(0), key(1), key(2)]
    inlet.done(key(0))
    inlet.done(key(2))
    assert [row.key for row in await take(inlet, 2)] == [key(3), key(4)]
    assert sum(credits) == 5
    assert sent[0] == ([key(0), key(1), key(2)], "w")
    await inlet.close()


async def test_upstreams_come_late_and_go(net: Net) -> None:
    outlet = Outlet("ready")
    inlet = inlet_of(net, "ready", net.name("up"))
    await asyncio.sleep(0.05)
    await serve(net, outlet)
    await put(outlet, ready(1))
    assert [row.key for row in await take(inlet, 1)] == [key(1)]
    inlet.set_upstreams([])
    await put(outlet, ready(2))
    assert [row.key for row in await take(inlet, 1)] == [key(2)]
    await inlet.close()


async def test_a_stopped_inlet_takes_its_credit_back(net: Net) -> None:
    outlet = Outlet("ready")
    inlet = inlet_of(net, "ready", await serve(net, outlet))
    await until(lambda: outlet.free_rows == 4)
    inlet.stop()
    await until(lambda: outlet.free_rows == 0)
    await put(outlet, ready(1))
    await asyncio.sleep(0.05)
    assert outlet.num_waiting == 1
    await inlet.close()


async def test_take_ends_when_the_inlet_closes(net: Net) -> None:
    inlet = inlet_of(net, "ready", net.name("up"))
    taking = asyncio.ensure_future(inlet.take())
    await asyncio.sleep(0.01)
    await inlet.close()
    await inlet.close()
    assert await asyncio.wait_for(taking, 30) == []


async def test_a_bug_while_serving_an_upstream_is_raised_by_take(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: object) -> list[AttemptKey]:
        raise ZeroDivisionError("a bug of ours")

    outlet = Outlet("ready")
    inlet = inlet_of(net, "ready", await serve(net, outlet))
    monkeypatch.setattr("prorl.flight.inlet.keys", broken)
    await put(outlet, ready(1))
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(inlet.take(), 30)
    await inlet.close()


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("adopted", [False, True])
async def test_a_reoffered_row_is_acked_and_not_delivered_twice(
    net: Net, adopted: bool, done: bool
) -> None:
    """Its sender did not hear that this worker, or the last incarnation of its name, had it."""
    acked: list[AttemptKey] = []
    first, second = Outlet("ready"), Outlet("ready", on_acked=acked.extend)
    location_1, location_2 = await serve(net, first, "one"), await serve(net, second, "two")
    inlet = inlet_of(net, "ready", location_1, location_2, slots=2)
    if adopted:
        inlet.adopt(ReceivedRow(key(0), Row(ready(0), 0), 100))
    else:
        await put(first, ready(0))
    await take(inlet, 1)
    if done:
        inlet.done(key(0))
    await put(second, ready(0))
    await until(lambda: acked == [key(0)])
    await put(second, ready(1))
    assert [received.key for received in await take(inlet, 1)] == [key(1)]
    await inlet.close()


async def test_a_row_is_kept_before_its_consumer_or_its_sender_hears_of_it(net: Net) -> None:
    seen: list[str] = []
    outlet = Outlet("ready", on_acked=lambda _: seen.append("acked"))
    hello = this_incarnation(roles={"run": 1}, worker="w")
    inlet = Inlet(net.network, "ready", hello, slots=1, received=lambda row: seen.append("kept"))
    inlet.set_upstreams([await serve(net, outlet)])
    taking = asyncio.ensure_future(take(inlet, 1))
    taking.add_done_callback(lambda _: seen.append("taken"))
    await put(outlet, ready(0))
    await until(lambda: len(seen) == 3)
    assert seen[0] == "kept"
    await inlet.close()


async def test_a_closed_stage_ends_its_streams_and_refuses_new_consumers(net: Net) -> None:
    outlet = Outlet("ran")
    location = await serve(net, outlet)
    inlet = inlet_of(net, "ran", location)
    await until(lambda: inlet.num_upstreams == 1)
    await outlet.close()
    await until(lambda: inlet.num_upstreams == 0)
    await asyncio.sleep(0.3)
    assert inlet.num_upstreams == 0, "it dials on, in vain"
    await inlet.close()


async def test_who_may_take_nothing_more_gives_no_credit_until_it_may(net: Net) -> None:
    outlet, may = Outlet("ran"), [False]
    location = await serve(net, outlet)
    inlet = Inlet(
        net.network,
        "ran",
        this_incarnation(roles={"run": 1}, worker="w"),
        slots=2,
        may_take=lambda: may[0],
    )
    inlet.set_upstreams([location])
    await put(outlet, ran(0))
    await until(lambda: inlet.num_upstreams == 1)
    await asyncio.sleep(0.2)
    assert inlet.in_hand == 0
    may[0] = True
    assert [received.key for received in await take(inlet, 1)] == [key(0)]
    await inlet.close()
