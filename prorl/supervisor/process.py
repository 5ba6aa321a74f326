"""Who a pid is: a pid alone can be reused, so a process is named by its pid and its start time."""

from __future__ import annotations

from pathlib import Path


def start_ticks(pid: int) -> int | None:
    """Start time of a live process in clock ticks since boot; None when it is gone or a zombie.

    >>> import os
    >>> start_ticks(os.getpid()) == start_ticks(os.getpid())
    True
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def pss_bytes(pid: int) -> int:
    """Proportional set size: shared pages are divided among those who share them, so that a sum
    over processes is honest.
    """
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:"))


def cpu_s(pid: int, ticks_per_s: int) -> float:
    """User and system CPU seconds of a process, its reaped children included."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(field) for field in fields[11:15]) / ticks_per_s


def descendants(pid: int) -> list[int]:
    """All live processes below `pid`, in no order; itself not included."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(int(entry.name))
            parents.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    pending = [pid]
    while pending:
        below = parents.get(pending.pop(), [])
        found.extend(below)
        pending.extend(below)
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return -1
