"""The network's proxy by real sockets: what it passes on, what it refuses, and its bounds."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest

from prorl.network_policy import ALLOWLIST, PUBLIC, Address, NetworkPolicy, Target
from prorl.sandbox.node import proxy, proxy_rules
from prorl.sandbox.node.proxy import Proxy, Upstream
from prorl.sandbox.node.proxy_rules import ProxyRules
from tests.waiting import until

SITE = NetworkPolicy(ALLOWLIST, ("site.test", "*.sub.test"))


class Server:
    """A server of the host: repeats what it is sent, or answers HTTP."""

    def __init__(self) -> None:
        self.requests: list[bytes] = []
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            first = await reader.readline()
            self.requests.append(first)
            if not first.endswith(b"HTTP/1.1\r\n"):
                writer.write(b"said " + first)
                while data := await reader.read(1000):
                    writer.write(data)
                writer.write(b"end")
            else:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                if b"content-length: 5" in self.requests[-1].lower():
                    self.requests.append(await reader.readexactly(5))
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok")
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class Names:
    """A resolver: of several answers to a name each question gets the next one."""

    def __init__(self, names: Mapping[str, Sequence[Sequence[str]]]) -> None:
        self._names = {name: list(answers) for name, answers in names.items()}
        self.questions: list[str] = []

    async def __call__(self, host: str, port: int) -> list[Address]:
        self.questions.append(host)
        answers = self._names.get(host, [[host]])
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        return [ipaddress.ip_address(address) for address in answer]


class Ways:
    """A proxy with one sandbox's port, and a server that it may reach as `site.test`."""

    def __init__(self, proxy: Proxy, port: int, server: Server, names: Names) -> None:
        self.proxy, self.port, self.server, self.names = proxy, port, server, names

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def ask(self, request: bytes) -> bytes:
        reader, writer = await self.connect()
        writer.write(request)
        answer = await reader.read()
        writer.close()
        return answer

    async def status(self, target: str) -> int:
        request = f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        reader, writer = await self.connect()
        writer.write(request)
        line = await reader.readline()
        writer.close()
        return int(line.split()[1])

    def refusals(self) -> list[tuple[Any, ...]]:
        return self.proxy.ports["box"].take_refusals()


@asynccontextmanager
async def serving(
    network: NetworkPolicy = SITE,
    names: Mapping[str, Sequence[Sequence[str]]] | None = None,
    *,
    closed: Sequence[Target] = (),
    upstream: str = "",
    resolves: bool = False,
) -> AsyncIterator[Ways]:
    server = Server()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        resolver = Names({"site.test": [["127.0.0.1"]], **(names or {})})
        mirrors = [Target("site.test", server.port)]
        rules = ProxyRules(mirrors, closed, resolver)
        made = Proxy(rules, Upstream.of(upstream, resolves))
        listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        port = listener.getsockname()[1]
        made.open("box", listener, network)
        try:
            yield Ways(made, port, server, resolver)
        finally:
            tasks = set(made.ports["box"].tasks)
            made.close("box")
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_tunnel_passes_bytes_both_ways_until_both_ends_are_done() -> None:
    async with serving() as ways:
        request = f"CONNECT site.test:{ways.server.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        reader, writer = await ways.connect()
        writer.write(request + b"hello\n")  # behind the request, before its answer
        assert await reader.readline() == b"HTTP/1.1 200 Connection established\r\n"
        assert await reader.readline() == b"\r\n"
        big = os.urandom(3 * proxy.CHUNK_BYTES)
        writer.write(big)
        writer.write_eof()
        assert await reader.read() == b"said hello\n" + big + b"end"
        writer.close()
        assert ways.refusals() == []


