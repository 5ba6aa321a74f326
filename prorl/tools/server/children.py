"""Starting and ending the agent's processes.

Each runs in a session of its own, so that all of it can be signalled at once.
"""

from __future__ import annotations

import errno
import os
import time

from prorl.tools.server.events import Events
from prorl.tools.server.light import TYPE_CHECKING, signal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    T = TypeVar("T")

EXIT_TIMEOUT = 124
"""Exit code of whatever a deadline has ended, as timeout(1) gives it."""
KILL_S, REAP_S = 2.0, 0.01
"""The seconds for which a full sandbox is cleared for a fork, and the wait between two tries."""
HOME = "/"
"""The place where the server itself stays: a folder that the agent cannot close."""
DEFAULT_SIGNALS = (
    signal.SIGPIPE,
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGCHLD,
    signal.SIGXFSZ,
)


def prepare(make_dumpable: bool = True) -> None:
    """Prepare a new child: default signals, visible to its own /proc."""
    for number in DEFAULT_SIGNALS:
        signal.signal(number, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    if make_dumpable:
        set_dumpable(1)


def restrict(limits: dict[str, int], seccomp: bytes) -> None:
    """Set rlimits by name and a seccomp filter, on this process and all that it starts.

    For where the launcher could not set them. Raises OSError.
    """
    import resource

    for name, value in limits.items():
        which = getattr(resource, name)
        hard = resource.getrlimit(which)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(which, (value, value))
    # an image without libffi has no ctypes: there the namespaces stand alone
    if seccomp and libc() is not None:
        _filter(seccomp)


def _filter(seccomp: bytes) -> None:
    """Set a seccomp filter (`struct sock_filter[]`). Raises OSError."""
    import ctypes
    import struct

    code = ctypes.create_string_buffer(seccomp, len(seccomp))
    header = struct.pack("HxxxxxxQ", len(seccomp) // 8, ctypes.addressof(code))
    pointer = ctypes.create_string_buffer(header, len(header))
    libc().prctl(38, 1, 0, 0, 0)
    if libc().prctl(22, ctypes.c_ulong(2), pointer, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl PR_SET_SECCOMP")


_LIBC: list[Any] = []
"""The C library once it was needed."""


def libc() -> Any:
    """The C library, or None where Python has no ctypes. Imported late: it costs 3 ms."""
    if not _LIBC:
        try:
            import ctypes

            _LIBC.append(ctypes.CDLL(None, use_errno=True))
        except (ImportError, OSError):
            _LIBC.append(None)
    return _LIBC[0]


def set_dumpable(value: int) -> None:
    """Set PR_SET_DUMPABLE: 0 keeps processes of the same uid from tracing the server.

    Children switch it back on.
    """
    if libc() is not None:
        libc().prctl(4, value, 0, 0, 0)


class Forked:
    """Holds the body of a forked child, which ends whatever happens in it.

    It never runs the parent's code. Not `prorl.linux.forked`, of which an image has no copy.
    """

    def __init__(self, report_fd: int) -> None:
        self._report_fd = report_fd

    def __enter__(self) -> None:
        return None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        try:
            if isinstance(error, OSError):
                os.write(self._report_fd, str(error.errno or 0).encode())
            elif error is not None:
                os.write(self._report_fd, b"0")
        finally:
            os._exit(127)


class MakeRoom:
    """Runs something that forks; at the sandbox's process limit everything inside is killed first.

    The agent has broken its own sandbox then, and its next command must not fail for that. Only
    where no process outside can be hit (`alone`): the server is pid 1 of its namespace, or has a
    uid for itself.
    """

    def __init__(self, events: Events, alone: bool) -> None:
        self._events, self._alone = events, alone

    def __call__(self, fork: Callable[[], T]) -> T:
        until = 0.0
        while True:
            try:
                return fork()
            except OSError as error:
                if error.errno != errno.EAGAIN or not self._alone or 0.0 < until < time.monotonic():
                    raise
            until = until or time.monotonic() + KILL_S
            kill_everything()
            # A dead process counts until it is reaped, by us or by the guard outside.
            self._events.wait([], time.monotonic() + REAP_S, peers=True)
            self._events.reap()

    def clear_if_full(self) -> bool:
        """After a deadline: end everything inside where it takes most of the processes that there
        may be, as a fork bomb does, which leaves room for a moment and takes it again.
        """
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if not self._alone or limit == resource.RLIM_INFINITY or _num_inside() * 2 < limit:
            return False
        until = time.monotonic() + KILL_S
        while _num_inside() * 2 >= limit and time.monotonic() < until:
            kill_everything()
            self._events.wait([], time.monotonic() + REAP_S, peers=True)
            self._events.reap()
        return True


def kill_everything() -> None:
    try:
        os.kill(-1, signal.SIGKILL)
    except ProcessLookupError:
        pass


def spawn(
    argv: list[str], actions: Sequence[tuple[Any, ...]], env: dict[str, str], cwd: str
) -> int:
    """Start a program in a session of its own; its pid. Raises OSError when it cannot be run.

    `actions` put its descriptors in place (`os.posix_spawn`); others must be close-on-exec. Not
    fork: copying this process's pages, and then each that either side touches, costs four times
    as much as the program's start.
    """
    try:
        os.chdir(cwd)
        return os.posix_spawn(
            find(argv[0], env),
            argv,
            env,
            file_actions=actions,
            setsid=True,
            setsigdef=DEFAULT_SIGNALS,
        )
    finally:
        os.chdir(HOME)


def enter(*folders: str) -> str:
    """Go to the first of these folders that lets us; the agent can close its own. Returns it."""
    for folder in folders:
        try:
            os.chdir(folder)
            return folder
        except OSError:
            continue
    os.chdir(HOME)
    return HOME


def reachable(*folders: str) -> str:
    """The folder that `enter` would choose."""
    try:
        return enter(*folders)
    finally:
        os.chdir(HOME)


def find(program: str, env: dict[str, str]) -> str:
    """Returns the path where `execvpe` would find a program. Raises FileNotFoundError."""
    if "/" in program:
        return program
    for folder in env.get("PATH", os.defpath).split(":"):
        path = os.path.join(folder, program)
        if os.access(path, os.X_OK) and os.path.isfile(path):
            return path
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)


def session(leader: int) -> list[int]:
    """Every living process of a session, orphans included, its leader last."""
    members = [
        pid for pid in _pids() if pid != leader and _stat(pid)[3:4] == [str(leader).encode()]
    ]
    return [*members, leader]


def _stat(pid: int) -> list[bytes]:
    """Fields of /proc/PID/stat from the state on: state, parent, group, session ..."""
    return (_read(f"/proc/{pid}/stat") or b"").rpartition(b")")[2].split()


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _num_inside() -> int:
    """Returns the number of this sandbox's processes: all that are seen by pid 1 of a namespace,
    else those of our uid, which the host's others must not be counted with.
    """
    if os.getpid() == 1:
        return len(_pids())
    return sum(_owner(pid) == os.getuid() for pid in _pids())


def _owner(pid: int) -> int:
    try:
        return os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return -1  # it has just ended


def signal_group(pid: int, number: int) -> None:
    """Signal a session leader's group; one that is gone is no error."""
    try:
        os.killpg(pid, number)
    except (ProcessLookupError, PermissionError):
        pass


def descendants(pid: int) -> list[int]:
    """All living descendants of a process, nearest first (from /proc, so a snapshot)."""
    pids: list[int] = []
    pending = [pid]
    while pending:
        parent = pending.pop()
        children = _read(f"/proc/{parent}/task/{parent}/children")
        numbers = [int(word) for word in (children or b"").split()]
        pids += numbers
        pending += numbers
    return pids


def _read(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return None
