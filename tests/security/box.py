"""One sandbox under attack, of each kind that works here."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from prorl.sandbox.client import ConnectedSandbox
from prorl.types import SandboxRef, SandboxSpec
from tests.sandbox.conftest import Sandboxd

SPEC = SandboxSpec(
    memory_bytes=1 << 30,
    processes=64,
    file_bytes=64 << 20,
    tmp_bytes=64 << 20,
    workspace_bytes=128 << 20,
)
NO_WALLS = "local is a plain process: it shares network, /tmp and readable files with the host"


class Box:
    def __init__(
        self, name: str, daemon: Sandboxd, ref: SandboxRef, sandbox: ConnectedSandbox
    ) -> None:
        self.kind, self.daemon, self.ref, self.sandbox = name, daemon, ref, sandbox

    @asynccontextmanager
    async def neighbour(self) -> AsyncIterator[ConnectedSandbox]:
        """Another sandbox of the same node."""
        ref = await self.daemon.host.start("run/2/1", "run", SPEC)
        async with self.daemon.host.connect(ref) as sandbox:
            yield sandbox

    async def sh(self, command: str, timeout_s: float = 20.0) -> tuple[int, str]:
        done = await self.sandbox.exec(["bash", "-c", command], timeout_s)
        return done.exit_code, done.output

    async def py(self, code: str, timeout_s: float = 20.0) -> tuple[int, str]:
        done = await self.sandbox.exec(["python3", "-c", code], timeout_s)
        return done.exit_code, done.output


def need_own_uid(box: Box) -> None:
    """Skip what `local` cannot contain without root: it shares the uid of these very tests."""
    if box.kind == "local" and os.getuid() != 0:
        pytest.skip("local without root has the uid of whoever started it, and says so")


def need_walls(box: Box) -> None:
    """Skip what `local` does not promise."""
    if box.kind == "local":
        pytest.skip(NO_WALLS)
