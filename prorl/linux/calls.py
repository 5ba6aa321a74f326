"""The system calls that Python lacks, by ctypes; each raises OSError with what was tried.

Those that change the process (namespaces, privileges, mounts) are for launchers, which are forked
and have one thread. Numbers are of the generic ABI, or of x86_64 and aarch64 (raw system calls).
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Sequence
from typing import Final

CLONE_NEWNS: Final = 0x20000
CLONE_NEWCGROUP: Final = 0x2000000
CLONE_NEWUTS: Final = 0x4000000
CLONE_NEWIPC: Final = 0x8000000
CLONE_NEWUSER: Final = 0x10000000
CLONE_NEWPID: Final = 0x20000000
CLONE_NEWNET: Final = 0x40000000
SIGCHLD: Final = 17

MS_RDONLY: Final = 1
MS_NOSUID: Final = 2
MS_NODEV: Final = 4
MS_NOEXEC: Final = 8
MS_REMOUNT: Final = 32
MS_BIND: Final = 4096
MS_REC: Final = 16384
MS_PRIVATE: Final = 1 << 18
MNT_DETACH: Final = 2

PR_SET_PDEATHSIG: Final = 1
PR_SET_DUMPABLE: Final = 4
PR_CAPBSET_DROP: Final = 24
PR_SET_CHILD_SUBREAPER: Final = 36
PR_SET_NO_NEW_PRIVS: Final = 38

OPEN_TREE_CLONE: Final = 1
OPEN_TREE_CLOEXEC: Final = os.O_CLOEXEC
AT_RECURSIVE: Final = 0x8000
AT_EMPTY_PATH: Final = 0x1000
MOVE_MOUNT_F_EMPTY_PATH: Final = 4
AT_FDCWD: Final = -100
SYS_OPEN_TREE: Final = 428
SYS_MOVE_MOUNT: Final = 429
SYS_MOUNT_SETATTR: Final = 442
MOUNT_ATTR_RDONLY: Final = 1
MOUNT_ATTR_NOSUID: Final = 2
MOUNT_ATTR_NODEV: Final = 4
MOUNT_ATTR_IDMAP: Final = 0x100000
OOM_FIRST: Final = "1000"
"""Highest score: its processes go first when the machine's memory runs out."""
MACHINE: Final = os.uname().machine
SYS_CLONE: Final = {"x86_64": 56, "aarch64": 220}.get(MACHINE, 56)
SYS_PIVOT_ROOT: Final = {"x86_64": 155, "aarch64": 41}.get(MACHINE, 155)

_libc = ctypes.CDLL(None, use_errno=True)
_holding_gil = ctypes.PyDLL(None, use_errno=True)
"""The same library, called as `os.fork` calls it: the child must own the interpreter."""


def _check(result: int, call: str) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")
    return result


def unshare(flags: int) -> None:
    """Give this process new namespaces (CLONE_NEW*); a pid namespace begins with its next child."""
    _check(_libc.unshare(flags), f"unshare {flags:#x}")


def fork_into(namespaces: int) -> int:
    """fork(2) whose child begins in new namespaces (CLONE_NEW*), of CLONE_NEWPID as their pid 1.

    Only for a process with one thread: what the C library does around a fork for the sake of other
    threads is left out.
    """
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _holding_gil.syscall(SYS_CLONE, namespaces | SIGCHLD, 0, 0, 0, 0)
    number = ctypes.get_errno()
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    if pid < 0:
        raise OSError(number, f"clone {namespaces:#x}: {os.strerror(number)}")
    return int(pid)


def map_ids(inside: int, uid: int, gid: int, process: int | str = "self") -> None:
    """Give a process's new user namespace one uid and one gid, and no other."""
    maps = {"setgroups": "deny", "uid_map": f"{inside} {uid} 1", "gid_map": f"{inside} {gid} 1"}
    for name, text in maps.items():
        _write(f"/proc/{process}/{name}", text)


def go_first(process: int | str = "self") -> None:
    """Have the kernel end this process before others when the machine's memory runs out.

    What a privileged process writes here, an ordinary one cannot lower.
    """
    _write(f"/proc/{process}/oom_score_adj", OOM_FIRST)


def _write(path: str, text: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.write(fd, text.encode())
    finally:
        os.close(fd)


def mount(
    source: str | None, target: str, kind: str | None, flags: int, data: str | None = None
) -> None:
    """mount(2): `source` or None where flags say what is done to `target`; `data` are options."""
    words = [None if word is None else os.fsencode(word) for word in (source, target, kind, data)]
    result = _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3])
    _check(result, f"mount {kind or 'bind'} {source} on {target}")


