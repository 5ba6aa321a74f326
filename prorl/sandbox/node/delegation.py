"""Which controllers of control groups are ours to use, and below which group.

What it needs to know of version 1 and 2 is in `cgroups.py`, which makes the groups.
"""

from __future__ import annotations

import os
from pathlib import Path

V1 = Path("/sys/fs/cgroup")
CONTROLLERS = ("memory", "pids", "cpu")
LEAF = "prorl-rest"
"""In version 2: where the processes of a delegated group move."""
MOVES = 10


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
    """What systemd notes on a group that it leaves to its unit (Delegate=yes)."""
    for name in ("trusted.delegate", "user.delegate"):
        try:
            if os.getxattr(group, name) == b"1":
                return True
        except OSError:
            continue
    return False


def enable(base: Path, wanted: tuple[str, ...]) -> bool:
    """Have the kernel pass these controllers on to the groups below `base`; whether it does."""
    control = base / "cgroup.subtree_control"
    if set(wanted) <= set(words(control)):
        return True
    for _ in range(MOVES):
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
            write(control, delegate(wanted))
        except OSError:
            continue  # something was forked in between
        return True
    return False


def delegate(controllers: tuple[str, ...]) -> str:
    """What passes controllers on, as `cgroup.subtree_control` takes it."""
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
