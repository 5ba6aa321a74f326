"""What sandboxd can be told, and what its kinds are like."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field

AUTO_ORDER = ("apptainer", "bwrap", "pyns")
"""Strongest first. `local` isolates little and is never chosen by itself."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits of one node."""

    max_sandboxes: int = 512
    """Alive at once, warm and reserved ones included; more wait."""
    parallel_starts: int = field(default_factory=lambda: max(8, 2 * len(os.sched_getaffinity(0))))
    """Starting at once.

    A start waits for the kernel about half of its time; beyond four a core each takes longer and
    none comes sooner.
    """
    warm: int = 1
    """Kept ready for each of the last few specs that were asked for."""
    snapshot_bytes: int = 2 << 30
    """Prepared workspaces kept on disk for siblings of a task."""
    cgroups: bool = True
    """Use control groups where they can be used."""
    images: str = ""
    """Folder of this node's image registry; empty = the user's cache folder."""
    image: str = ""
    """Image of specs that name none; empty = the host's /usr, read-only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What sandboxd must know of a kind."""

    folder: bool
    """Needs a folder on the host."""
    zipapp: bool
    """Runs the tool server as a program instead of forking it."""
    images: bool
    """Can run an image (a folder) instead of the host's /usr."""
    sif: bool = False
    """Can run a .sif that could not be unpacked."""
    overlays: bool = False
    """Can let an image be written over, and be root of it."""
    sized: bool = True
    """Whether its workspace is of a size that the kernel holds; else the watchdog looks after it.
    """
    server_can_be_killed: bool
    """Whether what runs inside can kill the tool server: then its death is the policy's doing."""
    enforces: tuple[str, ...]
    cannot: tuple[str, ...]
    fix: str
    """What to do when the kind does not work."""
    missing: Callable[[], str] = lambda: ""
    """What the machine lacks for this kind, seen without running it; empty = nothing."""


def _program(*names: str) -> str:
    return (
        ""
        if any(shutil.which(name) for name in names)
        else f"{' or '.join(names)} is not installed"
    )


_NAMESPACES = (
    "files, processes, network, IPC and host name of the host are out of reach",
    "no privileges, no nested user namespaces",
    "sized workspace, /tmp and /dev/shm",
    "processes, size of a file, open files, memory of one process",
    "everything inside ends with it",
)

KINDS = {
    "apptainer": Traits(
        folder=True,
        zipapp=True,
        images=True,
        sif=True,
        overlays=True,
        server_can_be_killed=False,
        enforces=_NAMESPACES,
        cannot=("CPU share", "bugs of the kernel"),
        fix=(
            "install Apptainer (configs/install-apptainer.sh on Debian 12) and allow unprivileged"
            " user namespaces"
        ),
        missing=lambda: (
            ""
            if shutil.which("apptainer") or shutil.which("singularity")
            else "neither apptainer nor singularity is installed"
        ),
    ),
    "bwrap": Traits(
        folder=False,
        zipapp=True,
        images=True,
        server_can_be_killed=False,
        enforces=_NAMESPACES,
        cannot=("CPU share", "bugs of the kernel"),
        fix=(
            "install bubblewrap (apt-get install bubblewrap) and allow unprivileged user namespaces"
        ),
        missing=lambda: _program("bwrap"),
    ),
    "pyns": Traits(
        folder=False,
        zipapp=False,
        images=False,
        server_can_be_killed=False,
        enforces=_NAMESPACES,
        cannot=("CPU share", "bugs of the kernel"),
        fix=(
            "allow unprivileged user namespaces: sysctl user.max_user_namespaces (and"
            " kernel.apparmor_restrict_unprivileged_userns=0)"
        ),
    ),
    "local": Traits(
        folder=True,
        zipapp=False,
        images=False,
        sized=False,
        server_can_be_killed=True,
        enforces=(
            "processes, size of a file, open files, memory of one process",
            "everything inside ends with it",
        ),
        cannot=("network", "readable files of the host", "/tmp", "CPU share", "bugs of the kernel"),
        fix=(
            "run as root (a uid of its own per sandbox), or make the Python interpreter readable by"
            " other users"
        ),
    ),
}
