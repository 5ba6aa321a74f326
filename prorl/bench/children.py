"""Processes that a benchmark starts, and the disk that it measures on.

A process is asked to end when its block ends, however that ends, and killed when it does not.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

from prorl.linux import procfs
from prorl.types import Json

END_S = 10.0
"""For a process to end when it was asked to."""


@asynccontextmanager
async def python(
    *argv: str, env: Mapping[str, str] | None = None, quiet: bool = False
) -> AsyncIterator[Process]:
    """`python ARGV...` with pipes to its input and from its output; `quiet` drops its errors."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *argv),
        stdin=PIPE,
        stdout=PIPE,
        stderr=asyncio.subprocess.DEVNULL if quiet else None,
        env=env,
    )
    try:
        yield process
    finally:
        await _ended(process)


async def _ended(process: Process) -> None:
    if process.returncode is None:
        process.terminate()
    try:
        async with asyncio.timeout(END_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


async def line_of(process: Process, said: bytes = b"") -> bytes:
    """The next line of a process, after `said` was written to it; empty when it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    if said:
        process.stdin.write(said)
        await process.stdin.drain()
    return await process.stdout.readline()


def disk() -> str:
    """A folder where fsync means something: not a tmpfs, as /tmp may be."""
    return os.environ.get("PRORL_BENCH_DIR", str(Path.cwd()))


class Answering:
    """A child that says `ready ...`, answers a line with JSON, and ends when its input closes."""

    def __init__(self, *argv: str) -> None:
        self._argv = argv
        self.ready = ""
        """What it said after the word `ready`."""

    async def __aenter__(self) -> Answering:
        self._process = await asyncio.create_subprocess_exec(*self._argv, stdin=PIPE, stdout=PIPE)
        word, _, self.ready = (await self._line(b"")).partition(" ")
        assert word == "ready", f"{' '.join(self._argv)} said {word!r}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    @property
    def cpu_s(self) -> float:
        """CPU seconds so far."""
        return procfs.cpu_s(self._process.pid)

    async def ask(self, line: str = "") -> dict[str, Json]:
        """Its answer to a line."""
        return dict(json.loads(await self._line(f"{line}\n".encode())))

    async def _line(self, said: bytes) -> str:
        line = (await line_of(self._process, said)).decode()
        assert line, f"{' '.join(self._argv)} ended"
        return line
