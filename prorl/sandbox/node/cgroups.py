"""Control groups per sandbox where this process may make them.

They bound the memory of everything together, processes, and CPU time where asked.

    version 1   <mount of the controller>/prorl-<name>/<sandbox>     as root
    version 2   <our own group>/prorl-<name>/<sandbox>               where it is delegated to us, by
                                                                     systemd-run -p Delegate=yes
                <the top group>/prorl-<name>/<sandbox>               as root outside a container

Chosen by trying, per controller: a hybrid machine has memory in version 1 and none in version 2. A
delegated group with processes in it cannot have limited groups below (the kernel's
no-internal-processes rule), so what is in it, ourselves included, moves to a leaf beside ours.
Elsewhere rlimits and the watchdog hold; `probe` and `prorl doctor` say which it is. Memory here
includes pages of tmpfs. Formats: Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the
kernel.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import NamedTuple

from prorl.waits import wait_limit_s

V1 = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
LEAF = "prorl-rest"
"""In version 2: where the processes of a delegated group move."""
MAX_MOVE_TRIES = 10
"""A process that forks between the move and the next look is moved at the next try."""
PERIOD_US = 100_000
EXTRA_PROCESSES = 4
"""Launcher and tool server are counted too."""
REMOVE_S = wait_limit_s("sandbox.cgroup")
RETRY_S = 0.01


class Parent(NamedTuple):
    folder: Path
    controllers: tuple[str, ...]
    version: int


class Cgroups:
    """One parent per hierarchy and daemon; a group per sandbox below it."""

    def __init__(self, name: str, allowed: bool = True) -> None:
        self._parents: list[Parent] = []
        versions = usable() if allowed else {}
        for controller in (name for name, version in versions.items() if version == 1):
            self._open(Parent(V1 / controller / f"prorl-{name}", (controller,), 1))
        controllers, base = (
            tuple(name for name, version in versions.items() if version == 2),
            delegated_base(),
        )
        if base is not None and controllers and enable(base, controllers):
            self._open(Parent(base / f"prorl-{name}", controllers, 2))

    def _open(self, parent: Parent) -> None:
        try:
            parent.folder.mkdir(exist_ok=True)
            if parent.version == 2:
                write(parent.folder / "cgroup.subtree_control", delegate(parent.controllers))
        except OSError:
            return
        self._parents.append(parent)

    @property
    def enforced(self) -> tuple[str, ...]:
        """Controllers whose limits the kernel holds sandboxes to: memory, pids, cpu."""
        return tuple(controller for parent in self._parents for controller in parent.controllers)

    def folders(self, sandbox_id: str, cpus: float = 0.0) -> tuple[str, ...]:
        """A sandbox's groups, whether made or not; give them to `Launch.cgroups`."""
        return tuple(str(parent.folder / sandbox_id) for parent in self._parents_for(cpus))

    def make(
        self, sandbox_id: str, memory_bytes: int, processes: int, cpus: float = 0.0
    ) -> tuple[str, ...]:
        """Make its groups with their limits set (`cpus` = cores, 0 for no bound).

        After an error some of them are there.
        """
        for parent in self._parents_for(cpus):
            folder = parent.folder / sandbox_id
            folder.mkdir()
            if "memory" in parent.controllers:
                _limit_memory(folder, parent.version, memory_bytes)
            if "pids" in parent.controllers:
                write(folder / "pids.max", str(processes + EXTRA_PROCESSES))
            if "cpu" in parent.controllers and cpus:
                _limit_cpu(folder, parent.version, cpus)
        return self.folders(sandbox_id, cpus)

    def _parents_for(self, cpus: float) -> list[Parent]:
        return [parent for parent in self._parents if cpus or parent.controllers != ("cpu",)]

    @staticmethod
    def out_of_memory(folders: tuple[str, ...]) -> bool:
        """Returns whether the kernel has killed something in these groups because they reached
        their limit.

        It counts those that it killed when the whole machine ran out, too: not their doing.
        """
        for folder in map(Path, folders):
            reached = _count(folder / "memory.events", "oom") or _was_full(folder)
            if reached and any(
                _count(folder / name, "oom_kill")
                for name in ("memory.events", "memory.oom_control")
            ):
                return True
        return False

    def close(self) -> None:
        for parent in self._parents:
            _rmdir(parent.folder)


def _limit_memory(folder: Path, version: int, memory_bytes: int) -> None:
    name, swap, swap_bytes = {
        1: ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", memory_bytes),
        2: ("memory.max", "memory.swap.max", 0),
    }[version]
    write(folder / name, str(memory_bytes))
    if (folder / swap).exists():
        write(folder / swap, str(swap_bytes))


