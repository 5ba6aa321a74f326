"""math-verify in processes of its own, kept warm and killed when they hang.

Its sympy may take minutes on a hostile expression and holds the GIL while it does.

The verdict has three values: right, wrong, or GraderError when the grader itself failed, hung or
died. A helper is started where the first check needs it and is kept; its start (about 2 s of
imports) does not count against the check's time. The helper limits itself: CHECK_CPU_S of processor
time a check, after which the kernel ends it, also inside sympy's C code. Importing this module
imports nothing of math-verify. At most MAX_HELPERS run at once in a process; they end with it,
since their stdin closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import weakref
from collections.abc import AsyncIterator, Sequence
from importlib.util import find_spec

import anyio
import orjson

from prorl.errors import GraderError, boundary
from prorl.types import FailureCode, Json

CHECK_CPU_S = 1.5
"""Processor time of one comparison."""
CHECK_WALL_S = 10.0
"""Its time by the clock, where the machine is busy with other things."""
START_S = 60.0
"""A helper's start with its imports."""
MAX_HELPERS = 2
_LINE_BYTES = 1 << 16


def installed() -> bool:
    """Whether math-verify can be imported."""
    return find_spec("math_verify") is not None


async def verify(gold: str, answer: str, budget_s: float) -> bool:
    """Whether two LaTeX or plain answers are equal as mathematics.

    Not symmetric: gold comes first. Raises GraderError.
    """
    with boundary(GraderError, FailureCode.GRADER_ERROR, "math-verify"):
        with anyio.fail_after(budget_s):
            found: Json = await (await _pool()).ask({"gold": gold, "answer": answer})
    if not isinstance(found, dict) or found.get("verdict") not in (True, False):
        said = found.get("error") if isinstance(found, dict) else found
        raise GraderError(FailureCode.GRADER_ERROR, f"math-verify: {str(said)[:300]}")
    return bool(found["verdict"])


async def warm() -> None:
    """Start a helper now, so that the first check finds it. Raises GraderError."""
    with boundary(GraderError, FailureCode.GRADER_ERROR, "math-verify"):
        await (await _pool()).ask({"gold": "1", "answer": "1"})


async def close() -> None:
    """End this loop's helpers; the next check starts another."""
    pool = _POOLS.pop(asyncio.get_running_loop(), None)
    if pool is not None:
        await pool.close()


class Helpers:
    """Processes that answer one JSON line with another, at most `most` of them; one loop's."""

    def __init__(self, command: Sequence[str], most: int = MAX_HELPERS) -> None:
        self._command = tuple(command)
        self._free: list[asyncio.subprocess.Process] = []
        self._asked: set[asyncio.Task[Json]] = set()
        self._places = asyncio.Semaphore(most)

    async def ask(self, question: Json) -> Json:
        """The answer of a helper; one that fails or hangs is killed.

        Who gives up waiting leaves the helper to its own limits: no start is cut in the middle.
        Raises TimeoutError, and ConnectionError where it dies.
        """
        asked = asyncio.create_task(self._ask(question))
        self._asked.add(asked)
        asked.add_done_callback(self._answered)
        return await asyncio.shield(asked)

    def _answered(self, asked: asyncio.Task[Json]) -> None:
        self._asked.discard(asked)
        if not asked.cancelled():
            asked.exception()

    async def _ask(self, question: Json) -> Json:
        async with self._places:
            helper = self._free.pop() if self._free else await self._start()
            is_whole = False
            try:
                with anyio.fail_after(CHECK_WALL_S):
                    found = await _exchange(helper, question)
                is_whole = True
            finally:
                if is_whole:
                    self._free.append(helper)
                else:
                    with anyio.CancelScope(shield=True):
                        await _end(helper)
            return found

    async def _start(self) -> asyncio.subprocess.Process:
        helper = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            limit=_LINE_BYTES,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            with anyio.fail_after(START_S):
                await _exchange(helper, None)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await _end(helper)
            raise
        return helper

    async def close(self) -> None:
        """End all; idempotent."""
        for asked in self._asked:
            asked.cancel()
        await asyncio.gather(*self._asked, return_exceptions=True)
        while self._free:
            await _end(self._free.pop())


async def _exchange(helper: asyncio.subprocess.Process, question: Json) -> Json:
    """One line for another; a question of None waits for the line that a helper begins with."""
    assert helper.stdin is not None
    assert helper.stdout is not None
    if question is not None:
        helper.stdin.write(orjson.dumps(question) + b"\n")
        await helper.stdin.drain()
    line = await helper.stdout.readline()
    if not line.endswith(b"\n"):
        raise ConnectionError("the helper died: out of time, or of memory")
    return orjson.loads(line)


async def _end(helper: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        helper.kill()
    await helper.wait()
    if helper.stdin is not None:
        helper.stdin.close()


_POOLS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Helpers] = weakref.WeakKeyDictionary()
"""The helpers of each loop: what one loop started, no other can wait for."""


_KEEPERS: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncIterator[None]] = (
    weakref.WeakKeyDictionary()
)


async def _pool() -> Helpers:
    loop = asyncio.get_running_loop()
    if loop not in _POOLS:
        _POOLS[loop] = Helpers((sys.executable, "-m", "prorl.envs.verify_helper"))
    if loop not in _KEEPERS:  # one a loop: another's end would close what this one keeps
        _KEEPERS[loop] = _until_the_loop_ends()
        await anext(_KEEPERS[loop])
    return _POOLS[loop]


async def _until_the_loop_ends() -> AsyncIterator[None]:
    """A loop closes the generators that it has begun before it ends: so do its helpers."""
    try:
        yield
    finally:
        await close()
