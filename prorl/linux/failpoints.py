"""Faults at named steps, for tests: `PRORL_FAILPOINTS=log.written:kill@20,file.renamed:delay`.

Each durable step says its name as it passes; nothing happens unless the environment asks for it. A
fault strikes once, in the first incarnation of a process, at its `@n`-th passing (without one the
first):

    kill     SIGKILL to this very process
    freeze   SIGSTOP: the supervisor must end it
    error    OSError, as from a disk
    delay    a second, on whatever thread passes
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

VARIABLE: Final = "PRORL_FAILPOINTS"

FAILPOINTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "log.begun": "control log: a transaction has begun, nothing is on disk",
        "log.written": "control log: it is on disk, nobody has been told",
        "log.run": "the same, with a run that was made",
        "log.accepted": "the same, with groups that were accepted",
        "log.committed": "the same, with a part that was committed",
        "log.published": "the same, with a commit that readers see",
        "log.decided": "the same, with decisions of groups",
        "log.cursor": "the same, with a trainer's cursor",
        "manifest.written": "gateway: a run's manifest is durable, the log does not know the run",
        "file.synced": "store: a file has its content under its temporary name",
        "file.renamed": "store: it has its name, the directory is not synced",
        "commit.asked": "store: parts are durable, the log has not been asked",
        "commit.answered": "store: the log has the commit, readers do not see it",
        "commit.shown": "store: readers see it, nothing is acked",
        "rows.acked": "store: their senders may forget them",
        "index.added": "store: a commit's groups can be found and served",
        "decision.asked": "store: groups are decided, the log has not been asked",
        "decision.answered": "store: decisions stand, nothing is served",
        "handout.asked": "store: a trainer waits, the log has not been asked",
        "handout.answered": "store: groups have their place in the order, nobody has them",
        "cursor.asked": "store: a trainer's commit has come, the log does not have it",
        "cursor.answered": "store: the log has it, the trainer has not been told",
    }
)
FAULTS: Final = ("kill", "freeze", "error", "delay")


class _Fault:
    def __init__(self, kind: str, at: int) -> None:
        self.kind, self.countdown = kind, at


def parse(text: str) -> dict[str, _Fault]:
    """Returns the faults that a text asks for.

    >>> sorted(parse("log.written:kill@20,file.renamed:delay"))
    ['file.renamed', 'log.written']

    Raises ValueError for a name, fault or count that does not exist.
    """
    faults = {}
    for part in filter(None, text.split(",")):
        name, _, rest = part.partition(":")
        kind, _, at = rest.partition("@")
        if name not in FAILPOINTS or kind not in FAULTS or not (at or "1").isdigit():
            raise ValueError(
                f"{VARIABLE}: {part!r}; expected NAME:FAULT or NAME:FAULT@N with NAME of"
                f" {', '.join(FAILPOINTS)} and FAULT of {', '.join(FAULTS)}"
            )
        faults[name] = _Fault(kind, int(at or 1))
    return faults


_armed: dict[str, _Fault] | None = None


def failpoint(name: str) -> None:
    """A step passes. Raises OSError where that was asked for."""
    global _armed
    if _armed is None:
        _armed = parse(os.environ.get(VARIABLE, ""))
    fault = _armed.get(name)
    if fault is None:
        return
    fault.countdown -= 1
    if fault.countdown == 0:
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "delay":
                time.sleep(1.0)
            case _:
                raise OSError(errno.EIO, f"failpoint {name}")
