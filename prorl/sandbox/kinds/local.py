"""local: a plain process tree with an ordinary uid of its own, rlimits and a session of its own.

It isolates little.

Contained: the host's other users' private files (by uid, where we are root), process count, file
size, memory per process; every process of the sandbox ends with it. Not contained: network, host's
readable files, /tmp, other processes' names. Total memory and the workspace on disk are the control
group's and the watchdog's. Without root it has not even a uid of its own. Never chosen by itself.

The guardian stays outside (root where we are root, no agent's byte reaches it) and is the reaper of
all orphans inside, so that ending the sandbox is: kill everything of the uid, reap until nothing is
left.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import NoReturn

from prorl.linux import calls, guard
from prorl.linux.forked import EXIT_CRASHED, ForkedChild
from prorl.sandbox.kind import SandboxKind
from prorl.sandbox.kinds.common import (
    exit_like,
    is_hidden,
    join_cgroups,
    limits_of,
    open_cgroups,
    show_interpreter,
)
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    BASE_PATH,
    Launch,
    Serve,
    interpreter,
    search_path,
    server_config,
)
from prorl.tools.server.children import restrict


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    """Become the guardian of one sandbox: it reaps all orphans inside, and ends them at the end."""
    groups = open_cgroups(launch)
    guard.become(os.getppid())
    if launch.uid >= 0 and is_hidden(launch.layer):
        calls.unshare(calls.CLONE_NEWNS)
        calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
        layer = [(launch.layer, calls.clone_tree(launch.layer))] if launch.layer else []
        show_interpreter(layer)
    pid = os.fork()
    if pid == 0:
        _inside(launch, groups, listener_fd, status_fd, serve)
    for fd in (listener_fd, status_fd, *groups):
        os.close(fd)
    _guard(pid, launch.uid)


def _inside(
    launch: Launch, groups: list[int], listener_fd: int, status_fd: int, serve: Serve
) -> NoReturn:
    with ForkedChild(status_fd):
        join_cgroups(groups)
        guardian = os.getppid()
        os.setsid()
        calls.drop_to(launch.uid)
        calls.prctl(calls.PR_SET_NO_NEW_PRIVS, 1)
        restrict(limits_of(launch, shares_uid=launch.uid < 0), seccomp.bytecode())
        calls.die_with_parent(signal.SIGKILL, guardian)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, guard.WATCHED)
        folder = os.path.dirname(interpreter())
        serve(
            listener_fd,
            status_fd,
            server_config(
                launch,
                launch.folder,
                search_path(launch, f"{folder}:{BASE_PATH}", launch.layer),
                launch.uid,
                launch.uid >= 0,
                launch.layer,
            )
            | {"port": 0},  # the host's own loopback: any port, and other users reach it
        )
    os._exit(EXIT_CRASHED)


def _guard(pid: int, uid: int) -> NoReturn:
    status = guard.watch(pid)
    guard.end_all(partial(_kill_uid, uid) if uid >= 0 else guard.kill_descendants)
    if status is None:
        os._exit(128 + signal.SIGKILL)
    exit_like(status)


def _kill_uid(uid: int) -> None:
    """SIGKILL to every process of this uid at once, so that a fork bomb cannot outrun it."""
    pid = os.fork()
    if pid == 0:
        try:
            os.setresuid(uid, uid, uid)
            os.kill(-1, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os._exit(0)
    os.waitpid(pid, 0)


KIND = SandboxKind(
    launch=launch,
    fix=(
        "run as root (a uid of its own per sandbox), or make the Python interpreter readable by"
        " other users"
    ),
    folder=True,
    zipapp=False,
    images=False,
    sized=False,
    caps_ptys=False,
    shares_host=True,
    server_can_be_killed=True,
    enforces=(
        "processes, size of a file, open files, memory of one process",
        "everything inside ends with it",
    ),
    cannot=(
        "network (the port of a program's model included)",
        "readable files of the host",
        "/tmp",
        "CPU share",
        "bugs of the kernel",
    ),
    bare="/bin/true",
)
