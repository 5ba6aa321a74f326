"""Channels: one body over those inside one loop and those through a socket."""

from __future__ import annotations

import asyncio

import pyarrow as pa
import pytest

from prorl.errors import ConflictError, NotFoundError, SchemaError, UnavailableError
from prorl.flight import FlightNetwork
from prorl.protocols import Channel
from prorl.schema import CONTROL, EDGE_BACK, LEASED
from prorl.schema.fields import SCHEMA_VERSION
from tests.flight.conftest import Net, Sockets, flight_threads

NUMBERS = pa.schema(
    [pa.field("n", pa.int64(), nullable=False)],
    metadata={b"prorl.schema_version": str(SCHEMA_VERSION).encode()},
)


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.int64())], schema=NUMBERS)


async def values(channel: Channel, count: int) -> list[int]:
    numbers: list[int] = []
    while len(numbers) < count:
        got = await channel.receive()
        assert got is not None
        numbers += got.column("n").to_pylist()
    return numbers


async def echo(channel: Channel) -> None:
    while (got := await channel.receive()) is not None:
        channel.send(got)


async def connect(net: Net, hello: dict[str, object] | None = None) -> Channel:
    location = await net.network.listen(net.name("a"), {"echo": (echo, NUMBERS, NUMBERS)})
    return await net.network.dial(location, "echo", hello or {"worker": "w"}, NUMBERS, NUMBERS)


async def test_batches_arrive_in_order_in_both_directions(net: Net) -> None:
    channel = await connect(net)
    for n in range(100):
        channel.send(batch(n, -n))
    expected = [value for n in range(100) for value in (n, -n)]
    assert await values(channel, 200) == expected


async def test_what_a_process_serves_itself_it_reaches_without_the_socket(net: Net) -> None:
    """The route stays on the Flight server, where others dial it."""
    channel, through_socket = await connect(net), isinstance(net.network, Sockets)
    channel.send(batch(1))
    assert await values(channel, 1) == [1]
    assert channel.is_local is not through_socket
    assert bool(flight_threads()) is through_socket
    async with FlightNetwork(token="secret") as other:
        away = await other.dial(net.name("a"), "echo", {}, NUMBERS, NUMBERS)
        away.send(batch(2))
        assert (await values(away, 1), away.is_local) == ([2], False)
        await away.close()


async def test_parts_of_a_process_serve_their_routes_at_a_single_location(net: Net) -> None:
    location = await net.network.listen(net.name("a"), {"echo": (echo, NUMBERS, NUMBERS)})
    assert await net.network.listen(location, {"more": (echo, NUMBERS, NUMBERS)}) == location
    channel = await net.network.dial(location, "more", {}, NUMBERS, NUMBERS)
    channel.send(batch(3))
    assert await values(channel, 1) == [3]
    with pytest.raises(UnavailableError, match="this process does already"):
        await net.network.listen(location, {"more": (echo, NUMBERS, NUMBERS)})


async def test_the_handler_sees_the_hello(net: Net) -> None:
    seen: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def accept(channel: Channel) -> None:
        seen.set_result(channel.peer)
        await channel.receive()

    location = await net.network.listen(net.name("a"), {"p": (accept, NUMBERS, NUMBERS)})
    channel = await net.network.dial(
        location, "p", {"worker": "run-0", "slots": 3}, NUMBERS, NUMBERS
    )
    assert await seen == {"worker": "run-0", "slots": 3, "schema_version": SCHEMA_VERSION}
    await channel.close()


async def test_another_version_is_refused_with_clear_words(net: Net) -> None:
    with pytest.raises(
        SchemaError, match=f"schema version {SCHEMA_VERSION + 1}; expected version {SCHEMA_VERSION}"
    ):
        await connect(net, {"worker": "w", "schema_version": SCHEMA_VERSION + 1})


async def test_the_dialler_compares_the_listeners_version_too(net: Net) -> None:
    newer = NUMBERS.with_metadata({b"prorl.schema_version": str(SCHEMA_VERSION + 1).encode()})
    location = await net.network.listen(net.name("a"), {"echo": (echo, NUMBERS, newer)})
    with pytest.raises(SchemaError, match="schema version"):
        await net.network.dial(location, "echo", {}, NUMBERS, NUMBERS)


@pytest.mark.parametrize(("sends", "receives"), [(EDGE_BACK, CONTROL), (CONTROL, LEASED)])
async def test_other_columns_are_refused_by_name(
    net: Net, sends: pa.Schema, receives: pa.Schema
) -> None:
    location = await net.network.listen(net.name("a"), {"echo": (echo, EDGE_BACK, LEASED)})
    with pytest.raises(SchemaError, match="differs in"):
        await net.network.dial(location, "echo", {}, sends, receives)


async def test_a_handler_that_raises_refuses_with_its_error(net: Net) -> None:
    async def refuse(channel: Channel) -> None:
        raise ConflictError("worker run-0 is taken", "another name", "choose one")

    location = await net.network.listen(net.name("a"), {"p": (refuse, NUMBERS, NUMBERS)})
    with pytest.raises(
        ConflictError, match="worker run-0 is taken; expected another name; choose one"
    ):
        await net.network.dial(location, "p", {}, NUMBERS, NUMBERS)


async def test_an_unknown_route_and_a_silent_location(net: Net) -> None:
    location = await net.network.listen(net.name("a"), {"echo": (echo, NUMBERS, NUMBERS)})
    with pytest.raises(NotFoundError, match="no route nowhere; served: echo"):
        await net.network.dial(location, "nowhere", {}, NUMBERS, NUMBERS)
    with pytest.raises(UnavailableError):
        await net.network.dial(net.name("b"), "echo", {}, NUMBERS, NUMBERS)


async def test_what_was_sent_before_close_arrives(net: Net) -> None:
    got: list[int] = []
    ended = asyncio.Event()

    async def accept(channel: Channel) -> None:
        while (batch := await channel.receive()) is not None:
            got.extend(batch.column("n").to_pylist())
        ended.set()

    location = await net.network.listen(net.name("a"), {"p": (accept, NUMBERS, NUMBERS)})
    channel = await net.network.dial(location, "p", {}, NUMBERS, NUMBERS)
    for n in range(1000):
        channel.send(batch(n))
    await channel.close()
    await asyncio.wait_for(ended.wait(), 60)
    assert got == list(range(1000))


async def test_close_is_idempotent_and_later_sends_are_dropped(net: Net) -> None:
    channel = await connect(net)
    await channel.close()
    await channel.close()
    channel.send(batch(1))
    assert await channel.receive() is None


async def test_the_stream_ends_when_the_handler_returns(net: Net) -> None:
    async def send_single(channel: Channel) -> None:
        channel.send(batch(1))

    location = await net.network.listen(net.name("a"), {"p": (send_single, NUMBERS, NUMBERS)})
    channel = await net.network.dial(location, "p", {}, NUMBERS, NUMBERS)
    assert await values(channel, 1) == [1]
    assert await channel.receive() is None
    await channel.close()


async def test_closing_the_network_ends_streams_and_handlers(net: Net) -> None:
    cancelled = asyncio.Event()

    async def wait_for_ever(channel: Channel) -> None:
        channel.send(batch(1))
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    location = await net.network.listen(net.name("a"), {"p": (wait_for_ever, NUMBERS, NUMBERS)})
    channel = await net.network.dial(location, "p", {}, NUMBERS, NUMBERS)
    assert await values(channel, 1) == [1]
    await net.network.close()
    await net.network.close()
    assert cancelled.is_set()
    assert await channel.receive() is None
