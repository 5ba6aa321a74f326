"""Steps that several kinds share: joining control groups, limits, waiting for the one inside, and
showing our Python to another uid where it lies in a private home.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import NoReturn

from prorl.linux import calls
from prorl.linux.guard import watch
from prorl.sandbox.launch.spec import Launch, interpreter_roots

MAX_OPEN_FILES = 1024
"""The limit of one process: what most programs expect, and too few to hurt with 64 processes."""
OTHER_PROCESSES = 4096
"""Room for all that a user runs besides: without a uid or a user namespace of its own, a sandbox's
limit counts everything of its user.
"""


RELEASE = tuple(int(part) for part in os.uname().release.partition("-")[0].split(".")[:2])
OPENER_DECIDES = RELEASE >= (5, 16)
"""True if the kernel lets into a control group what its opener may let in; before, what its writer
may.
"""


def open_cgroups(launch: Launch) -> list[int]:
    """Returns what `join_cgroups` writes to, opened while this process may.

    Version 1 has a file for threads too, and a thread may move itself at once; moving a process
    waits 10 ms for an RCU grace period.
    """
    fds = []
    for folder in launch.cgroups:
        threads = f"{folder}/tasks"
        path = threads if os.path.exists(threads) else f"{folder}/cgroup.procs"
        fds.append(os.open(path, os.O_WRONLY | os.O_CLOEXEC))
    return fds


def join_cgroups(groups: Sequence[int], pid: int = 0) -> None:
    """Count and limit together everything that a process starts from now on; 0: this one.

    It must have one thread.

    For what a launcher starts, not for the launcher: one that the kernel kills for the agent's
    memory would look like one that was killed from outside.
    """
    for group in groups:
        os.write(group, str(pid).encode())
        os.close(group)


def limits_of(launch: Launch, *, shares_uid: bool = False) -> dict[str, int]:
    """rlimits of everything inside, by name.

    `shares_uid`: the kernel counts its processes together with all others of its user.
    """
    return {
        "RLIMIT_NPROC": launch.spec.processes + (OTHER_PROCESSES if shares_uid else 0),
        "RLIMIT_AS": (launch.spec.address_bytes or launch.spec.memory_bytes),
        "RLIMIT_FSIZE": launch.spec.file_bytes,
        "RLIMIT_NOFILE": MAX_OPEN_FILES,
        "RLIMIT_CORE": 0,
        "RLIMIT_MEMLOCK": 64 << 10,
        "RLIMIT_MSGQUEUE": 819200,
    }


def exit_like(status: int) -> NoReturn:
    """End with a child's exit code (128 + signal when it was killed)."""
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def guard(pid: int) -> NoReturn:
    """Wait for pid 1 of the sandbox; on SIGTERM kill it.

    Its end means that everything inside has ended.
    """
    status = watch(pid)
    if status is None:
        os.kill(pid, signal.SIGKILL)
        status = os.waitpid(pid, 0)[1]
    exit_like(status)


# ---- what lies in a private home


def is_hidden(layer: str = "") -> bool:
    """Returns whether some folder of the interpreter, or the layer, cannot be entered by others."""
    paths = (*interpreter_roots(), *filter(None, (layer,)))
    return any(_closed_ancestor(path) for path in paths)


def show_interpreter(others: Sequence[tuple[str, int]] = ()) -> None:
    """Prepare the caller's private mount namespace: cover closed homes, put the interpreter and
    `others` back at their own paths.

    `others`: paths with a clone of their mount each; those outside closed homes are covered by
    their clone.
    """
    hidden: dict[str, list[tuple[str, int]]] = {}
    for path, fd in (*((path, -1) for path in interpreter_roots()), *others):
        closed = _closed_ancestor(os.path.dirname(path))
        if closed is not None:
            hidden.setdefault(closed, []).append((path, calls.clone_tree(path) if fd < 0 else fd))
        elif fd >= 0:
            _attach(path, fd)
    for closed, trees in hidden.items():
        calls.mount("tmpfs", closed, "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "size=64k,mode=755")
        for path, fd in trees:
            _attach(path, fd)


def show_stack(launch: Launch, clones: Sequence[int], folder: str, above: str = "") -> None:
    """Mount a stack of folders at `folder`/image, in the caller's private mount namespace.

    `clones`: a detached mount of each; without, they are bound. `above`: a folder of the sandbox's
    that takes what is written.
    """
    calls.mount("tmpfs", folder, "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "size=1m,mode=755")
    paths = (launch.image, *launch.under)
    for number, path in enumerate(paths):
        os.mkdir(f"{folder}/{number}")
        if clones:
            calls.attach_tree(clones[number], f"{folder}/{number}")
            os.close(clones[number])
        else:
            calls.mount(path, f"{folder}/{number}", None, calls.MS_BIND)
    os.mkdir(f"{folder}/image")
    os.chdir(folder)  # short names: all of them must fit on one page
    calls.mount_overlay([str(number) for number in range(len(paths))], "image", above)
    os.chdir("/")


def _attach(path: str, fd: int) -> None:
    if not os.path.lexists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            os.mkdir(path)
        else:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o644))
    calls.attach_tree(fd, path)
    os.close(fd)


def _closed_ancestor(path: str) -> str | None:
    """The topmost folder on the way to `path` that others may not enter."""
    parts = path.strip("/").split("/")
    for depth in range(1, len(parts) + 1):
        folder = "/" + "/".join(parts[:depth])
        if not os.stat(folder).st_mode & 0o001:
            return folder
    return None
