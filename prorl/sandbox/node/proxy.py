"""The node's proxy: a process of its own, through which sandboxes reach what their tasks may reach.

    sandbox (no interface)              node
    127.0.0.1:3128  -- listener passed out --> proxy -- checked address --> host
                                        sandboxd says who may reach what, and asks what was refused

A sandbox speaks HTTP to it: `CONNECT HOST:PORT`, or `GET http://HOST/...`, one request a
connection, its end the connection's. Who connects is known by the listener. For each connection the
name is held against the policy, then resolved here, once, and an address that was checked is what
is dialled: neither a redirect, nor another spelling of an address, nor a name whose address changes
leads further. What is refused is a 403 whose reason phrase says why, and a row (`refusals`).

What comes from a sandbox is hostile, so none of it passes through a process that owns anything
else; this one has no rights beside the network, and yields the CPU to all others. Its bounds are
the constants below. Not promised: that a host which serves several sites (a CDN) shows only the one
that is named; that an upstream proxy which resolves names itself dials what was checked here.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import h11

from prorl.linux import calls
from prorl.network_policy import (
    MAX_NAME,
    UPSTREAM_VARIABLE,
    NetworkPolicy,
    Target,
    normal_name,
)
from prorl.sandbox.launch.spec import MESSAGE_BYTES
from prorl.sandbox.node.proxy_rules import (
    ForbiddenHost,
    ForbiddenHostError,
    ProxyReplyError,
    ProxyRules,
)
from prorl.sandbox.node.settings import PROXY_PORT
from prorl.waits import wait_limit_s

MAX_CONNECTIONS = 32
"""The limit of one sandbox; others wait in its listener's queue. Package managers keep 5 to 15."""
MAX_OPEN = 1024
"""The limit of all sandboxes together: 2,048 descriptors and 128 MiB of data in flight."""
CHUNK_BYTES = 64 << 10
"""In flight of one direction of a connection: read, written whole, then read again."""
MAX_HEAD_BYTES = 16 << 10
"""The limit of a request's line and headers, or of an upstream proxy's answer; clients send below 1
KiB.
"""
HEAD_S = wait_limit_s("proxy.head")
CONNECT_S = wait_limit_s("proxy.connect")
IDLE_S = wait_limit_s("proxy.idle")
RATE, BURST = 50.0, 200.0
"""Connections a second that one sandbox may begin, after so many at once: one costs about a
millisecond here, so a loop that asks for ever takes a twentieth of a core.
"""
MAX_RESOLUTIONS = 4
"""The resolutions of one sandbox at a time: names that answer slowly must not take all
RESOLVERS.
"""
MAX_REFUSALS = 32
"""Different ones that are kept for a sandbox; further ones count as OTHERS."""
OTHERS = "(others)"
LINGER_S = 1.0
"""For a client to take a refusal before its connection is reset under what it still sends."""
NOBODY = 65534


class Upstream(NamedTuple):
    """The proxy that the node itself must use."""

    target: Target
    authorization: str
    resolves: bool
    """True if it gets names, which it resolves itself, instead of addresses that were checked."""

    @classmethod
    def of(cls, url: str, resolves: bool) -> Upstream | None:
        """None for no URL; the config has checked what it says."""
        if not url:
            return None
        parts = urlsplit(url)
        user = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        token = f"Basic {base64.b64encode(user.encode()).decode()}" if parts.username else ""
        return cls(Target(parts.hostname or "", parts.port or PROXY_PORT), token, resolves)


class SandboxPort:
    """One sandbox at the proxy: its listener, its policy, its share."""

    def __init__(self, listener: socket.socket, network: NetworkPolicy, now: float) -> None:
        self.listener, self.network = listener, network
        self.slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self.resolutions = asyncio.Semaphore(MAX_RESOLUTIONS)
        self.tasks: set[asyncio.Task[None]] = set()
        """Accepting, and one for each connection."""
        self._refusals: dict[ForbiddenHost, int] = {}
        """The number of times that each was refused: at most MAX_REFUSALS hosts, the rest as
        OTHERS.
        """
        self._tokens, self._counted_at = BURST, now

    def pause_s(self, now: float) -> float:
        """Returns how long the next connection waits, which counts from now on."""
        self._tokens = min(BURST, self._tokens + (now - self._counted_at) * RATE) - 1
        self._counted_at = now
        return max(0.0, -self._tokens / RATE)

    def count(self, refusal: ForbiddenHost) -> None:
        if refusal not in self._refusals and len(self._refusals) >= MAX_REFUSALS:
            refusal = ForbiddenHost(OTHERS, 0, "")
        self._refusals[refusal] = self._refusals.get(refusal, 0) + 1

    def take_refusals(self) -> list[tuple[Any, ...]]:
        """Returns the refusals since the last call, each with its number."""
        refusals, self._refusals = self._refusals, {}
        return [(*refusal, count) for refusal, count in refusals.items()]

    def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        self.listener.close()


