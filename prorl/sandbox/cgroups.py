"""Control groups per sandbox where this process may make them (v1 as root): memory of everything together, and processes.

Elsewhere only rlimits hold; `probe` and `prorl doctor` say which it is. Memory here includes pages of tmpfs.
"""

from __future__ import annotations

import os
from pathlib import Path

V1 = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids")


class Cgroups:
    """One parent group per controller and daemon; a group per sandbox below it."""

    def __init__(self, name: str) -> None:
        self._parents: dict[str, Path] = {}
        for controller in self.usable():
            parent = V1 / controller / f"prorl-{name}"
            try:
                parent.mkdir(exist_ok=True)
            except OSError:
                continue
            self._parents[controller] = parent

    @staticmethod
    def usable() -> tuple[str, ...]:
        """Controllers below which this process may make groups."""
        return tuple(
            controller for controller in CONTROLLERS if (V1 / controller / "cgroup.procs").exists() and os.access(V1 / controller, os.W_OK)
        )

    @staticmethod
    def none() -> Cgroups:
        """No control groups at all."""
        groups = object.__new__(Cgroups)
        groups._parents = {}
        return groups

    @property
    def enforced(self) -> tuple[str, ...]:
        """Which controllers are used."""
        return tuple(self._parents)

    def make(self, sandbox_id: str, memory_bytes: int, processes: int) -> tuple[str, ...]:
        """Groups with their limits set; give the folders to `Launch.cgroups`."""
        folders = []
        for controller, parent in self._parents.items():
            folder = parent / sandbox_id
            folder.mkdir()
            if controller == "memory":
                (folder / "memory.limit_in_bytes").write_text(str(memory_bytes))
            else:
                # Launcher and tool server are counted too.
                (folder / "pids.max").write_text(str(processes + 4))
            folders.append(str(folder))
        return tuple(folders)

    @staticmethod
    def out_of_memory(folders: tuple[str, ...]) -> bool:
        """Whether the kernel has killed something in these groups for want of memory."""
        for folder in folders:
            try:
                text = Path(folder, "memory.oom_control").read_text()
            except OSError:
                continue
            if any(line.startswith("oom_kill ") and line != "oom_kill 0" for line in text.splitlines()):
                return True
        return False

    def close(self) -> None:
        """Remove the parents; what still has groups below it stays. Idempotent."""
        for parent in self._parents.values():
            try:
                parent.rmdir()
            except OSError:
                pass
