"""A prepared workspace, made once a node: the client's side of `node/snapshots.py`.

The first sandbox of a key is prepared by the caller's own work and packed; the next ones are
copies. Nothing but the workspace is copied: not /tmp, no process, no shell's state. Whether copies
are worth it is measured: where packing took longer than the work had, everybody does the work.
`key` names all that the work depends on; the sandbox must be fresh.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from typing import Any

from prorl.protocols import Sandbox

MAX_SNAPSHOT_BYTES = 192 << 20
"""Of one workspace: it is packed in memory inside the sandbox."""
CLAIM_S = 24 * 3600.0
"""Longest wait for another's work; the caller's own deadline comes first."""
SETTLE_S = 30.0
"""For a request that only takes note."""

Ask = Callable[[dict[str, Any], float], Awaitable[dict[str, Any]]]
"""Asks sandboxd."""


class Outcome(StrEnum):
    """How a claim was settled."""

    KEPT = "kept"
    """The snapshot is written, or was copied."""
    GIVEN_UP = "given_up"
    """The work failed."""
    PLAIN = "plain"
    """A copy would cost as much as the work, or be too large."""


async def prepared(
    ask: Ask, sandbox: Sandbox, key: str, work: Callable[[], Awaitable[None]]
) -> bool:
    """Do the work, or copy what it made; true for a copy. Raises as the work does, SandboxError."""
    name = secrets.token_hex(8)
    outcome = Outcome.GIVEN_UP
    try:
        place = await ask({"op": "claim", "key": key, "claim": name}, CLAIM_S)
        if place["what"] == "copy":
            await sandbox.restore(place["path"])
            return True
        began = time.monotonic()
        await work()
        if place["what"] == "make":
            outcome = await _kept(sandbox, place["path"], time.monotonic() - began)
        return False
    finally:
        # Also when we were cancelled while we waited: nobody else may wait for us.
        settled = {"op": "settle", "claim": name, "outcome": outcome.value}
        await asyncio.shield(ask(settled, SETTLE_S))


async def _kept(sandbox: Sandbox, path: str, work_s: float) -> Outcome:
    began = time.monotonic()
    num_bytes = await sandbox.snapshot(path, MAX_SNAPSHOT_BYTES)
    return Outcome.KEPT if num_bytes and time.monotonic() - began < work_s else Outcome.PLAIN