class Proxy:
    """All sandboxes' ports. Belongs to one event loop."""

    def __init__(self, rules: ProxyRules, upstream: Upstream | None = None) -> None:
        self.rules, self._upstream = rules, upstream
        self._open = asyncio.Semaphore(MAX_OPEN)
        self.ports: dict[str, SandboxPort] = {}

    def open(self, name: str, listener: socket.socket, network: NetworkPolicy) -> None:
        """Serve a sandbox's listener until `close`; of its own port nothing else is served."""
        listener.setblocking(False)
        port = SandboxPort(listener, network, asyncio.get_running_loop().time())
        self.close(name)
        self.ports[name] = port
        self._spawn(port, self._accept(port))

    def close(self, name: str) -> None:
        if (port := self.ports.pop(name, None)) is not None:
            port.close()

    def _spawn(self, port: SandboxPort, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)
        port.tasks.add(task)
        task.add_done_callback(port.tasks.discard)
        return task

    async def _accept(self, port: SandboxPort) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await port.slots.acquire()
            try:
                client, _ = await loop.sock_accept(port.listener)
            except OSError:  # as without descriptors: it is tried again
                port.slots.release()
                await asyncio.sleep(0.1)
                continue
            task = self._spawn(port, self._serve(port, client))
            task.add_done_callback(lambda _: port.slots.release())
            if pause_s := port.pause_s(loop.time()):
                await asyncio.sleep(pause_s)

    async def _serve(self, port: SandboxPort, client: socket.socket) -> None:
        with client:
            client.setblocking(False)
            async with self._open:
                try:
                    await self._answer(port, client)
                except ForbiddenHostError as error:
                    port.count(error.refusal)
                    await _respond(client, 403, str(error))
                except ProxyReplyError as error:
                    await _respond(client, error.status, str(error))
                except (OSError, TimeoutError):
                    pass  # one of both is gone, or silent

    async def _answer(self, port: SandboxPort, client: socket.socket) -> None:
        http, request = await _read_request(client)
        target = _target(request)
        self.rules.check(port.network, target)
        async with port.resolutions:
            way = await self._way(target)
        server, first = await self._connect(target, way)
        with server:
            server.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if request.method == b"CONNECT":
                first = b"HTTP/1.1 200 Connection established\r\n\r\n" + first
                sent = _raw(client, server, http.trailing_data[0])
            else:
                sent = _forwarded(client, http, request, target)
            await _relay(client, server, sent, first)

    async def _way(self, target: Target) -> list[str]:
        """Returns the hosts to dial: addresses that were checked, or the name where the upstream
        resolves it.
        """
        try:
            return [str(address) for address in await self.rules.open_addresses(target)]
        except ProxyReplyError:
            if self._upstream is None or not self._upstream.resolves or "." not in target.host:
                raise
        return [target.host]

    async def _connect(self, target: Target, way: list[str]) -> tuple[socket.socket, bytes]:
        """A connection to a target, or through the upstream proxy, and what came of it already."""
        upstream, problem = self._upstream, ""
        for host in way:
            try:
                async with asyncio.timeout(CONNECT_S):
                    if upstream is None:
                        return await _dial(host, target.port), b""
                    name = target.host if upstream.resolves else host
                    return await _through(upstream, Target(name, target.port))
            except (OSError, TimeoutError) as error:
                problem = str(error) or f"no answer within {CONNECT_S:g} s"
        raise ProxyReplyError(502, f"{target} does not answer: {problem}"[:200])


async def _dial(host: str, port: int) -> socket.socket:
    """A connection to an address. Raises OSError."""
    address = ipaddress.ip_address(host)
    server = socket.socket(socket.AF_INET if address.version == 4 else socket.AF_INET6)
    server.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(server, (host, port))
    except BaseException:
        server.close()
        raise
    return server


