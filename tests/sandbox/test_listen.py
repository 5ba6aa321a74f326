"""A port inside a sandbox that is served outside: all kinds, several callers, every death."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prorl.errors import SandboxError
from prorl.sandbox.client import ConnectedSandbox
from prorl.types import FailureCode, SandboxSpec
from tests.sandbox.conftest import Sandboxd

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK = """
import sys, urllib.request
from concurrent.futures import ThreadPoolExecutor
def ask(n):
    return urllib.request.urlopen("http://127.0.0.1:%s/" + str(n), timeout=60).read().decode()
print(*ThreadPoolExecutor(4).map(ask, range(4)))
"""
HANG = "import socket; s = socket.create_connection(('127.0.0.1', %s)); s.sendall(b'x'); s.recv(1)"


class Served:
    """Answers on the port: nobody before `together` callers are there."""

    def __init__(self, together: int) -> None:
        self._barrier = asyncio.Barrier(together)
        self.begun, self.disconnected = asyncio.Event(), asyncio.Event()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.read(4096)
        self.begun.set()
        if request != b"x":
            await self._barrier.wait()
            body = b"for" + request.split()[1]
            head = f"HTTP/1.1 200 OK\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(head.encode() + body)
        elif not await reader.read():
            self.disconnected.set()
        writer.close()


@asynccontextmanager
async def served(sandbox: ConnectedSandbox, together: int = 4) -> AsyncIterator[tuple[Served, int]]:
    answers, listener = Served(together), await sandbox.listen()
    async with await asyncio.start_server(answers.answer, sock=listener):
        yield answers, listener.getsockname()[1]


@asynccontextmanager
async def sandbox_of(sandboxd: Sandboxd) -> AsyncIterator[ConnectedSandbox]:
    ref = await sandboxd.host.start("r/1/1", "run", SandboxSpec())
    async with sandboxd.host.connect(ref) as sandbox:
        yield sandbox


async def test_four_callers_at_once_in_each_of_two_sandboxes(sandboxd: Sandboxd, kind: str) -> None:
    """The port is the same in both, where each has a network of its own."""
    async with (
        sandbox_of(sandboxd) as first_sandbox,
        sandbox_of(sandboxd) as two,
        served(first_sandbox) as (_, port),
        served(two) as (_, second),
    ):
        assert (port, second) == (8000, 8000) if kind != "local" else port != second
        results = await asyncio.gather(
            first_sandbox.exec(["python3", "-c", ASK % port], 60.0),
            two.exec(["python3", "-c", ASK % second], 60.0),
        )
        assert [result.output for result in results] == ["for/0 for/1 for/2 for/3\n"] * 2


async def test_the_death_of_a_caller_closes_its_connection(sandboxd: Sandboxd) -> None:
    async with sandbox_of(sandboxd) as sandbox, served(sandbox) as (answers, port):
        calling = asyncio.create_task(sandbox.exec(["python3", "-c", HANG % port], 300.0))
        await answers.begun.wait()
        calling.cancel()  # which ends the program
        await answers.disconnected.wait()


async def test_the_death_of_a_sandbox_closes_its_connections(sandboxd: Sandboxd) -> None:
    async with sandbox_of(sandboxd) as sandbox, served(sandbox) as (answers, port):
        calling = asyncio.create_task(sandbox.exec(["python3", "-c", HANG % port], 300.0))
        await answers.begun.wait()
        await sandboxd.host.stop(sandbox.ref)
        await answers.disconnected.wait()
        with pytest.raises(SandboxError) as caught:
            await calling
        assert caught.value.code is FailureCode.SANDBOX_LOST


async def test_a_port_in_use_inside_costs_nothing(sandboxd: Sandboxd) -> None:
    async with sandbox_of(sandboxd) as sandbox:
        first = await sandbox.listen()  # stands for a server that the task's own setup started
        with first:
            async with served(sandbox, 1) as (_, port):
                assert port != first.getsockname()[1]
                ask = f"exec 3<>/dev/tcp/127.0.0.1/{port}; echo GET / >&3; cat <&3"
                assert (await sandbox.exec(["bash", "-c", ask], 60.0)).output.endswith("for/")
