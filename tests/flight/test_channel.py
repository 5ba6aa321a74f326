"""Tests that need real processes and sockets: killed peers, tokens, threads, forks, reads."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.flight as fl
import pytest

from prorl.errors import ConfigError, ConflictError, UnavailableError
from prorl.flight import FlightReads
from prorl.flight.refusals import from_flight
from prorl.flight.wire import call_options, open_client
from prorl.protocols import Channel
from tests.flight.conftest import Sockets, flight_threads, num_sockets
from tests.flight.test_network import NUMBERS, batch, echo
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("no_leaks")


@asynccontextmanager
async def peer(verb: str, location: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A ready peer process, killed at the end."""
    command = (sys.executable, "-m", "tests.flight.children.peer", verb, location)
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert await process.stdout.readline() == b"ready\n"
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.parametrize("scheme", ["unix", "tcp"])
async def test_the_dialler_notices_a_killed_listener_at_once(tmp_path: Path, scheme: str) -> None:
    location = f"grpc+unix://{tmp_path}/s" if scheme == "unix" else "grpc://127.0.0.1:47113"
    async with Sockets(token="secret") as network, peer("listen", location) as process:
        channel = await network.dial(location, "p", {}, NUMBERS, NUMBERS)
        assert await channel.receive() is not None
        receiving = asyncio.ensure_future(channel.receive())
        await asyncio.sleep(0.05)
        process.kill()
        # by its socket: the first ping of keepalive is sent after 20 s
        assert await asyncio.wait_for(receiving, 19) is None
        channel.send(batch(1))


async def test_the_listener_notices_a_killed_dialler_at_once(tmp_path: Path) -> None:
    connected, lost = asyncio.Event(), asyncio.Event()

    async def accept(channel: Channel) -> None:
        assert await channel.receive() is not None
        connected.set()
        assert await channel.receive() is None
        lost.set()

    async with Sockets(token="secret") as network:
        location = await network.listen(
            f"grpc+unix://{tmp_path}/s", {"p": (accept, NUMBERS, NUMBERS)}
        )
        async with peer("dial", location) as process:
            await asyncio.wait_for(connected.wait(), 60)
            process.kill()
            await asyncio.wait_for(lost.wait(), 60)
        await until(lambda: flight_threads() == [])


async def test_no_thread_socket_or_file_remains(tmp_path: Path) -> None:
    before = num_sockets()
    async with Sockets() as network:
        location = await network.listen(
            f"grpc+unix://{tmp_path}/s", {"p": (echo, NUMBERS, NUMBERS)}
        )
        for _ in range(5):
            channel = await network.dial(location, "p", {}, NUMBERS, NUMBERS)
            channel.send(batch(1))
            assert await channel.receive() is not None
            await channel.close()
    assert flight_threads() == []
    assert os.listdir(tmp_path) == []
    await until(lambda: num_sockets() <= before)


async def test_the_socket_file_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    location = f"grpc+unix://{tmp_path}/s"
    async with peer("listen", location) as process:
        process.kill()
        await process.wait()
    assert os.listdir(tmp_path) == ["s"]
    async with Sockets() as network:
        await network.listen(location, {"p": (echo, NUMBERS, NUMBERS)})
        channel = await network.dial(location, "p", {}, NUMBERS, NUMBERS)
        channel.send(batch(1))
        assert await channel.receive() is not None


async def test_locations_that_cannot_be_served(tmp_path: Path) -> None:
    async with Sockets() as network, Sockets() as second:
        with pytest.raises(ConfigError, match="too long"):
            await network.listen(f"grpc+unix://{tmp_path}/{'x' * 120}", {})
        with pytest.raises(ConfigError, match="expected grpc"):
            await network.listen("http://127.0.0.1:0", {})
        location = await network.listen("grpc://127.0.0.1:0", {})
        with pytest.raises(UnavailableError, match="cannot listen at"):
            await second.listen(location, {})


