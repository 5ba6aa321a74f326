"""A tool server that the agent has replaced: whatever it answers, the host gets one clear error in
time and no memory is lost.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.sandbox import wire
from prorl.sandbox.blame import Cause, Fate, fate_of
from prorl.sandbox.client import ConnectedSandbox, connected
from prorl.types import FailureCode, SandboxRef

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _fate(ref: SandboxRef, seen: Cause) -> Fate:
    return fate_of(seen)


def frame(header: bytes, body: bytes = b"") -> bytes:
    """A frame with a header that no decent encoder makes."""
    return struct.pack(">II", len(header), len(body)) + header + body


async def ask(data: bytes, *, then_close: bool = True) -> FailureCode:
    """Call a server that answers with these bytes; the code of what is raised."""
    codes: list[FailureCode] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.receive(reader)
        writer.write(data)
        if not then_close:
            await reader.read()

    async def call(sandbox: ConnectedSandbox) -> None:
        for _ in range(2):
            with pytest.raises(SandboxError) as caught:
                await sandbox.call("bash", {"command": "true"}, 0.1)
            codes.append(caught.value.code)

    await serve_hostile(answer, call)
    return codes[0]


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">II", 2**32 - 1, 2**32 - 1),
        struct.pack(">II", 2, 4 << 20) + b"{}",
        struct.pack(">II", 5, 0) + b"[1,2]",
        struct.pack(">II", 4, 0) + b"\xff\xff\xff\xff",
        wire.encode({"id": 2, "ok": True, "exit_code": 0, "duration_s": 0.1}),
        wire.encode({"id": 1, "ok": "yes"}),
        wire.encode({"id": 1, "ok": True}),
        wire.encode({"id": 1, "ok": True, "exit_code": "0", "duration_s": 0.1}),
        wire.encode({"id": 1, "ok": True, "exit_code": 0, "duration_s": None}),
        wire.encode({"id": 1, "ok": True, "exit_code": 1.5, "duration_s": 0.1}),
        frame(b'{"id":1,"ok":true,"exit_code":0,"duration_s":NaN}'),
        frame(b'{"id":1,"ok":true,"exit_code":' + b"9" * 400 + b',"duration_s":0.1}'),
        frame(b"[" * 100_000 + b"]" * 100_000),
        frame(b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
        frame(b'{"id":1,"ok":true,"exit_code":0,"duration_s":0.1'),
        frame(b'\xef\xbb\xbf{"id":1}'),
        b"",
        b"\0",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
async def test_lies(data: bytes) -> None:
    assert await ask(data) is FailureCode.SANDBOX_BROKEN


async def test_silence_ends_at_the_deadline() -> None:
    async with asyncio.timeout(20):
        assert await ask(b"", then_close=False) is FailureCode.SANDBOX_BROKEN
        assert (
            await ask(struct.pack(">II", 1000, 0) + b"{", then_close=False)
            is FailureCode.SANDBOX_BROKEN
        )


async def serve_hostile(answer: Answer, use: Callable[[ConnectedSandbox], Awaitable[None]]) -> None:
    """A tool server that answers each request in its own way, and what the host does with it."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                await answer(reader, writer)
            except (ConnectionError, wire.WireError):
                pass  # the host hung up, as it should
            finally:
                writer.close()

        server = await asyncio.start_unix_server(serve, path)
        async with server, connected(SandboxRef("", "x", path), _fate, grace_s=0.3) as sandbox:
            await use(sandbox)


def always(header: dict[str, object], body: bytes) -> Answer:
    """Each request is answered so."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while (request := await wire.receive(reader)) is not None:
            writer.write(wire.encode({"id": request.header["id"], "ok": True, **header}, body))
            await writer.drain()

    return answer


async def test_a_slow_drip_ends_at_the_deadline() -> None:
    """A byte now and then keeps nobody waiting: the deadline is one for the whole answer."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.receive(reader)
        for byte in wire.encode(
            {"id": 1, "ok": True, "exit_code": 0, "duration_s": 0.1}, b"x" * 1000
        ):
            writer.write(bytes([byte]))
            await writer.drain()
            await asyncio.sleep(0.05)

    async def call(sandbox: ConnectedSandbox) -> None:
        async with asyncio.timeout(20):
            with pytest.raises(SandboxError, match="after the deadline"):
                await sandbox.call("bash", {"command": "true"}, 0.1)

    await serve_hostile(drip, call)


async def test_an_unrequested_flood_is_not_kept() -> None:
    """Frames beyond the answer wait in the socket, not in our memory, and the next call is not
    fooled by them.
    """
    sent = 0

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await wire.receive(reader)
        while True:
            writer.write(
                wire.encode(
                    {"id": 1, "ok": True, "exit_code": 0, "duration_s": 0.1}, bytes(1 << 20)
                )
            )
            await writer.drain()
            sent += 1

    async def call(sandbox: ConnectedSandbox) -> None:
        assert (await sandbox.call("bash", {"command": "true"}, 60.0)).exit_code == 0
        await asyncio.sleep(0.2)
        assert sent < 10
        with pytest.raises(SandboxError, match="answered another call"):
            await sandbox.call("bash", {"command": "true"}, 60.0)

    await serve_hostile(flood, call)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ({"size": 1 << 40}, b""),
        ({"size": -1}, b"x" * 2000),
        ({"size": "10"}, b"x"),
        ({"size": 3000}, b"x" * 1500),
        ({}, b"x"),
    ],
)
async def test_a_file_with_a_false_size_breaks_the_sandbox(
    header: dict[str, object], body: bytes
) -> None:
    async def get(sandbox: ConnectedSandbox) -> None:
        with pytest.raises(SandboxError) as caught:
            await sandbox.get("answer", 1000)
        assert caught.value.code is FailureCode.SANDBOX_BROKEN

    await serve_hostile(always(header, body), get)


@pytest.mark.parametrize(
    ("size", "body"), [(1 << 60, 10), (-5, 10), ("big", 10), (None, 10), (1000, 3 << 20)]
)
async def test_a_snapshot_with_a_false_size_writes_little(
    tmp_path: Path, size: object, body: int
) -> None:
    """The bytes that are written on the host stay near what was allowed, whatever comes."""

    async def snapshot(sandbox: ConnectedSandbox) -> None:
        path = tmp_path / "snapshot"
        try:
            await sandbox.snapshot(str(path), 1 << 20)
        except SandboxError as error:
            assert error.code is FailureCode.SANDBOX_BROKEN  # noqa: PT017 - either is right, if little is written
        assert not path.exists() or path.stat().st_size <= 4 << 20

    await serve_hostile(always({"size": size}, bytes(body)), snapshot)


@pytest.mark.parametrize("passed", [socket.socket, lambda: open(os.devnull), None])  # noqa: SIM115
async def test_what_is_handed_over_as_a_listener_is_looked_at(
    passed: Callable[[], socket.socket] | None,
) -> None:
    def hand_over(listener: socket.socket) -> None:
        listener.accept()[0].close()  # of `connected`
        connection, _ = listener.accept()
        with connection:
            connection.recv(4096)
            if passed is None:
                connection.sendall(b"no descriptor")
                return
            with passed() as file:
                socket.send_fds(connection, [b"here"], [file.fileno()])

    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        path = str(Path(folder) / "s")
        listener.bind(path)
        listener.listen()
        serving = asyncio.create_task(asyncio.to_thread(hand_over, listener))
        async with connected(SandboxRef("", "x", path), _fate) as sandbox:
            with pytest.raises(SandboxError, match=Cause.BROKE_PROTOCOL.value):
                await sandbox.listen()
        await serving
