"""Returns how much memory remains for this process: the machine's, or less where a control group
bounds it.

Control groups count page cache as used: inactive file pages count as free here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def available_bytes() -> int:
    """Returns the least that the machine and each group around us still have."""
    fields = _fields(Path("/proc/meminfo"), ":")
    return min([fields["MemAvailable"] * 1024, *_group_headroom()])


def _group_headroom() -> Iterator[int]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "memory":
            top, limit, used = ROOT / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
        elif not controllers:
            top, limit, used = ROOT, "memory.max", "memory.current"
        else:
            continue
        group = top / path.lstrip("/")
        while group != top.parent:
            try:
                bound = (group / limit).read_text().strip()
                if bound.isdigit():
                    cached = _fields(group / "memory.stat", " ").get("inactive_file", 0)
                    yield int(bound) - int((group / used).read_text()) + cached
            except OSError:
                pass  # not a group of ours to read, or the hierarchy's top
            group = group.parent


def _fields(path: Path, between: str) -> dict[str, int]:
    rows = (line.split(between, 1) for line in path.read_text().splitlines() if between in line)
    return {name: int(value.split()[0]) for name, value in rows}