async def test_a_plain_request_goes_to_the_host_that_was_checked() -> None:
    """A second one behind it, for another host, goes nowhere; nor does what is the proxy's."""
    async with serving() as ways:
        port = ways.server.port
        head = f"POST http://site.test:{port}/a?b=1 HTTP/1.1\r\nHost: other.test\r\n"
        fields = "Proxy-Authorization: secret\r\nConnection: X-Own\r\nX-Own: 1\r\nX-Kept: 2\r\n"
        body = "Content-Length: 5\r\n\r\n12345"
        behind = f"GET http://inner.test:{port}/second HTTP/1.1\r\nHost: inner.test\r\n\r\n"
        answer = await ways.ask(f"{head}{fields}{body}{behind}".encode())
        assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
        assert answer.endswith(b"ok")
        line, headers, content = ways.server.requests
        assert (line, content) == (b"POST /a?b=1 HTTP/1.1\r\n", b"12345")
        assert f"host: site.test:{port}\r\n".encode() in headers.lower()
        headers = headers.lower()
        assert b"x-kept: 2" in headers
        assert not any(word in headers for word in (b"secret", b"x-own", b"other.test"))


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        ("GET / HTTP/1.1\r\nHost: site.test\r\n\r\n", 400),
        ("GET https://site.test/ HTTP/1.1\r\nHost: site.test\r\n\r\n", 400),
        ("GET ftp://site.test/ HTTP/1.1\r\nHost: site.test\r\n\r\n", 400),
        ("CONNECT site.test HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("CONNECT site.test:99999 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("CONNECT :443 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
        ("\x16\x03\x01 a TLS hello\r\n\r\n", 400),
        (f"CONNECT site.test:443 HTTP/1.1\r\nX: {'a' * 2 * proxy.MAX_HEAD_BYTES}", 431),
    ],
)
async def test_what_is_no_request_to_a_proxy_is_answered(request_text: str, status: int) -> None:
    async with serving() as ways:
        answer = await ways.ask(request_text.encode("latin-1"))
        assert answer.startswith(f"HTTP/1.1 {status} ".encode())
        assert b"prorl: " in answer
        assert ways.server.requests == []


async def test_a_name_is_resolved_once_and_its_checked_address_is_dialled() -> None:
    """An answer that changes between check and connection leads nowhere; nor do mixed ones."""
    names: dict[str, list[list[str]]] = {
        "turning.sub.test": [["192.0.2.1"], ["127.0.0.1"]],
        "inner.sub.test": [["10.0.0.1", "fd00::1"]],
        "gone.sub.test": [[]],
    }
    async with serving(names=names) as ways:
        assert await ways.status(f"turning.sub.test:{ways.server.port}") == 403
        assert ways.names.questions == ["turning.sub.test"]
        assert await ways.status("inner.sub.test:443") == 403
        assert await ways.status("gone.sub.test:443") == 502
        assert [refusal[2] for refusal in ways.refusals()] == ["private", "private"]
        assert ways.server.requests == []


async def test_a_name_that_is_not_allowed_is_never_resolved() -> None:
    async with serving() as ways:
        assert await ways.status("secret-in-a-name.evil.test:443") == 403
        assert await ways.status("sub.test:443") == 403
        assert ways.names.questions == []
        assert [refusal[2] for refusal in ways.refusals()] == ["not allowed"] * 2


async def test_hosts_of_the_service_stay_closed_by_name_and_by_address() -> None:
    """Also to a mirror of that port, and to public addresses, which only the service's name gives
    away.
    """
    names = {"model.test": [["8.8.8.8"]], "alias.test": [["8.8.8.8"]]}
    closed = [Target("model.test", 8000)]
    async with serving(NetworkPolicy(PUBLIC), names, closed=closed) as ways:
        ways.proxy.rules.close_targets([Target("site.test", ways.server.port)])
        for host in ("model.test:8000", "alias.test:80", f"site.test:{ways.server.port}"):
            assert await ways.status(host) == 403
        assert {refusal[2] for refusal in ways.refusals()} == {"service"}


async def test_addresses_of_the_node_itself_and_the_mail_port_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The node's own address may be a public one; here loopback stands for it."""
    monkeypatch.setattr(proxy_rules, "closed_reason", lambda address: "")
    async with serving(NetworkPolicy(PUBLIC)) as ways:
        assert await ways.status(f"127.0.0.1:{ways.server.port}") == 403
        assert await ways.status("mail.test:25") == 403
        assert [refusal[2] for refusal in ways.refusals()] == ["node", "port"]


async def test_refusals_are_counted_and_bounded() -> None:
    async with serving() as ways:
        for i in range(proxy.MAX_REFUSALS + 3):
            await ways.status(f"host{i}.test:443")
        await ways.status("host0.test:443")
        refusals = ways.refusals()
        assert len(refusals) == proxy.MAX_REFUSALS + 1
        assert refusals[0] == ("host0.test", 443, "not allowed", 2)
        assert refusals[-1] == (proxy.OTHERS, 0, "", 3)
        assert ways.refusals() == []


async def test_a_sandbox_has_a_limit_of_connections_and_the_next_waits() -> None:
    async with serving() as ways:
        target = f"CONNECT site.test:{ways.server.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        opened = [await ways.connect() for _ in range(proxy.MAX_CONNECTIONS + 1)]
        for _, writer in opened:
            writer.write(target)
        for reader, _ in opened[:-1]:
            assert b" 200 " in await reader.readline()
        waiting = asyncio.create_task(opened[-1][0].readline())
        port = ways.proxy.ports["box"]
        assert len(port.tasks) == 1 + proxy.MAX_CONNECTIONS
        assert port.slots.locked()
        assert not waiting.done()
        opened[0][1].close()
        assert b" 200 " in await waiting
        for _, writer in opened:
            writer.close()


