"""Attempts to get out of a real sandbox, in each mode: what is not allowed is never reached.

Each is an expression of Python, evaluated in the sandbox; it is `out` when a server answered that
was not to be reached. Such servers stand on the node's loopback and on an address of its own.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import pytest_asyncio

from prorl.sandbox.client import ConnectedSandbox
from prorl.types import SandboxSpec
from tests.sandbox.conftest import Sandboxd, end, short_folder, start_daemon, why_not

pytestmark = pytest.mark.asyncio(loop_scope="module")

SPEAK = r"""
import json, os, re, socket, sys
port = int((os.environ.get("HTTP_PROXY") or "http://127.0.0.1:3128").rpartition(":")[2])
def ask(request, *more):
    "The status line of the proxy's answer, and whether a server of the node's was behind it."
    try:
        s = socket.create_connection(("127.0.0.1", port), 10)
    except OSError:
        return "no proxy"
    s.settimeout(10)
    try:
        s.sendall(request.encode("latin-1").replace(b"\n", b"\r\n"))
        answer = s.recv(4096)
        for part in more:
            s.sendall(part.encode("latin-1").replace(b"\n", b"\r\n"))
        while data := s.recv(4096):
            answer += data
    except OSError:
        pass
    return answer.decode("latin-1")
def connect(target):
    return ask("CONNECT %s HTTP/1.1\nHost: x\n\n" % target, "GET / HTTP/1.0\n\n")
def get(url, host="x"):
    return ask("GET %s HTTP/1.1\nHost: %s\n\n" % (url, host))
def direct(family, address, kind=socket.SOCK_STREAM):
    s = socket.socket(family, kind)
    s.settimeout(3)
    s.connect(address)
    s.sendall(b"GET / HTTP/1.0\r\n\r\n")
    return s.recv(4096).decode("latin-1")
def attempt(code):
    try:
        answer = eval(code)
    except OSError as error:
        answer = "OSError: %s" % error
    return "out" if "SECRET" in answer else "in", answer.split("\r\n")[0]
attempts = json.load(sys.stdin)
print(json.dumps({name: attempt(code) for name, code in attempts.items()}))
"""

ATTEMPTS = {
    "loopback by address": 'connect("127.0.0.1:{port}")',
    "loopback by name": 'connect("localhost:{port}")',
    "loopback by another of its addresses": 'connect("127.7.7.7:{port}")',
    "loopback as a number": 'connect("2130706433:{port}")',
    "loopback in octal": 'connect("0177.0.0.1:{port}")',
    "loopback in hexadecimal": 'connect("0x7f000001:{port}")',
    "loopback in short": 'connect("127.1:{port}")',
    "every address of the node": 'connect("0.0.0.0:{port}")',
    "loopback in IPv6": 'connect("[::1]:{port}")',
    "loopback mapped into IPv6": 'connect("[::ffff:127.0.0.1]:{port}")',
    "loopback in old IPv6": 'connect("[::127.0.0.1]:{port}")',
    "loopback translated from IPv6": 'connect("[64:ff9b::7f00:1]:{port}")',
    "loopback by 6to4": 'connect("[2002:7f00:1::]:{port}")',
    "an address of the node itself": 'connect("{own}:{port}")',
    "the node by its name": 'connect("{hostname}:{port}")',
    "private": 'connect("10.0.0.1:80")',
    "private of a provider": 'connect("100.64.0.1:80")',
    "unique local of IPv6": 'connect("[fd00:ec2::254]:80")',
    "link-local of IPv6": 'connect("[fe80::1%25lo]:{port}")',
    "metadata of a cloud": 'get("http://169.254.169.254/latest/meta-data/")',
    "metadata as a number": 'connect("2852039166:80")',
    "multicast": 'connect("224.0.0.1:80")',
    "a plain request": 'get("http://127.0.0.1:{port}/")',
    "a plain request under another host's name": 'get("http://127.0.0.1:{port}/", "site.test")',
    "a second request behind the first": 'ask("GET http://{mirror}/ HTTP/1.1\\nHost: x\\n\\n'
    'GET http://127.0.0.1:{port}/ HTTP/1.1\\nHost: x\\n\\n")',
    "a redirect of an allowed host": 'connect(re.search("Location: http://(.*?)/|$",'
    ' get("http://{mirror}/redirect"))[1] or "127.0.0.1:{port}")',
    "a name in capitals with a dot": 'connect("LOCALHOST.:{port}")',
    "a user before the host": 'get("http://{mirror}@127.0.0.1:{port}/")',
    "the model server": 'connect("{model}")',
    "the name of a host that is not allowed": 'connect("unlisted.example:443")',
    "no proxy at all": 'direct(socket.AF_INET, ("{own}", {port}))',
    "no proxy, IPv6": 'direct(socket.AF_INET6, ("::1", {port}))',
    "a question to DNS": 'direct(socket.AF_INET, ("{own}", 53), socket.SOCK_DGRAM)',
    "a socket of the host's kernel": "direct(socket.AF_VSOCK, (2, 1024))",
    "an abstract socket of the host": 'direct(socket.AF_UNIX, "\\0prorl-test-{port}")',
}
MODES = {
    "no-network": SandboxSpec(),
    "allowlist": SandboxSpec(network_mode="allowlist", allowed_hosts=("named.example",)),
    "public": SandboxSpec(network_mode="public"),
}


class Node(NamedTuple):
    """A sandboxd whose operator grants all, with a sandbox for each mode, and what it protects."""

    daemon: Sandboxd
    boxes: dict[str, ConnectedSandbox]
    places: dict[str, object]


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.readline()
    writer.write(b"HTTP/1.0 200 OK\r\n\r\nSECRET")
    writer.close()


async def _mirror(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """The host that is allowed: it says so, or leads to another one."""
    path = (await reader.readline()).split()[1]
    status, place = b"200 OK", b""
    if b"redirect" in path:
        status, place = b"302 Found", b"Location: http://127.0.0.1:%d/\r\n" % PORTS["secret"]
    writer.write(b"HTTP/1.1 %s\r\nConnection: close\r\n%s\r\nmirror" % (status, place))
    writer.close()


PORTS: dict[str, int] = {}


def own_address() -> str:
    """An address of this machine besides loopback, where it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


