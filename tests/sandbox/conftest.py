"""A sandboxd in a process of its own, as the service runs it, for each kind that works on this machine."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from prorl.sandbox.host import UnixSandboxHost

KINDS = ("pyns", "local")


class Sandboxd:
    """A running daemon: its process, socket, root, and a client."""

    def __init__(self, process: asyncio.subprocess.Process, root: Path, host: UnixSandboxHost) -> None:
        self.process, self.root, self.host = process, root, host


async def start_daemon(kind: str, folder: Path, *options: str) -> Sandboxd:
    """Spawn sandboxd and wait for its `ready`."""
    socket_path = str(folder / "sd")
    argv = ["-m", "prorl.sandbox.daemon", "--socket", socket_path, "--root", str(folder / "root"), "--kind", kind]
    process = await asyncio.create_subprocess_exec(
        sys.executable, *argv, "--parent-pid", str(os.getpid()), "--warm", "0", *options, stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout is not None
    assert await process.stdout.readline() == b"ready\n"
    return Sandboxd(process, folder / "root", UnixSandboxHost(socket_path))


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short folder that other uids may pass through (pytest's own are deep and private)."""
    with tempfile.TemporaryDirectory(prefix="prorl-t-", dir="/tmp") as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Each kind in turn."""
    return str(request.param)


@pytest.fixture
async def sandboxd(kind: str, folder: Path) -> AsyncIterator[Sandboxd]:
    """A daemon that ends with the test."""
    daemon = await start_daemon(kind, folder)
    yield daemon
    await daemon.host.close()
    if daemon.process.returncode is None:
        daemon.process.terminate()
    await daemon.process.wait()
    assert list(folder.glob("root/live/*")) == []
