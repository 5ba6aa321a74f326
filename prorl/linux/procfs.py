"""Reads /proc about processes: who a pid is, its descendants, what it uses.

A pid can be reused, so a process is named by its pid and its start time. What is gone, or not ours
to read, is None, 0 or not in the list; nothing here raises.
"""

from __future__ import annotations

import os
from typing import NamedTuple

TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Stat(NamedTuple):
    """proc_pid_stat(5), in part."""

    state: str
    """One letter; Z and X: it has ended, and waits to be reaped."""
    parent: int
    cpu_ticks: int
    """User and system time, its own and that of the children it has reaped."""
    start_ticks: int
    """Since boot."""
    rss_bytes: int


class SysVObject(NamedTuple):
    """An object of System V: shared memory, a queue or a set of semaphores."""

    kind: str
    """shm, msg or sem."""
    id: int
    uid: int
    creator: int
    """The uid that made it, whoever owns it now."""


def sysv_objects() -> list[SysVObject]:
    """Returns all System V objects of this process's IPC namespace (sysvipc(7))."""
    objects = []
    for kind, column in (("shm", "shmid"), ("msg", "msqid"), ("sem", "semid")):
        head, *lines = _read(f"/proc/sysvipc/{kind}").decode().splitlines() or [""]
        columns = head.split()
        for line in lines:
            value = dict(zip(columns, line.split(), strict=False))
            objects.append(
                SysVObject(kind, int(value[column]), int(value["uid"]), int(value["cuid"]))
            )
    return objects


def pids() -> list[int]:
    """Every process that can be seen, zombies included."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat(pid: int) -> Stat | None:
    # the program's name, in brackets, can hold anything
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    if not fields:
        return None
    return Stat(
        fields[0].decode(),
        int(fields[1]),
        sum(map(int, fields[11:15])),
        int(fields[19]),
        int(fields[21]) * PAGE_BYTES,
    )


def start_ticks(pid: int) -> int | None:
    """Returns when a live process started, in clock ticks since boot; None when it is gone or a
    zombie.
    """
    process = stat(pid)
    return None if process is None or process.state in "ZX" else process.start_ticks


def cpu_s(pid: int) -> float:
    """Returns a process's CPU seconds, user and system, its reaped children's included."""
    process = stat(pid)
    return process.cpu_ticks / TICKS_PER_S if process else 0.0


def pss_bytes(pid: int) -> int:
    """Returns resident bytes, with shared pages divided among those who share them.

    So a sum over processes is honest; all of its resident bytes where that is not ours to read.
    """
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    process = stat(pid)
    return process.rss_bytes if process else 0


def num_ptys(pid: int) -> int:
    """Terminals whose master side a process has open."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return 0
    return sum(_link(f"/proc/{pid}/fd/{name}").endswith("/ptmx") for name in names)


def children(pid: int) -> list[int]:
    """Pids of the children of all threads of a process, zombies included."""
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [
        int(word)
        for thread in threads
        for word in _read(f"/proc/{pid}/task/{thread}/children").split()
    ]


def descendants(pid: int) -> list[int]:
    """Returns all processes below `pid`, nearest first; itself not included."""
    pids = children(pid)
    for below in pids:
        pids += children(below)
    return pids


def is_stopped(pid: int) -> bool:
    """Returns whether a process was stopped by a signal, or by a tracer."""
    process = stat(pid)
    return process is not None and process.state in "Tt"


def to_init(pid: int) -> list[int]:
    """Returns a process, and those below it down to the first of the innermost pid namespace.

    Nothing inside that namespace can signal them.
    """
    for child in children(pid):
        chain = to_init(child)
        if len(chain) > 1 or is_init(child):
            return [pid, *chain]
    return [pid]


def is_init(pid: int) -> bool:
    """Returns whether a process is pid 1 of a pid namespace below ours."""
    for line in _read(f"/proc/{pid}/status").splitlines():
        if line.startswith(b"NSpid:"):
            return len(line.split()) > 2 and line.split()[-1] == b"1"
    return False


def _link(path: str) -> str:
    try:
        return os.readlink(path)
    except OSError:
        return ""


def _read(path: str) -> bytes:
    """All of a file of /proc; empty when its process is gone, or it is not ours to read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return b""
    try:
        parts = []
        while part := os.read(fd, 1 << 16):
            parts.append(part)
        return b"".join(parts)
    except OSError:
        return b""
    finally:
        os.close(fd)
