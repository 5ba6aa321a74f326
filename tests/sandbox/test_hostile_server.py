"""A tool server that the agent has replaced: whatever it answers, the host gets one clear error in time and no memory is lost."""

from __future__ import annotations

import asyncio
import struct
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from prorl.errors import SandboxError
from prorl.sandbox import wire
from prorl.sandbox.client import Fate, connected
from prorl.types import FailureCode, SandboxRef

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


async def _fate(_: SandboxRef) -> Fate:
    return Fate(FailureCode.SANDBOX_BROKEN, "the tool server ended")


async def ask(data: bytes, *, then_close: bool = True) -> FailureCode:
    """Call a server that answers with these bytes; the code of what is raised."""
    open_writers: list[asyncio.StreamWriter] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await wire.receive(reader)
        writer.write(data)
        open_writers.append(writer)
        if then_close:
            writer.close()

    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "s")
        server = await asyncio.start_unix_server(serve, path)
        async with server, connected(SandboxRef("", "x", path), _fate, grace_s=0.3) as sandbox:
            with pytest.raises(SandboxError) as caught:
                await sandbox.call("bash", {"command": "true"}, 0.1)
            with pytest.raises(SandboxError):
                await sandbox.call("bash", {"command": "true"}, 0.1)
        for writer in open_writers:
            writer.close()
    return caught.value.code


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
        b"",
        b"\0",
        b"HTTP/1.1 200 OK\r\n\r\n",
    ],
)
async def test_lies(data: bytes) -> None:
    assert await ask(data) is FailureCode.SANDBOX_BROKEN


async def test_silence_ends_at_the_deadline() -> None:
    async with asyncio.timeout(5):
        assert await ask(b"", then_close=False) is FailureCode.SANDBOX_BROKEN
        assert await ask(struct.pack(">II", 1000, 0) + b"{", then_close=False) is FailureCode.SANDBOX_BROKEN
