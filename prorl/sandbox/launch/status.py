"""The status pipe: what a launcher, and then the tool server that it starts, say of the start.

`ok` and a newline, or `error: ...` and the end; a foreign launcher's complaints come in pieces, and
its `error:` is its own. Nothing is said after the start.
"""

from __future__ import annotations

import asyncio
import os

MAX_BYTES = 4096


async def read_status(fd: int, timeout_s: float) -> str:
    """`ok`, or all that was said until the pipe was closed or the time over.

    `fd` is a non-blocking pipe, which stays the caller's.
    """
    said = bytearray()
    try:
        async with asyncio.timeout(timeout_s):
            await _read_into(said, fd)
    except TimeoutError:
        said = said or bytearray(f"not ready after {timeout_s:g} s".encode())
    if said.endswith(b"ok\n"):
        return "ok"
    return said.decode("utf-8", "replace").removeprefix("error: ").strip()


async def _read_into(said: bytearray, fd: int) -> None:
    """Read until `ok`, the end or MAX_BYTES."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        while not said.endswith(b"ok\n") and len(said) < MAX_BYTES:
            await readable.wait()
            readable.clear()
            try:
                data = os.read(fd, MAX_BYTES)
            except BlockingIOError:  # set for what the last read took already
                continue
            if not data:
                break
            said += data
    finally:
        loop.remove_reader(fd)
