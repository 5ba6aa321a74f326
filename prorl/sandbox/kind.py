"""The record by which sandboxd knows a kind of sandbox, which `kinds/*.py` fill in.

A kind's module is imported by sandboxd, which asks the record what the kind can do, and by the
zygote, which forks from it: so it imports nothing heavy, no dataclasses either, and does nothing at
import.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prorl.sandbox.launch.spec import Launcher, Start


class SandboxKind(NamedTuple):
    """A kind of sandbox: how it starts, what it can run, and what holds it."""

    fix: str
    """The remedy when the kind does not work."""
    folder: bool
    """Needs a folder on the host."""
    zipapp: bool
    """Runs the tool server as a program instead of forking it."""
    images: bool
    """Can run an image (a folder) instead of the host's /usr."""
    server_can_be_killed: bool
    """True if what runs inside can kill the tool server: then its death is the policy's doing."""
    enforces: tuple[str, ...]
    cannot: tuple[str, ...]
    bare: str
    """For benchmarks: the kind's own launcher with the same walls around `true`; `{folder}` is one
    that `install` has filled.
    """
    launch: Launcher | None = None
    """Turns a forked child of the zygote into the launcher of a sandbox, which guards it. None
    where `start` is given.
    """
    start: Start | None = None
    """Makes the sandbox's pid 1 as a child of the zygote; there is no launcher then."""
    missing: Callable[[], str] = lambda: ""
    """Returns what the machine lacks for this kind, seen without running it; empty = nothing."""
    install: Callable[[str], None] = lambda folder: None
    """Once in a sandboxd, before its first sandbox: files that all of them share, in the folder
    that holds the tool server's zipapp.
    """
    prepare: Callable[[], object] = lambda: None
    """Once in the zygote: whatever is equal in all sandboxes that it starts."""
    overlays: bool = False
    """Can let an image be written over, and be root of it."""
    proxied: bool = False
    """True if its sandboxes have a loopback of their own, of which the proxy can serve a port: then
    the operator may grant them a network.
    """
    sized: bool = True
    """True if its workspace is of a size that the kernel holds; else the watchdog looks after
    it.
    """
    caps_ptys: bool = True
    """True if the kernel bounds its ptys (`MAX_PTYS`); else the watchdog does."""
    shares_host: bool = False
    """True if its processes write to the host's /tmp and make System V objects on the host."""


MAX_PTYS = 16
"""The limit of the ptys of one sandbox: the kernel has a few thousand for the whole machine, and a
node starts no more sandboxes than they are enough for (`node/maker.py`).
"""

CONFINED_BY_NAMESPACES = (
    "files, processes, network, IPC and host name of the host are out of reach",
    "no privileges, no nested user namespaces",
    "sized workspace, /tmp and /dev/shm",
    "processes, size of a file, open files, memory of one process",
    "everything inside ends with it",
)
"""The resources that a kind confines that has namespaces of its own."""


def room() -> int:
    """Returns for how many sandboxes the kernel has terminals: without a bound on theirs, one that
    fills its own takes a terminal from an innocent neighbour.
    """
    return max(1, (_terminals("max") - _terminals("reserve")) // MAX_PTYS)


def short_of_terminals(count: int) -> str:
    """Returns what is wrong, and how to mend it, where the kernel has too few for so many
    sandboxes.
    """
    if (available := room()) >= count:
        return ""
    needed = count * MAX_PTYS + _terminals("reserve")
    return (
        f"only {available} of {count} sandboxes can run at once (kernel.pty.max is"
        f" {_terminals('max')}); for all: sysctl -w kernel.pty.max={needed}"
    )


def _terminals(which: str) -> int:
    with open(f"/proc/sys/kernel/pty/{which}") as file:
        return int(file.read())
