"""Waiting in tests, for what holds and not for a time."""

from __future__ import annotations

import asyncio
import inspect
import os
import time
from collections.abc import Callable

from prorl.linux.procfs import stat


async def until(holds: Callable[[], object], what: str = "it", limit_s: float = 60.0) -> None:
    """Let the loop work until something holds; it may have to be awaited."""
    began = time.monotonic()
    end = began + limit_s
    while not (await condition if inspect.isawaitable(condition := holds()) else condition):
        now = time.monotonic()
        assert now < end, f"not within {limit_s:g} s: {what}"
        # Looking takes a tenth of the time: it may ask every process of the machine, or a service.
        await asyncio.sleep(min(max(0.005, 10 * (now - began)), 0.1))
        began = time.monotonic()


def wait_until(holds: Callable[[], object], what: str = "it", limit_s: float = 240.0) -> float:
    """The same without a loop; after how many seconds it held."""
    began = time.monotonic()
    while not holds():
        assert time.monotonic() - began < limit_s, f"not within {limit_s:g} s: {what}"
        time.sleep(0.05)
    return time.monotonic() - began


def resident_bytes() -> int:
    """Returns the resident bytes of this process."""
    process_stat = stat(os.getpid())
    assert process_stat is not None
    return process_stat.rss_bytes
