"""Running a foreign launcher (bwrap, apptainer) so that its end takes everything along.

A pid namespace of our own is around it.

    guard (launcher)  new mount and pid namespace -> fork
    `- pid 1          ordinary uid -> exec of the foreign launcher, which ends with its container;
                      or, as `reaper`, the parent of it

Killing pid 1 kills its FUSE helpers and every daemon inside, and the guard's `waitpid` returns
after the last of them. As root the namespaces need no user namespace; otherwise one with our own
uid mapped to itself, which needs nesting.

A launcher that enters a user namespace loses the death signal that ties pid 1 to the guard (the
kernel clears it with every change of credentials): bwrap sets it again (`--die-with-parent`),
Apptainer does not, so pid 1 is then a process of ours that keeps it.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Mapping, Sequence
from typing import NamedTuple, NoReturn

from prorl.linux import calls
from prorl.linux.forked import EXIT_CRASHED, Forked
from prorl.sandbox.kinds import image_view
from prorl.sandbox.kinds.common import exit_like, guard, join_cgroups, open_cgroups, set_limits
from prorl.sandbox.kinds.hidden import show_interpreter
from prorl.sandbox.kinds.rootfs import DEVPTS
from prorl.sandbox.launch.spec import (
    BASE_PATH,
    BIN,
    WORKSPACE,
    Launch,
    search_path,
    server_config,
)

PLAIN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
PROGRAM_FD = 9


class ForeignCommand(NamedTuple):
    """The foreign launcher's command line and environment; nothing of the host's is added."""

    argv: list[str]
    env: dict[str, str]


class Mount(NamedTuple):
    """To be mounted in the sandbox's own mount namespace: a file over another, a tmpfs, ptys."""

    target: str
    source: str = "tmpfs"
    kind: str | None = None
    data: str | None = None
    flags: int = calls.MS_NOSUID | calls.MS_NODEV

    @staticmethod
    def ptys(target: str) -> Mount:
        """A devpts of its own, for a bounded number of ptys."""
        return Mount(target, "devpts", "devpts", DEVPTS, calls.MS_NOSUID | calls.MS_NOEXEC)

    @staticmethod
    def sized(
        target: str, num_bytes: int, uid: int, mode: str = "755", num_files: str = "256k"
    ) -> Mount:
        """A tmpfs of at most so many bytes and files that belongs to a uid."""
        return Mount(
            target,
            "tmpfs",
            "tmpfs",
            f"size={num_bytes},nr_inodes={num_files},uid={uid},gid={uid},mode={mode}",
        )


def enter(launch: Launch, mounts: Sequence[Mount] = ()) -> int:
    """Become the guard's half of the namespaces.

    Its mounts are private; our interpreter and the image are made reachable, then `mounts` made.

    Returns the pid of this sandbox's pid 1 in the parent, 0 in pid 1 itself (an ordinary user by
    then).
    """
    groups = open_cgroups(launch)
    parent = os.getppid()
    uid, gid = os.getuid(), os.getgid()
    root = launch.uid >= 0
    shown = [(launch.image, image_view.clone(launch))] if root and launch.image else []
    shown += [(launch.layer, calls.clone_tree(launch.layer))] if root and launch.layer else []
    calls.unshare(calls.CLONE_NEWNS | calls.CLONE_NEWPID | (0 if root else calls.CLONE_NEWUSER))
    if not root:
        _map_to_itself(uid, gid)
    calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
    if root:
        show_interpreter(shown)
    for mount in mounts:
        flags = mount.flags if mount.kind else calls.MS_BIND
        calls.mount(mount.source, mount.target, mount.kind, flags, mount.data)
    calls.die_with_parent(signal.SIGKILL, parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        for fd in (alive_read, *groups):
            os.close(fd)
        return pid
    os.close(alive_write)
    join_cgroups(groups)
    calls.mount("proc", "/proc", "proc", calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC)
    calls.drop_to(launch.uid)
    calls.die_with_parent(signal.SIGKILL)
    if select.select([alive_read], [], [], 0)[0]:
        os._exit(1)
    os.close(alive_read)
    return 0


def run(
    launch: Launch,
    listener_fd: int,
    status_fd: int,
    pid: int,
    foreign: ForeignCommand,
    *,
    limits: bool = True,
    reaper: bool = False,
) -> NoReturn:
    """After `enter`: guard pid 1, or be it and run the foreign launcher with both descriptors open.

    Without `limits` the tool server sets its own: Apptainer's threads and address space do not fit
    in an agent's. With `reaper` pid 1 stays ours and ends with the foreign launcher.
    """
    if pid:
        os.close(listener_fd)
        os.close(status_fd)
        guard(pid)
    main = os.fork() if reaper else 0
    if main:
        os.close(listener_fd)
        os.close(status_fd)
        _reap_until(main)
    with Forked(status_fd):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        os.setsid()
        if limits:
            set_limits(launch)
        for fd in (listener_fd, status_fd, launch.user_tools_fd):
            if fd >= 0:
                os.set_inheritable(fd, True)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(status_fd, 2)  # the foreign launcher's complaints become the error of the start
        os.chdir("/")
        os.execve(foreign.argv[0], foreign.argv, foreign.env)
    os._exit(EXIT_CRASHED)


def server_argument(
    launch: Launch, listener_fd: int, status_fd: int, extra: Mapping[str, object] | None = None
) -> str:
    """The tool server's only argument on the command line: its configuration as JSON."""
    config = server_config(
        launch,
        WORKSPACE,
        search_path(launch, f"{BASE_PATH}:{BIN}" if launch.image else f"{BIN}:{BASE_PATH}"),
        refuse_uid=-1,
        alone=True,
    )
    if launch.image:
        config["python"], config["packages"] = (
            f"{BIN}/python3",
            [image_view.inside(path) for path in config["packages"]],
        )
    return json.dumps({**config, "listener": listener_fd, "status": status_fd, **(extra or {})})


def _reap_until(main: int) -> NoReturn:
    while True:
        pid, status = os.wait()
        if pid == main:
            exit_like(status)


def _map_to_itself(uid: int, gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{uid} {uid} 1"),
        ("gid_map", f"{gid} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
