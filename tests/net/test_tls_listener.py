"""The listener for other hosts: what a stranger gets, and what it costs."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

from prorl.flight import FlightNetwork, server
from prorl.net.tls import Authority, Caller, Credentials, LiveCredentials
from prorl.protocols import Channel
from prorl.service.http import tls_listener
from prorl.service.http.tls_listener import TlsListener
from tests.net.test_matrix import EMPTY
from tests.waiting import wait_until

pytest.importorskip("cryptography", reason="connections between hosts need the extra `tls`")


class Echo:
    """An app that answers what it hears, and remembers who called."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []

    def take(self, connection: socket.socket, caller: Caller) -> None:
        self.callers.append(caller)
        threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    @staticmethod
    def _answer(connection: socket.socket) -> None:
        with connection:
            while data := connection.recv(65536):
                connection.sendall(data)


@contextmanager
def opened(
    credentials: Credentials | LiveCredentials, app: Echo
) -> Iterator[tuple[int, TlsListener]]:
    with (
        socket.create_server(("127.0.0.1", 0), backlog=1024) as listener,
        TlsListener(listener, credentials, app.take) as made,
    ):
        yield listener.getsockname()[1], made


def ask(
    port: int, credentials: Credentials, words: bytes = b"hello", source: str = "127.0.0.1"
) -> bytes:
    """Returns the app's answer to a caller from this address."""
    with (
        socket.create_connection(("127.0.0.1", port), 10, (source, 0)) as plain,
        credentials.client_context().wrap_socket(plain, server_hostname="service.prorl") as secure,
    ):
        secure.sendall(words)
        answer = b""
        while len(answer) < len(words):
            answer += secure.recv(1 << 20)
        return answer


def test_whoever_has_a_certificate_is_carried_through_as_who_it_is(tmp_path: Path) -> None:
    authority, app = Authority.of(tmp_path), Echo()
    with opened(authority.credentials("service"), app) as (port, _):
        assert ask(port, authority.credentials("trainer")) == b"hello"
        words = bytes(range(256)) * 800
        assert ask(port, authority.credentials("node", node="n1"), words) == words
    assert app.callers == [Caller("trainer"), Caller("node", "n1")]


def trusting(context: ssl.SSLContext) -> ssl.SSLContext:
    """It believes whoever answers."""
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def says(port: int, context: ssl.SSLContext) -> bytes:
    """Returns what a TLS client without our certificate receives."""
    try:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            context.wrap_socket(plain) as secure,
        ):
            secure.sendall(b"GET / HTTP/1.1\r\n\r\n")
            return secure.recv(4096)
    except OSError:
        return b""


def test_a_stranger_learns_nothing_and_reaches_nobody(tmp_path: Path) -> None:
    authority, app = Authority.of(tmp_path), Echo()
    stranger = Authority.of(tmp_path / "other").credentials("trainer")
    with opened(authority.credentials("service"), app) as (port, _):
        for words in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 400, b"SSH-2.0-x\r\n"):
            with socket.create_connection(("127.0.0.1", port), 10) as plain:
                plain.sendall(words)
                received = b"".join(iter(lambda: plain.recv(4096), b""))
                assert len(received) <= 7, "a TLS alert at most"
        for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), stranger.client_context()):
            assert says(port, trusting(context)) == b""
        assert ask(port, authority.credentials("trainer")) == b"hello"
    assert app.callers == [Caller("trainer")]


def test_thousands_of_idle_connections_are_no_burden(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are of one address, which takes its own places alone, and for a handshake's time."""
    monkeypatch.setattr(tls_listener, "HANDSHAKE_S", 1.0)
    authority, app = Authority.of(tmp_path), Echo()
    before = threading.active_count()
    with ExitStack() as stack, opened(authority.credentials("service"), app) as (port, made):
        began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        most = 0
        for _ in range(2000):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 10))
            most = max(most, made._connections["127.0.0.1"])
        assert 0 < most <= tls_listener.ADDRESS_CONNECTIONS
        assert ask(port, authority.credentials("trainer"), source="127.0.0.2") == b"hello"
        wait_until(lambda: not made._connections, "their time is over")
        assert ask(port, authority.credentials("viewer")) == b"hello"
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - began
        assert grown_kib < 160 << 10, "0.33 MiB each would be 660"
    assert threading.active_count() <= before + 2


async def test_new_credentials_are_presented_while_streams_continue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Over HTTPS from the next handshake on; over Flight at the same port, soon."""
    monkeypatch.setattr(server, "LOOK_S", 0.2)
    authority, path, app = Authority.of(tmp_path), tmp_path / "own.json", Echo()
    authority.credentials("service", days=1).write(path)
    live, trainer = LiveCredentials(path), authority.credentials("node", node="n1")

    async def echo(channel: Channel) -> None:
        while (batch := await channel.receive()) is not None:
            channel.send(batch)

    def serial(port: int) -> int:
        with (
            socket.create_connection(("127.0.0.1", port), 10) as plain,
            trainer.client_context().wrap_socket(plain, server_hostname="service.prorl") as tls,
        ):
            certificate = tls.getpeercert()
            assert certificate is not None
            return int(str(certificate["serialNumber"]), 16)

    async with FlightNetwork("t", live) as network, FlightNetwork("t", trainer) as dialler:
        location = await network.listen("grpc+tls://127.0.0.1:0", {"control": (echo, EMPTY, EMPTY)})
        stream = await dialler.dial(location, "control", {"worker": "n1/run-0"}, EMPTY, EMPTY)
        with opened(live, app) as (port, _):
            flight_port = int(location.rpartition(":")[2])
            before = await asyncio.to_thread(serial, port)
            assert await asyncio.to_thread(serial, flight_port) == before
            authority.credentials("service", days=300).write(path)
            after = await asyncio.to_thread(serial, port)
            assert after != before
            async with asyncio.timeout(60):
                while True:
                    try:
                        if await asyncio.to_thread(serial, flight_port) == after:
                            break
                    except (ConnectionError, ssl.SSLEOFError):  # its port opens anew just now
                        pass
                    await asyncio.sleep(0.1)
        batch = pa.record_batch({"x": pa.array([7], pa.int64())}, schema=EMPTY)
        stream.send(batch)
        assert (await asyncio.wait_for(stream.receive(), 60)) == batch, "the old one goes on"
        again = await dialler.dial(location, "control", {"worker": "n1/run-0"}, EMPTY, EMPTY)
        again.send(batch)
        assert (await asyncio.wait_for(again.receive(), 60)) == batch
