"""Processes that this one can no longer signal, trace or limit: those that it descends from.

    spare_ancestors()       # kill(getppid()), kill(-1) and their like raise PermissionError now

It keeps a mistake of users' code (`os.kill(os.getppid(), 9)`, `os.killpg`) from ending the service.
It is no wall: files, and processes beside these, are as open as before. The filter is inherited by
all that the process starts and cannot be taken off. Format: linux/filter.h, linux/seccomp.h.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import struct
from typing import Final

from prorl.linux.calls import PR_SET_NO_NEW_PRIVS, prctl

CALLS: Final = {
    # name: (x86_64, aarch64); each has a pid as its first argument
    "kill": (62, 129),
    "tkill": (200, 130),
    "tgkill": (234, 131),
    "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240),
    "pidfd_open": (434, 434),
    "prlimit64": (302, 261),
    "process_vm_writev": (311, 271),
}
AUDIT_ARCH: Final = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
PR_SET_SECCOMP, MODE_FILTER = 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
NR, ARCH, ARG0 = 0, 4, 16
ALLOW, REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
MOST = 100
"""Pids and groups: a jump of the filter skips 255 instructions at most."""


def ancestors() -> list[int]:
    """Returns the processes that this one descends from, its parent first."""
    pids, pid = list[int](), os.getppid()
    while pid > 0:
        pids.append(pid)
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b") ")[2].split()[1])
        except OSError:
            break
    return pids


def spare_ancestors() -> None:
    """Nothing changes where the kernel has no such filters."""
    machine = platform.machine()
    if machine not in AUDIT_ARCH:
        return
    pids = ancestors()
    groups = set[int]()
    for pid in pids:
        with contextlib.suppress(OSError):
            groups.add(os.getpgid(pid))
    groups -= {0, os.getpgid(0)}  # 0: the group of a process of another pid namespace
    code = _program(machine, [-1, *pids, *(-group for group in sorted(groups))][:MOST])
    buffer = ctypes.create_string_buffer(code)
    program = struct.pack("HxxxxxxP", len(code) // 8, ctypes.addressof(buffer))
    program_buffer = ctypes.create_string_buffer(program)
    with contextlib.suppress(OSError):
        try:
            prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(program_buffer))
        except PermissionError:  # only who gains no privileges may, without being root
            prctl(PR_SET_NO_NEW_PRIVS, 1)
            prctl(PR_SET_SECCOMP, MODE_FILTER, ctypes.addressof(program_buffer))


def _program(machine: str, pids: list[int]) -> bytes:
    """The filter as `struct sock_filter[]`."""
    column, calls, count = list(AUDIT_ARCH).index(machine), list(CALLS.values()), len(CALLS)
    code = [
        (LOAD, 0, 0, ARCH),
        (EQUAL, 1, 0, AUDIT_ARCH[machine]),
        (RETURN, 0, 0, ALLOW),
        (LOAD, 0, 0, NR),
        *((EQUAL, count - place, 0, numbers[column]) for place, numbers in enumerate(calls)),
        (RETURN, 0, 0, ALLOW),
        (LOAD, 0, 0, ARG0),
        *((EQUAL, len(pids) - place, 0, pid & 0xFFFFFFFF) for place, pid in enumerate(pids)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, REFUSE),
    ]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in code)