def mount_overlay(folders: Sequence[str], target: str, above: str = "") -> None:
    """Mount folders over each other, topmost first and short: all of their names fit on one page.

    `above`: a folder with `upper` and `work`, where changes go; without it there are none.
    """
    options = f"lowerdir={':'.join(folders)},userxattr"
    options += f",upperdir={above}/upper,workdir={above}/work" if above else ""
    flags = (0 if above else MS_RDONLY) | MS_NOSUID | MS_NODEV
    mount("overlay", target, "overlay", flags, options)


def umount_detach(target: str) -> None:
    """Take a mount away at once; it ends when its last user does."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def pivot_root(new: str, old: str) -> None:
    """Make `new` the root and put the old one at `old`."""
    _check(_libc.syscall(SYS_PIVOT_ROOT, os.fsencode(new), os.fsencode(old)), f"pivot_root {new}")


def prctl(option: int, value: int = 0, pointer: int = 0) -> None:
    words = map(ctypes.c_ulong, (value, pointer, 0, 0))
    _check(_libc.prctl(option, *words), f"prctl {option}")


def die_with_parent(signal_number: int, parent: int = 0) -> None:
    """Get this signal when the parent ends (PR_SET_PDEATHSIG).

    With `parent`, its pid, also end at once, with status 1, when it has ended before: nobody would
    tell. Follows the parent's *thread*, and is cleared by every change of credentials, so it is set
    again after each.
    """
    prctl(PR_SET_PDEATHSIG, signal_number)
    if parent and os.getppid() != parent:
        os._exit(1)


def drop_capabilities(kept_mask: int = 0) -> None:
    """Empty every capability set but for a mask's, the bounding set included, and forbid new
    privileges for ever.
    """
    for capability in range(64):
        if kept_mask >> capability & 1:
            continue
        if _libc.prctl(PR_CAPBSET_DROP, ctypes.c_ulong(capability), 0, 0, 0) != 0:
            break
    header, words = (
        struct.pack("Ii", 0x20080522, 0),
        struct.pack("6I", kept_mask, kept_mask, 0, 0, 0, 0),
    )
    _check(_libc.capset(header, words), "capset")
    prctl(PR_SET_NO_NEW_PRIVS, 1)


def drop_to(uid: int) -> None:
    """Become an ordinary user for good. Raises PermissionError for uid 0.

    Its processes go first when the machine's memory runs out.
    """
    go_first()
    if uid >= 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    if os.getuid() == 0 or os.geteuid() == 0:
        raise PermissionError("refusing to run a sandbox as uid 0")
    # A change of uid makes a process undumpable, and then /proc/self/uid_map belongs to root.
    prctl(PR_SET_DUMPABLE, 1)


def clone_tree(path: str) -> int:
    """A detached copy of the mounts at `path`, usable from another mount namespace (Linux 5.2)."""
    flags = OPEN_TREE_CLONE | OPEN_TREE_CLOEXEC | AT_RECURSIVE
    return _check(
        _libc.syscall(SYS_OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), f"open_tree {path}"
    )


def change_tree(fd: int, attributes: int, user_namespace: int = 0) -> None:
    """Change what `clone_tree` made, by mount_setattr(2).

    With MOUNT_ATTR_IDMAP owners are as that namespace maps them (Linux 5.12).
    """
    words = struct.pack("QQQQ", attributes, 0, 0, user_namespace)
    result = _libc.syscall(
        SYS_MOUNT_SETATTR, fd, b"", AT_EMPTY_PATH | AT_RECURSIVE, words, ctypes.c_size_t(len(words))
    )
    _check(result, f"mount_setattr {attributes:#x}")


def attach_tree(fd: int, target: str) -> None:
    result = _libc.syscall(
        SYS_MOVE_MOUNT, fd, b"", AT_FDCWD, os.fsencode(target), MOVE_MOUNT_F_EMPTY_PATH
    )
    _check(result, f"move_mount to {target}")


def remove_sysv(kind: str, number: int) -> None:
    """`kind`: shm, msg or sem."""
    ipc_rmid = 0
    if kind == "sem":
        result = _libc.semctl(number, 0, ipc_rmid)
    else:
        result = (_libc.shmctl if kind == "shm" else _libc.msgctl)(number, ipc_rmid, None)
    _check(result, f"{kind}ctl {number} IPC_RMID")


def sync_file_system(path: str) -> None:
    """syncfs(2): everything of the file system that holds `path` is on disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check(_libc.syncfs(fd), f"syncfs {path}")
    finally:
        os.close(fd)


def loopback_up() -> None:
    """Switch on `lo` of this network namespace."""
    import fcntl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as handle:
        fcntl.ioctl(handle, 0x8914, struct.pack("16sH14s", b"lo", 0x49, bytes(14)))