async def test_begun_connections_are_paced() -> None:
    """After a burst a sandbox begins RATE a second, counted on a clock of the test's."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = proxy.SandboxPort(listener, SITE, 0.0)
    pauses = [port.pause_s(0.0) for _ in range(int(proxy.BURST) + 10)]
    assert set(pauses[: int(proxy.BURST)]) == {0.0}
    assert pauses[-1] == pytest.approx(10 / proxy.RATE)
    assert port.pause_s(3600.0) == 0.0
    port.close()


async def test_silence_ends_a_connection_before_and_behind_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy, "HEAD_S", 0.05)
    monkeypatch.setattr(proxy, "IDLE_S", 0.05)
    async with serving() as ways:
        assert (await ways.ask(b"CONNECT site")).startswith(b"HTTP/1.1 408 ")
        request = f"CONNECT site.test:{ways.server.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        assert (await ways.ask(request)).startswith(b"HTTP/1.1 200 ")  # and then the end


async def test_what_nobody_takes_is_not_collected() -> None:
    """A server that reads nothing holds its client back: one chunk is kept, beside the kernel's
    buffers.
    """
    slow_server = socket.create_server(("127.0.0.1", 0))
    slow_server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
    with slow_server:
        port = slow_server.getsockname()[1]
        async with serving(names={"slow.test": [["127.0.0.1"]]}) as ways:
            ways.proxy.rules = ProxyRules([Target("slow.test", port)], (), ways.names)
            loop = asyncio.get_running_loop()
            with socket.socket() as client:
                client.setblocking(False)
                await loop.sock_connect(client, ("127.0.0.1", ways.port))
                request = f"CONNECT slow.test:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
                await loop.sock_sendall(client, request)
                assert b" 200 " in await loop.sock_recv(client, 1000)
                sent, num_full = 0, 0
                while num_full < 20:  # until the kernel takes no more for a while
                    try:
                        sent, num_full = sent + client.send(bytes(1 << 16)), 0
                    except BlockingIOError:
                        num_full += 1
                        await asyncio.sleep(0.01)
                assert sent < 16 << 20


async def test_a_closed_port_ends_its_connections() -> None:
    async with serving() as ways:
        request = f"CONNECT site.test:{ways.server.port} HTTP/1.1\r\nHost: x\r\n\r\n".encode()
        reader, writer = await ways.connect()
        writer.write(request)
        assert b" 200 " in await reader.readline()
        spare = ways.proxy.ports["box"]
        spare.close()
        assert await reader.read() == b"\r\n"
        writer.close()


@pytest.mark.parametrize("resolves", [False, True])
async def test_the_nodes_own_proxy_gets_the_checked_address_or_the_name(resolves: bool) -> None:
    """The proxy gets the name of a host that only it can resolve, where the operator says so."""
    targets: list[bytes] = []

    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        targets.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 200 Connection established\r\nX: 1\r\n\r\nearly")
        writer.write_eof()
        await reader.read()
        writer.close()

    async with await asyncio.start_server(upstream, "127.0.0.1", 0) as listening:
        at = listening.sockets[0].getsockname()[1]
        names = {"a.sub.test": [["8.8.8.8"]], "inner.sub.test": [["10.0.0.1"]]}
        url = f"http://user:p%40ss@127.0.0.1:{at}"
        async with serving(names=names, upstream=url, resolves=resolves) as ways:
            answer = await ways.ask(b"CONNECT a.sub.test:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.endswith(b"\r\n\r\nearly")
            host = b"a.sub.test" if resolves else b"8.8.8.8"
            assert targets[0].startswith(b"CONNECT %s:443 HTTP/1.1\r\n" % host)
            assert b"Proxy-Authorization: Basic dXNlcjpwQHNz\r\n" in targets[0]
            assert await ways.status("inner.sub.test:443") == 403
            assert len(targets) == 1


async def test_a_refusal_of_the_nodes_own_proxy_is_reported() -> None:
    async def upstream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(upstream, "127.0.0.1", 0) as listening:
        url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        names = {"a.sub.test": [["8.8.8.8"]]}
        async with serving(names=names, upstream=url) as ways:
            answer = await ways.ask(b"CONNECT a.sub.test:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 502 the node's own proxy answers 407")


async def test_a_network_that_changes_counts_from_the_next_connection() -> None:
    async with serving() as ways:
        ways.proxy.ports["box"].network = NetworkPolicy()
        assert await ways.status(f"site.test:{ways.server.port}") == 403
        assert ways.refusals()[0][2] == "no-network"
        ways.proxy.ports["box"].network = SITE
        await until(lambda: not ways.proxy.ports["box"].slots.locked(), "room")
        assert await ways.status(f"site.test:{ways.server.port}") == 200
