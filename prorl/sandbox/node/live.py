"""One living sandbox as sandboxd knows it, and what its end means."""

from __future__ import annotations

import asyncio
import os

from prorl.linux.forked import EXIT_CRASHED
from prorl.sandbox.client import Fate
from prorl.sandbox.kind import Kind
from prorl.sandbox.launch.zygote_client import Exit
from prorl.sandbox.node.janitor import Note
from prorl.types import FailureCode, SandboxRef, SandboxSpec

EXIT_KILLED = 128 + 9


class Live:
    """Mutable state of one sandbox, owned by the pool."""

    def __init__(self, ref: SandboxRef, spec: SandboxSpec, note: Note) -> None:
        self.ref, self.spec, self.note = ref, spec, note
        self.owner = ""
        self.purpose = ""
        self.pid = 0
        self.ready = False
        self.ending: Fate | None = None
        """Why we are ending it, when it is we who do."""
        self.exited: asyncio.Future[Exit] = asyncio.get_running_loop().create_future()
        """The launcher's end."""
        self.fate: asyncio.Future[Fate] = asyncio.get_running_loop().create_future()
        """Who is to blame, known before all is cleared up."""
        self.ended = asyncio.Event()
        """Nothing is left on the host."""
        self.wall: asyncio.TimerHandle | None = None


def fate_of_exit(exit_: Exit, kind: Kind, out_of_memory: bool) -> Fate:
    """Who is to blame for a sandbox that ended by itself."""
    if os.WIFSIGNALED(exit_.status):
        return Fate(
            FailureCode.SANDBOX_LOST,
            f"its launcher was killed by signal {os.WTERMSIG(exit_.status)}",
        )
    code = os.WEXITSTATUS(exit_.status)
    if out_of_memory:
        return Fate(FailureCode.SANDBOX_BROKEN, "the sandbox ran out of its memory")
    if code == EXIT_CRASHED:
        return Fate(FailureCode.TOOL_PROTOCOL, "the tool server crashed")
    if code == EXIT_KILLED and not kind.server_can_be_killed:
        return Fate(FailureCode.SANDBOX_LOST, "the tool server was killed from outside")
    return Fate(FailureCode.SANDBOX_BROKEN, f"the tool server ended with exit code {code}")
