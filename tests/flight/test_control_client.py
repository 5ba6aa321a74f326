"""The worker's control client against a scripted gateway: one body over both networks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pyarrow as pa
import pytest

from prorl.control import (
    CommitCursor,
    ControlRow,
    Endpoints,
    Kind,
    Problem,
    Released,
    Reserve,
    Reserved,
    Started,
    Stats,
    Welcome,
    from_batch,
    to_batch,
)
from prorl.errors import ConflictError, UnavailableError
from prorl.flight import ControlClient, control_client, this_incarnation
from prorl.flight.control_client import send_rows
from prorl.protocols import Channel
from prorl.schema import CONTROL
from prorl.types import AttemptKey
from tests.flight.conftest import Net
from tests.flight.work_rows import key
from tests.waiting import until


class Gateway:
    """Writes down what it hears; answers hello, and requests by `answer`."""

    def __init__(self, answer: Callable[[ControlRow], ControlRow | None]) -> None:
        self.answer = answer
        self.received: list[ControlRow] = []
        self.num_sessions = 0
        self.channel: Channel | None = None
        self.batches: list[object] = []

    async def accept(self, channel: Channel) -> None:
        self.num_sessions += 1
        self.channel = channel
        while (batch := await channel.receive()) is not None:
            self.batches.append(batch)
            for row in from_batch(batch):
                self.received.append(row)
                self.reply(channel, row)

    def reply(self, channel: Channel, row: ControlRow) -> None:
        if row.kind is Kind.HELLO:
            hello = row.read_hello("hello")
            welcome = Welcome(
                endpoints={"init": ("here",)}, refused=hello.in_flight.get("run", ())[:1]
            )
            channel.send(to_batch([ControlRow.of(welcome, re=row.seq)]))
        elif row.kind in (Kind.RESERVE, Kind.CURSOR):
            answer = self.answer(row)
            if answer is not None:
                channel.send(to_batch([answer]))

    def command(self, *rows: ControlRow) -> None:
        assert self.channel is not None
        self.channel.send(to_batch(rows))

    async def hang_up(self) -> None:
        assert self.channel is not None
        await self.channel.close()

    def kinds(self) -> list[Kind]:
        return [row.kind for row in self.received if row.kind is not Kind.STATS]


@asynccontextmanager
async def joined(
    net: Net,
    gateway: Gateway,
    commands: list[ControlRow],
    attempt_keys: Callable[[], list[AttemptKey]] = list,
    remote: bool = False,
) -> AsyncIterator[ControlClient]:
    location = await net.network.listen(
        net.name("gateway"), {"control": (gateway.accept, CONTROL, CONTROL)}
    )
    identity = this_incarnation(roles={"run": 4}, worker="run-0", location="there", remote=remote)
    on = dict.fromkeys(
        (Kind.CANCEL, Kind.DRAIN, Kind.ENDPOINTS, Kind.WELCOME, Kind.VERSION), commands.append
    )
    client = ControlClient(
        *(net.network, location, identity),
        attempts=lambda: {"run": attempt_keys()},
        stats=lambda: {"run": Stats(busy=1)},
        on=on,
    )
    client.start()
    try:
        await asyncio.wait_for(client.welcomed.wait(), 30)
        yield client
    finally:
        await client.close()


def echo(row: ControlRow) -> ControlRow:
    """Grants what is asked for."""
    return ControlRow.of(Reserved(granted=row.read(Reserve).attempts), re=row.seq)


def reserve(n: int) -> Reserve:
    return Reserve(attempts=(key(n),))


async def test_rows_are_encoded_only_where_they_go_through_a_socket(net: Net) -> None:
    gateway, commands = Gateway(echo), list[ControlRow]()
    async with joined(net, gateway, commands) as client:
        assert await client.request(reserve(1)) == Reserved(granted=(key(1),))
        assert gateway.channel is not None
        kind = tuple if gateway.channel.is_local else pa.RecordBatch
        assert {type(batch) for batch in gateway.batches} == {kind}
        send_rows(gateway.channel, [ControlRow(kind=Kind.DRAIN)])
        await until(lambda: any(row.kind is Kind.DRAIN for row in commands))


async def test_hello_names_the_worker_and_its_attempts(net: Net) -> None:
    gateway, commands = Gateway(echo), list[ControlRow]()
    async with joined(net, gateway, commands, attempt_keys=lambda: [key(3), key(4, 2)]):
        hello = gateway.received[0]
        assert (hello.kind, hello.seq) == (Kind.HELLO, 1)
        payload = hello.read_hello("hello")
        assert payload.in_flight == {"run": (key(3), key(4, 2))}
        assert (payload.roles, payload.worker, payload.location) == ({"run": 4}, "run-0", "there")
        assert [row.kind for row in commands] == [Kind.WELCOME, Kind.ENDPOINTS]
        assert commands[0].read(Welcome).refused == (key(3),)
        assert commands[1].read(Endpoints).locations == {"init": ("here",)}


async def test_events_arrive_in_order_with_dense_seqs(net: Net) -> None:
    gateway = Gateway(echo)
    async with joined(net, gateway, []) as client:
        for n in range(50):
            client.emit(Started(), key(n), stage="run")
        await until(lambda: len(gateway.kinds()) == 51)
    assert [row.rollout_id for row in gateway.received if row.kind is Kind.STARTED] == list(
        range(50)
    )
    assert [row.seq for row in gateway.received] == list(range(1, len(gateway.received) + 1))


async def test_requests_get_their_replies_and_errors(net: Net) -> None:
    def answer(row: ControlRow) -> ControlRow:
        if row.kind is Kind.CURSOR:
            problem = Problem(message="cursor 9 is ahead")
            return ControlRow.of(problem, re=row.seq, code="conflict")
        return echo(row)

    async with joined(net, Gateway(answer), []) as client:
        answers = await asyncio.gather(*(client.request(reserve(n)) for n in range(10)))
        assert [answer.granted for answer in answers] == [(key(n),) for n in range(10)]
        with pytest.raises(ConflictError, match="cursor 9 is ahead"):
            await client.request(CommitCursor(consumer="c", seq=9), run_id="r")


async def test_after_a_loss_a_fresh_session_sends_unanswered_requests_again(net: Net) -> None:
    silent = True
    gateway = Gateway(lambda row: None if silent else echo(row))
    async with joined(net, gateway, []) as client:
        asking = [asyncio.ensure_future(client.request(reserve(n))) for n in range(3)]
        await until(lambda: gateway.kinds().count(Kind.RESERVE) == 3)
        silent = False
        gateway.received.clear()
        await gateway.hang_up()
        answers = await asyncio.wait_for(asyncio.gather(*asking), 30)
        assert [answer.granted for answer in answers] == [(key(n),) for n in range(3)]
        assert gateway.num_sessions == 2
        assert gateway.kinds()[:4] == [Kind.HELLO, Kind.RESERVE, Kind.RESERVE, Kind.RESERVE]
        assert [row.seq for row in gateway.received[:4]] == [1, 2, 3, 4]


async def test_requests_made_without_a_session_wait_for_the_next_session(net: Net) -> None:
    gateway = Gateway(echo)
    identity = this_incarnation(roles={"store": 1}, worker="store-0")
    client = ControlClient(net.network, net.name("gateway"), identity, on={})
    client.start()
    asking = asyncio.ensure_future(client.request(reserve(1)))
    client.emit(Released(), key(1))
    await asyncio.sleep(0.05)
    await net.network.listen(net.name("gateway"), {"control": (gateway.accept, CONTROL, CONTROL)})
    assert (await asyncio.wait_for(asking, 30)).granted == (key(1),)
    assert Kind.RELEASED not in gateway.kinds()
    await client.close()


async def test_closing_sends_the_last_events_and_fails_open_requests(net: Net) -> None:
    gateway = Gateway(lambda row: None)
    async with joined(net, gateway, []) as client:
        asking = asyncio.ensure_future(client.request(reserve(1)))
        await asyncio.sleep(0)
        client.emit(Released(), key(9), stage="run")
    with pytest.raises(UnavailableError, match="closed"):
        await asking
    await until(lambda: Kind.RELEASED in gateway.kinds())


async def test_heartbeats_carry_the_stats_and_come_less_often_from_other_hosts(
    net: Net, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway has hundreds of those."""
    monkeypatch.setattr(control_client, "HEARTBEAT_S", 0.01)
    monkeypatch.setattr(control_client, "FAR_HEARTBEAT_S", 60.0)
    gateway = Gateway(echo)

    def beats() -> list[ControlRow]:
        return [row for row in gateway.received if row.kind is Kind.STATS]

    async with joined(net, gateway, [], remote=True):
        await until(lambda: len(beats()) == 1)
        await asyncio.sleep(0.2)
        (beat,) = beats()
        assert (beat.stage, beat.read(Stats)) == ("run", Stats(busy=1))