async def _through(upstream: Upstream, target: Target) -> tuple[socket.socket, bytes]:
    """A tunnel to a target that an upstream proxy makes, and what came through it already. Raises
    OSError, ProxyReplyError.
    """
    loop = asyncio.get_running_loop()
    rows = await loop.getaddrinfo(*upstream.target, type=socket.SOCK_STREAM)
    server = await _dial(str(rows[0][4][0]), upstream.target.port)
    try:
        http = h11.Connection(h11.CLIENT, max_incomplete_event_size=MAX_HEAD_BYTES)
        headers = [("Host", str(target))]
        if upstream.authorization:
            headers.append(("Proxy-Authorization", upstream.authorization))
        connect = h11.Request(method="CONNECT", target=str(target), headers=headers)
        await loop.sock_sendall(server, http.send(connect) or b"")
        http.send(h11.EndOfMessage())
        while not isinstance(event := http.next_event(), h11.Response):
            if event is not h11.NEED_DATA:
                raise ProxyReplyError(502, "the node's own proxy did not answer")
            http.receive_data(await loop.sock_recv(server, MAX_HEAD_BYTES))
        if not 200 <= event.status_code < 300:
            text = f"the node's own proxy answers {event.status_code} for {target}"
            raise ProxyReplyError(502, text)
    except h11.RemoteProtocolError as error:
        server.close()
        raise ProxyReplyError(502, f"the node's own proxy answers no HTTP: {error}"[:200]) from None
    except BaseException:
        server.close()
        raise
    return server, http.trailing_data[0]


async def _read_request(client: socket.socket) -> tuple[h11.Connection, h11.Request]:
    """The request that a client begins with. Raises ProxyReplyError, OSError."""
    loop = asyncio.get_running_loop()
    http = h11.Connection(h11.SERVER, max_incomplete_event_size=MAX_HEAD_BYTES)
    try:
        async with asyncio.timeout(HEAD_S):
            while not isinstance(event := http.next_event(), h11.Request):
                if event is not h11.NEED_DATA:
                    raise ConnectionError("no request")
                http.receive_data(await loop.sock_recv(client, MAX_HEAD_BYTES))
    except h11.RemoteProtocolError as error:
        status = error.error_status_hint
        raise ProxyReplyError(431 if status == 431 else 400, f"no request: {error}"[:200]) from None
    except TimeoutError:
        raise ProxyReplyError(408, f"no request within {HEAD_S:g} s") from None
    return http, event


def _target(request: h11.Request) -> Target:
    """Returns the destination of a request. Raises ProxyReplyError."""
    text = request.target.decode("latin-1")
    is_connect = request.method == b"CONNECT"
    try:
        parts = urlsplit(f"//{text}" if is_connect else text)
        host, port = normal_name(parts.hostname or ""), parts.port
    except ValueError:
        raise ProxyReplyError(400, f"{text[:100]!r} names no host") from None
    is_plain = is_connect or parts.scheme == "http"
    if not is_plain or not host or len(host) > MAX_NAME or (is_connect and not port):
        raise ProxyReplyError(
            400, f"{text[:100]!r}; expected CONNECT HOST:PORT, or http://HOST/PATH"
        )
    return Target(host, port or 80)


_HOP_BY_HOP = {b"connection", b"keep-alive", b"te", b"upgrade", b"host"}


async def _forwarded(
    client: socket.socket, http: h11.Connection, request: h11.Request, target: Target
) -> AsyncIterator[bytes]:
    """A plain request as the server gets it: one, whole, for the host that was checked."""
    loop = asyncio.get_running_loop()
    own = h11.Connection(h11.CLIENT)
    parts = urlsplit(request.target.decode("latin-1"))
    named = {
        name.strip()
        for key, value in request.headers
        if key == b"connection"
        for name in value.lower().split(b",")
    }
    headers = [(b"Host", str(target).removesuffix(":80").encode()), (b"Connection", b"close")]
    forwarded = [
        (key, value)
        for key, value in request.headers
        if key not in _HOP_BY_HOP | named and not key.startswith(b"proxy-")
    ]
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    head = h11.Request(method=request.method, target=path, headers=[*headers, *forwarded])
    yield own.send(head) or b""
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await loop.sock_recv(client, CHUNK_BYTES))
        elif isinstance(event, h11.Data | h11.EndOfMessage):
            yield own.send(event) or b""
            if isinstance(event, h11.EndOfMessage):
                return
        else:
            return


async def _raw(client: socket.socket, server: socket.socket, first: bytes) -> AsyncIterator[bytes]:
    loop = asyncio.get_running_loop()
    if first:
        yield first
    while data := await loop.sock_recv(client, CHUNK_BYTES):
        yield data
    server.shutdown(socket.SHUT_WR)  # of a tunnel alone: an HTTP server may take it for the end


