"""Processes that a benchmark starts."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from pathlib import Path

from prorl.types import Json

RIVALS = (Path(__file__).parents[2] / "configs" / "rivals" / "bench").is_dir()
"""True if the rivals' drivers are here: they are in the repository, not in the package."""
NO_RIVALS = "drivers of rivals are in the repository only (configs/rivals/bench)"

END_S = 10.0
"""For a process to end when it was asked to."""


class Answering:
    """A child that says `ready ...`, answers a line with JSON, and ends when its input closes.

    `python ARGV...` in a process of its own; killed when it does not end in time.
    """

    def __init__(self, *argv: str) -> None:
        self._argv = argv
        self.ready: dict[str, Json] = {}
        """The words that followed the word `ready`."""

    async def __aenter__(self) -> Answering:
        argv = (sys.executable, *self._argv)
        self._process = await asyncio.create_subprocess_exec(*argv, stdin=PIPE, stdout=PIPE)
        word, _, payload = (await self._line()).partition(" ")
        assert word == "ready", f"{' '.join(self._argv)} said {word!r}"
        self.ready = json.loads(payload)
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

    async def ask(self) -> dict[str, Json]:
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        return dict(json.loads(await self._line()))

    async def _line(self) -> str:
        assert self._process.stdout is not None
        line = (await self._process.stdout.readline()).decode()
        assert line, f"{' '.join(self._argv)} ended"
        return line
