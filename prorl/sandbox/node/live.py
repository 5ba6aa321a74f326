"""One living sandbox, from its first trace on the host to its last."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from prorl.sandbox.blame import Fate
from prorl.sandbox.launch.zygote_client import Exit
from prorl.sandbox.node.janitor import Note
from prorl.types import SandboxRef, SandboxSpec


class Holder(NamedTuple):
    """The process that a sandbox was made for: its name, and its incarnation."""

    name: str = ""
    incarnation: str = ""

    def is_after(self, other: Holder) -> bool:
        """Returns whether this is another incarnation of the same process; only its latest one says
        anything.
        """
        return bool(self.name) and self.name == other.name and self.incarnation != other.incarnation


NOBODY = Holder()


class LiveSandbox:
    """Belongs to one event loop."""

    def __init__(self, ref: SandboxRef, spec: SandboxSpec, note: Note) -> None:
        self.ref, self.spec, self.note = ref, spec, note
        self.owner = ""
        self.purpose = ""
        self.holder = NOBODY
        self.pid = 0
        self.ready = False
        self.ending: Fate | None = None
        """The reason why we are ending it, when it is we who do."""
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        """The launcher's end."""
        self.fate: asyncio.Future[Fate] = asyncio.get_running_loop().create_future()
        """The verdict who is to blame, known before all is cleared up."""
        self.ended = asyncio.Event()
        """Nothing is left on the host."""
        self.wall: asyncio.TimerHandle | None = None