def _limit_cpu(folder: Path, version: int, cpus: float) -> None:
    quota_us = max(1000, int(cpus * PERIOD_US))
    if version == 2:
        write(folder / "cpu.max", f"{quota_us} {PERIOD_US}")
    else:
        write(folder / "cpu.cfs_period_us", str(PERIOD_US))
        write(folder / "cpu.cfs_quota_us", str(quota_us))


async def remove(folders: tuple[str, ...]) -> None:
    """Kill what is left in these groups and remove them.

    One is busy until the last of its processes is reaped.
    """
    for folder in map(Path, folders):
        for _ in range(int(REMOVE_S / RETRY_S)):
            if _rmdir(folder):
                break
            _kill_all(folder)
            await asyncio.sleep(RETRY_S)


async def remove_parents(name: str) -> None:
    """Remove all groups of the sandboxd that was called so; it must be dead."""
    base = delegated_base()
    for top in [*(V1 / controller for controller in CONTROLLERS), *([base] if base else [])]:
        parent = top / f"prorl-{name}"
        if parent.is_dir():
            await remove(tuple(str(path) for path in parent.iterdir() if path.is_dir()))
            _rmdir(parent)


def _kill_all(folder: Path) -> None:
    try:
        if (folder / "cgroup.kill").exists():
            write(folder / "cgroup.kill", "1")
            return
        for pid in words(folder / "cgroup.procs"):
            os.kill(int(pid), signal.SIGKILL)
    except OSError:
        pass  # gone meanwhile


def _rmdir(folder: Path) -> bool:
    try:
        folder.rmdir()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True


def _count(file: Path, name: str) -> int:
    fields = words(file)
    return int(fields[fields.index(name) + 1]) if name in fields else 0


def _was_full(folder: Path) -> bool:
    """Returns whether a group of version 1 has been at its limit; its `failcnt` no longer
    counts.
    """
    most, limit = (words(folder / f"memory.{name}_in_bytes") for name in ("max_usage", "limit"))
    return bool(most and limit) and int(most[0]) >= int(limit[0])


# ---- which controllers are ours to use, and below which group


def usable() -> dict[str, int]:
    """The version in which each controller seems to be ours to use; changes nothing to find out."""
    base = delegated_base()
    second = words(base / "cgroup.controllers") if base else []
    first = [
        name
        for name in CONTROLLERS
        if (V1 / name / "cgroup.procs").exists() and os.access(V1 / name, os.W_OK)
    ]
    return {
        name: 1 if name in first else 2 for name in CONTROLLERS if name in first or name in second
    }


def delegated_base(mounts: str | None = None, own: str | None = None) -> Path | None:
    """The group of version 2 below which we may make groups, or None.

    Given for tests: mountinfo and /proc/self/cgroup.
    """
    mounts = Path("/proc/self/mountinfo").read_text() if mounts is None else mounts
    own = Path("/proc/self/cgroup").read_text() if own is None else own
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), "")
    for fields in map(str.split, mounts.splitlines()):
        if fields[fields.index("-") + 1] != "cgroup2" or ".." in path:
            continue
        if not Path(path).is_relative_to(fields[3]):
            continue
        base = _base(Path(fields[4]), Path(path).relative_to(fields[3]))
        if os.access(base, os.W_OK) and os.access(base / "cgroup.subtree_control", os.W_OK):
            return base
    return None


def _base(mount: Path, own: Path) -> Path:
    """Our own group below a mount; of root outside a container the top group."""
    group = mount / own
    base = group.parent if group.name == LEAF else group
    return mount if os.getuid() == 0 and not _is_delegated(base) and _is_top(mount) else base


def _is_top(group: Path) -> bool:
    """The top group of the machine: it alone has no type, and may hold processes beside groups."""
    return not (group / "cgroup.type").exists()


def _is_delegated(group: Path) -> bool:
    """Returns whether systemd leaves a group to its unit (Delegate=yes)."""
    for name in ("trusted.delegate", "user.delegate"):
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return False


def enable(base: Path, controllers: tuple[str, ...]) -> bool:
    """Have the kernel pass these controllers on to the groups below `base`; whether it does."""
    control = base / "cgroup.subtree_control"
    if set(controllers) <= set(words(control)):
        return True
    for _ in range(MAX_MOVE_TRIES):
        if not _is_top(base):
            leaf = base / LEAF
            pids = words(base / "cgroup.procs")
            try:
                if pids:
                    leaf.mkdir(exist_ok=True)
                for pid in pids:
                    write(leaf / "cgroup.procs", pid)
            except OSError:
                pass
        try:
            write(control, delegate(controllers))
        except OSError:
            continue  # something was forked in between
        return True
    return False


def delegate(controllers: tuple[str, ...]) -> str:
    """Returns the text that passes controllers on, as `cgroup.subtree_control` takes it."""
    return " ".join(f"+{controller}" for controller in controllers)


def words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def write(file: Path, text: str) -> None:
    """Write in one write(2) to a file that exists: the kernel's files take nothing else."""
    fd = os.open(file, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)