async def _relay(
    client: socket.socket, server: socket.socket, request: AsyncIterator[bytes], first: bytes
) -> None:
    """Pass bytes on until the server has ended, or nothing has come for IDLE_S; `first` is sent to
    the client before anything of the server's.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(IDLE_S) as idle:

        async def send_request() -> None:
            try:
                async for data in request:
                    await loop.sock_sendall(server, data)
                    idle.reschedule(loop.time() + IDLE_S)
            except (OSError, h11.ProtocolError):
                pass  # the other direction says what the end is

        sending = asyncio.create_task(send_request())
        try:
            await loop.sock_sendall(client, first)
            while data := await loop.sock_recv(server, CHUNK_BYTES):
                await loop.sock_sendall(client, data)
                idle.reschedule(loop.time() + IDLE_S)
        finally:
            sending.cancel()
            await asyncio.wait({sending})


async def _respond(client: socket.socket, status: int, text: str) -> None:
    """Answer a request with a status of ours; its reason phrase is what most clients print."""
    phrase = " ".join(text.split()).encode("ascii", "replace")
    body = b"prorl: %s\n" % phrase
    lines = (
        b"HTTP/1.1 %d %s" % (status, phrase),
        b"Content-Type: text/plain",
        b"Content-Length: %d" % len(body),
        b"Connection: close",
    )
    loop = asyncio.get_running_loop()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(LINGER_S):
            await loop.sock_sendall(client, b"\r\n".join(lines) + b"\r\n\r\n" + body)
            client.shutdown(socket.SHUT_WR)
            while await loop.sock_recv(client, CHUNK_BYTES):
                pass


# ---- the process


class ProxyControl:
    """The commands of sandboxd, each in one packet:

    {"open": ID, "network": [MODE, HOSTS]} with a listener, {"network": ..., "of": ID},
    {"close": ID}, {"closed_targets": [[HOST, PORT]]}, {"refusals": ID, "number": N}, which alone is
    answered: {"number": N, "refusals": [[HOST, PORT, REASON, COUNT]]}.
    """

    def __init__(self, proxy: Proxy, channel: socket.socket) -> None:
        self._proxy, self._channel = proxy, channel
        self.ended = asyncio.Event()

    def receive(self) -> None:
        while True:
            try:
                data, fds, _flags, _address = socket.recv_fds(self._channel, MESSAGE_BYTES, 1)
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:
                self.ended.set()
                return
            self._perform(json.loads(data), fds)

    def _perform(self, message: dict[str, Any], fds: list[int]) -> None:
        proxy = self._proxy
        match message:
            case {"open": name, "network": [mode, hosts]}:
                listener = socket.socket(fileno=fds[0])
                proxy.open(name, listener, NetworkPolicy(mode, tuple(hosts)))
            case {"of": name, "network": [mode, hosts]}:
                if name in proxy.ports:
                    proxy.ports[name].network = NetworkPolicy(mode, tuple(hosts))
            case {"close": name}:
                proxy.close(name)
            case {"closed_targets": targets}:
                proxy.rules.close_targets(Target(*target) for target in targets)
            case {"refusals": name, "number": number}:
                port = proxy.ports.get(name)
                refusals = port.take_refusals() if port else []
                answer = json.dumps({"number": number, "refusals": refusals})
                with suppress(OSError):  # sandboxd is gone, or so full that it asks again
                    self._channel.send(answer.encode())


async def serve(channel: socket.socket, rules: ProxyRules, upstream: Upstream | None) -> None:
    """Serve until sandboxd hangs up."""
    channel.setblocking(False)
    control = ProxyControl(Proxy(rules, upstream), channel)
    asyncio.get_running_loop().add_reader(channel, control.receive)
    await control.ended.wait()


def main() -> None:
    """`python -m prorl.sandbox.node.proxy CONTROL_FD PARENT_PID SETTINGS`."""
    control_fd, parent, text = sys.argv[1:]
    settings = json.loads(text)
    os.nice(10)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 4 * MAX_OPEN)), hard))
    "localhost".encode("idna")  # its codec is imported while our own files can be read
    with suppress(OSError):
        socket.getaddrinfo("localhost", 80)
    if os.getuid() == 0:
        calls.drop_to(NOBODY)
    calls.die_with_parent(signal.SIGKILL, int(parent))  # behind the change of uid, which clears it
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    mirrors, closed = ([Target(*pair) for pair in settings[key]] for key in ("mirrors", "closed"))
    rules = ProxyRules(mirrors, closed)
    upstream = Upstream.of(os.environ[UPSTREAM_VARIABLE], settings["upstream_resolves"])
    asyncio.run(serve(socket.socket(fileno=int(control_fd)), rules, upstream))


if __name__ == "__main__":
    main()
