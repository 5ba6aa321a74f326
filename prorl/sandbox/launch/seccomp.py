"""A seccomp filter that takes away system calls no tool of an agent needs.

It is a list of what is denied; everything else passes.

It is a second wall behind the namespaces: what it denies has been the way through the first one
before (CVE lists of bpf, io_uring, userfaultfd, keyctl; TIOCSTI). Sockets are those of `FAMILIES`:
a network namespace does not hold AF_VSOCK, which reaches from a virtual machine into its host.
`clone3` answers ENOSYS, so that libc falls back to `clone`, whose flags a filter can read.
`prlimit64` sets limits of the caller only: with its own uid's rights a program could give the tool
server a second of CPU time, and its end would look like a kill from outside. Format:
linux/filter.h, linux/seccomp.h.
"""

from __future__ import annotations

import errno
import os
import struct
from functools import cache
from typing import NamedTuple

DENIED = {
    # name: (x86_64, aarch64)
    "ptrace": (101, 117),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "setns": (308, 268),
    "unshare": (272, 97),
    "swapon": (167, 224),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "acct": (163, 89),
    "syslog": (103, 116),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_setup": (206, 0),  # its pool is the whole machine's
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsmount": (432, 432),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
}
CLONE = (56, 220)
CLONE3 = (435, 435)
IOCTL = (16, 29)
SOCKET = (41, 198)
PRLIMIT = (302, 261)
FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
PROTOCOLS = (136, 262)
"""UDP-Lite and MPTCP, refused: nothing on `lo` needs them."""
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NAMESPACE_FLAGS = 0x7E020000
"""Every CLONE_NEW* flag that clone(2) takes."""
TTY_IOCTLS = (0x5412, 0x541C, 0x5423)
"""TIOCSTI and TIOCLINUX type into terminals, TIOCSETD loads line disciplines."""
X32_BIT = 0x40000000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
NR, ARCH, ARG0, ARG1, ARG2 = 0, 4, 16, 24, 32
HIGH = 4
"""From the low half of an argument to its high half."""
ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000


class Instruction(NamedTuple):
    """One BPF instruction: jump offsets count the instructions to skip."""

    code: int
    value: int
    if_true: int = 0
    if_false: int = 0


REFUSE = Instruction(RETURN, ERRNO | errno.EPERM)
PASS = Instruction(RETURN, ALLOW)


def program(machine: str) -> list[Instruction]:
    """The filter for a machine of AUDIT_ARCH."""
    column = list(AUDIT_ARCH).index(machine)
    code = [
        Instruction(LOAD, ARCH),
        Instruction(EQUAL, AUDIT_ARCH[machine], 1, 0),
        Instruction(RETURN, KILL),
        Instruction(LOAD, NR),
    ]
    if machine == "x86_64":
        code += [Instruction(AT_LEAST, X32_BIT, 0, 1), REFUSE]
    code += [Instruction(EQUAL, CLONE3[column], 0, 1), Instruction(RETURN, ERRNO | errno.ENOSYS)]
    for numbers in DENIED.values():
        code += [Instruction(EQUAL, numbers[column], 0, 1), REFUSE]
    return [*code, *_sockets(column), *_by_arguments(column)]


def _sockets(column: int) -> list[Instruction]:
    """Let pass sockets of FAMILIES but for PROTOCOLS; other calls go on behind these."""
    code = [
        Instruction(LOAD, ARG0),
        *(
            Instruction(EQUAL, family, len(FAMILIES) - place, 0)
            for place, family in enumerate(FAMILIES)
        ),
        Instruction(RETURN, ERRNO | errno.EAFNOSUPPORT),
        Instruction(LOAD, ARG2),
        *(
            Instruction(EQUAL, protocol, len(PROTOCOLS) - place, 0)
            for place, protocol in enumerate(PROTOCOLS)
        ),
        PASS,
        Instruction(RETURN, ERRNO | errno.EPROTONOSUPPORT),
    ]
    return _of_call(SOCKET[column], code)


def _by_arguments(column: int) -> list[Instruction]:
    """Refuse what clone, ioctl and prlimit64 do with some arguments; allow all else."""
    clone = [Instruction(LOAD, ARG0), Instruction(ANY_BIT, NAMESPACE_FLAGS, 0, 1), REFUSE, PASS]
    ioctl = [
        Instruction(LOAD, ARG1),
        *(
            Instruction(EQUAL, request, len(TTY_IOCTLS) - place, 0)
            for place, request in enumerate(TTY_IOCTLS)
        ),
        PASS,
        REFUSE,
    ]
    prlimit = [
        Instruction(LOAD, ARG0),
        Instruction(EQUAL, 0, 5, 0),  # of itself
        Instruction(LOAD, ARG2),
        Instruction(EQUAL, 0, 0, 2),
        Instruction(LOAD, ARG2 + HIGH),
        Instruction(EQUAL, 0, 1, 0),  # no new limit: it only asks
        REFUSE,
    ]
    calls = ((CLONE, clone), (IOCTL, ioctl), (PRLIMIT, prlimit))
    code = [
        instruction for numbers, code in calls for instruction in _of_call(numbers[column], code)
    ]
    return [*code, PASS]


def _of_call(number: int, code: list[Instruction]) -> list[Instruction]:
    """Instructions for one system call, which all others jump over."""
    return [Instruction(EQUAL, number, 0, len(code)), *code]


@cache
def bytecode() -> bytes:
    """The filter as `struct sock_filter[]`; empty on a machine that is not listed."""
    machine = os.uname().machine
    code = program(machine) if machine in AUDIT_ARCH else []
    return b"".join(
        struct.pack("=HBBI", each.code, each.if_true, each.if_false, each.value) for each in code
    )
