"""Measures what a tree of processes uses and holds: CPU, memory, and everything that must not grow.

CPU comes from a control group of its own where this process may make one (cpuacct, version 1):
exact, and with the CPU of processes that nobody waited for, such as a shell that ends with its
sandbox. Elsewhere it is summed from /proc, in ticks, without those.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from prorl.linux import procfs

ACCOUNTS = Path("/sys/fs/cgroup/cpuacct")
EXIT_S = 5.0


class CpuMeter:
    """CPU seconds of a process and everything below it."""

    def __init__(self, group: Path | None) -> None:
        self._group = group
        self._root = 0

    def watch(self, root: int) -> None:
        """Begin with a process and its present descendants; later ones are counted too."""
        self._root = root
        if self._group is not None:
            for pid in tree(root):
                (self._group / "cgroup.procs").write_text(str(pid))

    @property
    def source(self) -> str:
        return "/proc, ticks" if self._group is None else "cpuacct"

    def cpu_s(self) -> float:
        """CPU seconds since `watch`, or since ever: only differences mean something."""
        if self._group is not None:
            return int((self._group / "cpuacct.usage").read_text()) / 1e9
        return sum(map(procfs.cpu_s, tree(self._root)))


@contextmanager
def cpu_meter() -> Iterator[CpuMeter]:
    """A meter; the processes that it watches must have ended when the block does."""
    group = ACCOUNTS / f"prorl-bench-{os.getpid()}-{time.monotonic_ns()}"
    try:
        group.mkdir()
    except OSError:
        yield CpuMeter(None)
        return
    try:
        yield CpuMeter(group)
    finally:
        _remove(group)


def _remove(group: Path) -> None:
    until = time.monotonic() + EXIT_S
    while time.monotonic() < until:
        try:
            group.rmdir()
        except OSError:
            time.sleep(0.02)  # busy until the last of its processes is reaped, by whomever
        else:
            return


def tree(root: int) -> list[int]:
    return [root, *procfs.descendants(root)]


def pss_mb(root: int) -> float:
    """Memory of a process and its descendants, shared pages divided among all who share them."""
    return sum(map(procfs.pss_bytes, tree(root))) / (1 << 20)


def counts(root: int, sockets: Path, folder: Path) -> dict[str, int]:
    """Returns what must be the same after a thousand sandboxes.

    It is counted for a sandboxd with this folder of sockets and this root.
    """
    pids = tree(root)
    return {
        "processes": len(pids),
        "descriptors": sum(len(_names(Path(f"/proc/{pid}/fd"))) for pid in pids),
        "mounts": sum(
            len(Path(f"/proc/{pid}/mounts").read_text().splitlines())
            for pid in (os.getpid(), *pids)
        ),
        "sockets": sum(
            str(sockets) in line for line in Path("/proc/net/unix").read_text().splitlines()
        ),
        "files": (
            sum(len(files) + len(folders) for _, folders, files in os.walk(folder))
            + len(_names(sockets))
        ),
        "groups": sum(1 for _ in Path("/sys/fs/cgroup").glob(f"*/prorl-{sockets.name}/*/")),
    }


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def times_ms(work: Callable[[], object], repeats: int) -> list[float]:
    """Wall milliseconds of each of `repeats` runs, after one that is not counted."""
    work()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return times