@pytest.fixture(
    scope="module", params=["pyns", pytest.param("apptainer", marks=pytest.mark.apptainer)]
)
def walled(request: pytest.FixtureRequest) -> str:
    if why_not(request.param):
        pytest.skip(why_not(request.param))
    return str(request.param)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def node(walled: str) -> AsyncIterator[Node]:
    with short_folder() as folder:
        async with (
            await asyncio.start_server(_serve, "0.0.0.0", 0) as secret,
            await asyncio.start_server(_mirror, "127.0.0.2", 0) as mirror,
            await asyncio.start_server(_serve, "127.0.0.1", 0) as model,
        ):
            secret_port, mirror_port, model_port = (
                server.sockets[0].getsockname()[1] for server in (secret, mirror, model)
            )
            PORTS["secret"] = secret_port
            mirrors = [["127.0.0.2", mirror_port], ["127.0.0.1", model_port]]
            closed = [["localhost", model_port]]
            network = {"mode": "public", "mirrors": mirrors, "closed": closed}
            daemon = await start_daemon(walled, folder, network=network)
            with socket.socket(socket.AF_UNIX) as abstract:
                abstract.bind(f"\0prorl-test-{secret_port}")
                abstract.listen()
                async with _boxes(daemon) as boxes:
                    places = {
                        "port": secret_port,
                        "own": own_address(),
                        "hostname": socket.gethostname(),
                        "mirror": f"127.0.0.2:{mirror_port}",
                        "model": f"127.0.0.1:{model_port}",
                    }
                    yield Node(daemon, boxes, places)
            await end(daemon)


@asynccontextmanager
async def _boxes(daemon: Sandboxd) -> AsyncIterator[dict[str, ConnectedSandbox]]:
    async with AsyncExitStack() as stack:
        boxes: dict[str, ConnectedSandbox] = {}
        for number, (mode, spec) in enumerate(MODES.items()):
            ref = await daemon.host.start(f"r/{number}/1", "run", spec)
            boxes[mode] = await stack.enter_async_context(daemon.host.connect(ref))
        yield boxes


async def _try(node: Node, mode: str, attempts: dict[str, str]) -> dict[str, list[str]]:
    """Returns the outcome of each attempt: `in` or `out`, and the first line of the answer."""
    text = json.dumps(attempts)
    for name, value in node.places.items():
        text = text.replace(f"{{{name}}}", str(value))
    done = await node.boxes[mode].exec(["python3", "-c", SPEAK], 90.0, text.encode())
    results: dict[str, list[str]] = json.loads(done.output)
    return results


@pytest.mark.parametrize("mode", MODES)
async def test_nothing_gets_out_but_to_what_is_allowed(node: Node, mode: str) -> None:
    """An allowed host shows that the attempts fail by the walls, not for want of a proxy."""
    allowed = {"an allowed host": 'get("http://{mirror}/")'}
    results = await _try(node, mode, {**ATTEMPTS, **allowed})
    answer = results.pop("an allowed host")[1]
    assert ("200 OK" in answer) == (mode != "no-network")
    assert {name: verdict for name, (verdict, _) in results.items()} == dict.fromkeys(
        ATTEMPTS, "in"
    )
    refusals = await node.daemon.host.refusals(node.boxes[mode].ref)
    reasons = {refusal.reason for refusal in refusals}
    if mode == "public":
        kinds = {"loopback", "link-local", "private", "multicast", "unspecified"}
        assert reasons == {*kinds, "tunnel", "service"}
    else:
        assert reasons == ({"not allowed", "service"} if mode == "allowlist" else set())


@pytest.mark.parametrize("tool", ["bash", "python", "ipython"])
async def test_every_tool_has_the_variables_and_programs_reach_a_host_by_them(
    node: Node, walled: str, tool: str
) -> None:
    if (walled, tool) == ("apptainer", "ipython") and Path(sys.prefix).is_relative_to("/tmp"):
        pytest.skip("Apptainer does not show an environment below /tmp without an image")
    spec = SandboxSpec(network_mode="public", tools=("bash", "python", "ipython"))
    code = "import urllib.request as u; print(u.urlopen('http://{mirror}/').status)"
    code = code.replace("{mirror}", str(node.places["mirror"]))
    ref = await node.daemon.host.start("r/9/1", "run", spec)
    async with node.daemon.host.connect(ref) as sandbox:
        arguments = {"command": f'python3 -c "{code}"'} if tool == "bash" else {"code": code}
        done = await sandbox.call(tool, arguments, 60.0)
    await node.daemon.host.stop(ref)
    assert done.output.strip() == "200", done.output