async def test_a_bug_in_a_handler_leaves_an_id_and_no_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def broken(channel: Channel) -> None:
        raise KeyError("private detail")

    async with Sockets() as network:
        location = await network.listen(
            f"grpc+unix://{tmp_path}/s", {"p": (broken, NUMBERS, NUMBERS)}
        )
        with pytest.raises(UnavailableError, match=r"internal error [0-9a-f]{8}") as refused:
            await network.dial(location, "p", {}, NUMBERS, NUMBERS)
    assert "private detail" not in str(refused.value)
    assert "private detail" in caplog.text


async def test_reads_run_on_the_loop_and_keep_their_errors(tmp_path: Path) -> None:
    async def get(ticket: bytes) -> pa.Table:
        await asyncio.sleep(0)
        if ticket == b"ahead":
            raise ConflictError("cursor 9", "at most 4")
        return pa.Table.from_batches([batch(1, 2), batch(3)])

    async def describe(command: bytes) -> fl.FlightInfo:
        return fl.FlightInfo(
            NUMBERS, fl.FlightDescriptor.for_command(command), [fl.FlightEndpoint(b"t", [])], 3, -1
        )

    async def shout(body: bytes) -> bytes:
        return body.upper()

    async with Sockets(token="secret") as network:
        location = await network.listen(
            "grpc://127.0.0.1:0", {}, FlightReads(get=get, info=describe, actions={"shout": shout})
        )
        client, options = open_client(location), call_options("secret", 5)

        def read() -> tuple[pa.Table, int, bytes]:
            table = client.do_get(fl.Ticket(b"t"), options).read_all()
            info = client.get_flight_info(fl.FlightDescriptor.for_command(b"q"), options)
            (answer,) = client.do_action(fl.Action("shout", b"hi"), options)
            return table, info.total_records, answer.body.to_pybytes()

        table, num_records, answer = await asyncio.to_thread(read)
        assert (table.column("n").to_pylist(), num_records, answer) == ([1, 2, 3], 3, b"HI")

        def conflict() -> None:
            try:
                client.do_get(fl.Ticket(b"ahead"), options).read_all()
            except fl.FlightError as error:
                raise from_flight(error, "store") from None

        with pytest.raises(ConflictError, match="cursor 9; expected at most 4"):
            await asyncio.to_thread(conflict)
        client.close()


async def test_a_waiting_read_is_cancelled_when_its_client_goes(tmp_path: Path) -> None:
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def get(ticket: bytes) -> pa.Table:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()
        raise AssertionError("unreachable")

    async with Sockets() as network:
        location = await network.listen(f"grpc+unix://{tmp_path}/s", {}, FlightReads(get=get))
        with open_client(location) as client, pytest.raises(fl.FlightTimedOutError):
            await asyncio.to_thread(
                lambda: client.do_get(fl.Ticket(b""), call_options("", 0.3)).read_all()
            )
        assert started.is_set()
        await asyncio.wait_for(cancelled.wait(), 60)


async def test_an_idle_stream_survives_the_pings_of_keepalive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the server's idle messages gRPC ends the stream with "too many pings" after three of
    them.
    """
    monkeypatch.setattr("prorl.flight.channel.IDLE_S", 0.2)
    async with Sockets() as network:
        location = await network.listen("grpc://127.0.0.1:0", {"p": (echo, NUMBERS, NUMBERS)})
        monkeypatch.setattr(
            "prorl.flight.wire.KEEPALIVE",
            (("grpc.keepalive_time_ms", 1000), ("grpc.http2.max_pings_without_data", 0)),
        )
        channel = await network.dial(location, "p", {}, NUMBERS, NUMBERS)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(channel.receive(), 4.8)
        channel.send(batch(1))
        assert await channel.receive() is not None


def test_a_forked_child_gets_an_error_instead_of_hanging(tmp_path: Path) -> None:
    program = f"""
import asyncio, os
from prorl.flight import FlightNetwork
from prorl.errors import UserError
async def main():
    async with FlightNetwork() as network:
        await network.listen("grpc+unix://{tmp_path}/s", {{}})
asyncio.run(main())
pid = os.fork()
if pid == 0:
    try:
        asyncio.run(main())
    except UserError as error:
        os._exit(7 if "forked" in str(error) else 1)
    os._exit(2)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], check=True, timeout=60)
