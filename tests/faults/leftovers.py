"""Counts what a sandboxd and its sandboxes consist of on this machine, from outside, whoever else
works here.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from prorl.linux.procfs import children, descendants, is_init, pids, start_ticks
from prorl.sandbox.node.cgroups import CONTROLLERS, V1, delegated_base

EXIT_LIMIT_S = 20.0
GROUPS = (*(V1 / controller for controller in CONTROLLERS), delegated_base() or V1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Leftovers:
    """Counts; all are 0 when nothing is left."""

    processes: int = 0
    mounts: int = 0
    sockets: int = 0
    folders: int = 0
    groups: int = 0

    @property
    def total(self) -> int:
        """Everything."""
        return sum(asdict(self).values())

    def __add__(self, other: Leftovers) -> Leftovers:
        return Leftovers(
            **{name: value + getattr(other, name) for name, value in asdict(self).items()}
        )

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items())


class Watched:
    """One sandboxd's things: `name` of its socket folder, its root, `mark` in the command line of
    what its agents run.
    """

    def __init__(self, name: str, root: Path, mark: str) -> None:
        self.name, self.root, self.mark = name, root, mark
        self._start_ticks: dict[int, int | None] = {}

    def remember(self, pid: int) -> None:
        """Everything below a process is to be gone later, as is the process itself."""
        for member in (pid, *descendants(pid)):
            self._start_ticks[member] = start_ticks(member)

    def living(self) -> set[int]:
        """Processes of before, of the agents, and in the control groups."""
        survivors = {
            pid
            for pid, ticks in self._start_ticks.items()
            if ticks is not None and start_ticks(pid) == ticks
        }
        grouped = {
            int(word) for group in self.groups() for word in _text(group / "cgroup.procs").split()
        }
        return (
            survivors | marked(self.mark) | {pid for pid in grouped if start_ticks(pid) is not None}
        )

    def agents(self) -> set[int]:
        """Returns the processes that its agents run just now."""
        return marked(self.mark)

    def groups(self) -> list[Path]:
        """Control groups of its sandboxes."""
        return [group for top in GROUPS for group in top.glob(f"prorl-{self.name}/*/")]

    def count_leftovers(self, *, daemon: bool) -> Leftovers:
        """Counts what there is of its sandboxes; with `daemon`, also what sandboxd itself has while
        it lives.
        """
        sockets = _names(Path(f"/tmp/prorl-{os.getuid()}") / self.name)
        num_in_kernel = sum(
            f"/{self.name}/" in line for line in _text(Path("/proc/net/unix")).splitlines()
        )
        own = int(daemon) * (
            len(sockets & {"owner"})
            + sum(len(list(top.glob(f"prorl-{self.name}"))) for top in GROUPS)
        )
        return Leftovers(
            processes=len(self.living()),
            mounts=sum(
                str(self.root) in line for line in _text(Path("/proc/self/mountinfo")).splitlines()
            ),
            sockets=len(sockets - {"owner"}) + num_in_kernel,
            folders=sum(len(_names(self.root / folder)) for folder in ("live", "work", "trash")),
            groups=len(self.groups()) + own,
        )

    async def until_none(
        self, *, daemon: bool = False, processes_only: bool = False
    ) -> tuple[Leftovers, float]:
        """Wait until nothing is left; what is, after a while, and the seconds that it took."""
        begin = time.monotonic()
        while True:
            leftovers = (
                Leftovers(processes=len(self.living()))
                if processes_only
                else self.count_leftovers(daemon=daemon)
            )
            if leftovers.total == 0 or time.monotonic() - begin > EXIT_LIMIT_S:
                return leftovers, time.monotonic() - begin
            await asyncio.sleep(0.01)


def tool_server(launcher: int) -> int:
    """The process that serves a sandbox's socket: what the zygote started where that is pid 1, the
    launcher's first child, or what foreign launchers below it have started.
    """
    if is_init(launcher):
        return launcher
    pid = children(launcher)[0]
    programs = [
        member
        for member in descendants(pid)
        if "server.pyz" in _text(Path(f"/proc/{member}/cmdline"))
    ]
    return next((member for member in programs if not set(programs) & set(children(member))), pid)


def marked(mark: str) -> set[int]:
    """Processes with this text in their command line."""
    return {
        pid
        for pid in pids()
        if pid != os.getpid()
        and mark in _text(Path(f"/proc/{pid}/cmdline"))
        and start_ticks(pid) is not None
    }


def _names(folder: Path) -> set[str]:
    try:
        return set(os.listdir(folder))
    except FileNotFoundError:
        return set()


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
