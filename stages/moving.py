"""RUN on a node that leaves: what it has of an attempt goes to the gateway, for another node.

    ask back -> each attempt ends before its next call, at the latest after GENTLE_S
             -> workspace packed, journal copied -> given to the gateway -> released

What does not travel is said: the policy hears that its shell is gone (`journal.MOVED_NOTE`), or,
where the run wants that no policy is ever told such a thing (`on_unknown: fail`), the next attempt
begins anew. So it does where there is no journal, a call was under way, or something fails; `anew`
in `rollouts` says why. Charged to nobody in either case.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
from pathlib import Path

from prorl.errors import ProrlError
from prorl.flight.handover import Mover
from prorl.journal import AttemptJournal, Journals
from prorl.protocols import Sandbox
from prorl.types import AttemptKey

GENTLE_S = 5.0
"""For a model call or a tool call to end by itself."""
MOVE_S = 20.0
"""For packing and handing over."""
TELL_S = 5.0
WORKSPACE_BYTES = 256 << 20

log = logging.getLogger("prorl.stages")


class Moving:
    """Of one RUN worker."""

    def __init__(self, journals: Journals, mover: Mover) -> None:
        self._journals, self._mover = journals, mover

    async def move(self, key: AttemptKey, journal: AttemptJournal, sandbox: Sandbox | None) -> None:
        """Hand an attempt over that has stopped; never raises."""
        past = self._journals.past(key)
        reason = _cannot(past, journal, sandbox)
        try:
            async with asyncio.timeout(MOVE_S):
                if past and not reason:
                    reason = await self._give(key, past, sandbox)
        except TimeoutError:
            reason = f"handing it over took more than {MOVE_S:g} s"
        except (ProrlError, OSError) as error:
            reason = f"it could not be handed over: {error}"
        if reason:
            log.info("%s begins anew: %s", key, reason)
            await self._tell(key, reason)

    async def _tell(self, key: AttemptKey, reason: str) -> None:
        try:
            async with asyncio.timeout(TELL_S):
                await self._mover.tell(key, reason)
        except (ProrlError, OSError) as error:
            log.warning("the gateway does not hear why %s begins anew: %s", key, error)

    async def _give(self, key: AttemptKey, past: bytes, sandbox: Sandbox | None) -> str:
        """Why it could not be given, or nothing."""
        with tempfile.TemporaryDirectory(prefix="prorl-move-") as folder:
            workspace = Path(folder, "workspace") if sandbox is not None else None
            if sandbox is not None and not await sandbox.snapshot(str(workspace), WORKSPACE_BYTES):
                return f"its workspace is larger than {WORKSPACE_BYTES >> 20} MiB"
            journal = Path(folder, "journal")
            journal.write_bytes(past)
            await self._mover.give(key, journal, workspace)
        return ""


def _cannot(past: bytes, journal: AttemptJournal, sandbox: Sandbox | None) -> str:
    """Why it cannot be gone on with elsewhere; nothing where nothing has happened yet."""
    if not journal.has_turns:
        return ""
    if not past:
        return "no journal was kept of it"
    if journal.in_call:
        return f"a tool call was under way for more than {GENTLE_S:g} s"
    if sandbox is not None and journal.has_calls and journal.on_unknown == "fail":
        return "its shell would not have come along (on_unknown: fail)"
    return ""
