"""pyns: a rootless namespace sandbox in pure Python, no package needed.

The order of the steps is the whole secret.

    launcher (ordinary uid)  unshare user, mount, pid, net, ipc, uts, cgroup -> fork
    `- pid 1                 a root of its own on tmpfs, /usr read-only, own /dev /proc /tmp
                             /workspace, pivot_root, second user namespace (uid 1000, no
                             capability over the mounts), limits, tool server

pid 1 is the tool server, so nothing inside can kill it, and its end takes every process, mount and
file of the sandbox along. It dies with the launcher, the launcher with the zygote, the zygote with
sandboxd.

With an image the root is its stack under a small tmpfs, mounted by overlayfs, and pid 1 becomes the
image's bash, which becomes the tool server with our own Python (`engine_support.py`).

Contained: files, processes, network, IPC, nested namespaces, sized /tmp, /dev/shm and workspace.
Not contained: kernel bugs, CPU share; memory is bounded per process and tmpfs unless a control
group is usable (`prorl doctor` says).
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
from typing import NoReturn

from prorl.linux import calls
from prorl.linux.forked import EXIT_CRASHED, Forked
from prorl.sandbox.kind import HELD_BY_NAMESPACES, Kind
from prorl.sandbox.kinds.common import OPENER_DECIDES, guard, join_cgroups, limits_of, open_cgroups
from prorl.sandbox.kinds.engine import STATUS, hand_over, map_ids, server
from prorl.sandbox.kinds.engine_support import SHELL, SYSTEM_PATH, make_image_support, python_script
from prorl.sandbox.kinds.rootfs import (
    SAFE,
    Source,
    build_root,
    open_image,
    open_sources,
    steps,
    third_party,
)
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    BASE_PATH,
    BIN,
    SANDBOX_UID,
    WORKSPACE,
    Launch,
    Serve,
    search_path,
    server_config,
)
from prorl.tools.server.children import restrict

NAMESPACES = (
    calls.CLONE_NEWUSER
    | calls.CLONE_NEWNS
    | calls.CLONE_NEWPID
    | calls.CLONE_NEWNET
    | calls.CLONE_NEWIPC
    | calls.CLONE_NEWUTS
)
ROOT_CAPABILITIES = 0xDB
"""Of `fakeroot`: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID."""


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    """Become the launcher of one sandbox: the guard of its pid 1, which is the tool server."""
    groups = open_cgroups(launch)
    if not OPENER_DECIDES:
        join_cgroups(groups)
        groups = []
    # root can open what the ordinary uid cannot reach
    sources, image = ([], []) if launch.uid < 0 else (open_sources(launch), open_image(launch))
    parent = os.getppid()
    calls.drop_to(launch.uid)
    # inside the new namespace both read as nobody until they are mapped
    uid, gid = os.getuid(), os.getgid()
    calls.unshare(NAMESPACES)
    map_ids(0, uid, gid)
    calls.die_with_parent(signal.SIGKILL, parent)
    if launch.uid < 0:
        sources, image = open_sources(launch), open_image(launch)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        os.close(alive_write)
        _pid_one(launch, groups, sources, image, listener_fd, status_fd, serve, alive_read)
    for fd in (alive_read, listener_fd, status_fd, *groups, *(one.fd for one in sources), *image):
        os.close(fd)
    guard(pid)


def _pid_one(
    launch: Launch,
    groups: list[int],
    sources: list[Source],
    image: list[int],
    listener_fd: int,
    status_fd: int,
    serve: Serve,
    alive_read: int,
) -> NoReturn:
    with Forked(status_fd):
        calls.die_with_parent(signal.SIGKILL)
        join_cgroups(groups)
        calls.unshare(
            calls.CLONE_NEWCGROUP
        )  # after it has joined, so that it sees itself as the top
        socket.sethostname("sandbox")
        calls.loopback_up()
        build_root(launch, sources, image)
        _lock(launch.spec.fakeroot)
        restrict(limits_of(launch), seccomp.bytecode())
        # The last change of credentials has cleared it; and a launcher that died before this line
        # is noticed by the pipe.
        calls.die_with_parent(signal.SIGKILL)
        if select.select([alive_read], [], [], 0)[0]:
            os._exit(1)
        os.close(alive_read)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        if launch.image:
            _run_in_image(launch, listener_fd, status_fd)
        refuse_uid = SANDBOX_UID if launch.uid >= 0 else -1
        path = search_path(launch, f"{BIN}:{BASE_PATH}")
        config = server_config(launch, WORKSPACE, path, refuse_uid, alone=True)
        serve(listener_fd, status_fd, config)
    os._exit(EXIT_CRASHED)


def _run_in_image(launch: Launch, listener_fd: int, status_fd: int) -> NoReturn:
    launch = hand_over(launch, listener_fd, status_fd)
    with Forked(STATUS):
        command, config = server(launch, launch.image)
        config |= {"limits": {}, "seccomp": ""}  # they are in force
        shell = _program(SHELL[0])
        os.execve(shell, [*SHELL, *command, json.dumps(config)], {"PATH": SYSTEM_PATH})
    os._exit(EXIT_CRASHED)


def _program(name: str) -> str:
    found = (f"{folder}/{name}" for folder in SYSTEM_PATH.split(":"))
    return next(filter(os.path.exists, found), f"/bin/{name}")


def _lock(fakeroot: bool) -> None:
    """Give up every power over the namespaces.

    What is left is an ordinary user in a second user namespace, and there is no third one; with
    `fakeroot` its root, with power over files and ids only.
    """
    try:
        with open("/proc/sys/user/max_user_namespaces", "w") as file:
            file.write("1")
    except OSError:
        # a kernel without this limit: nested namespaces stay possible, without capabilities over
        # ours
        pass
    # The agent's uid is the one that owns these namespaces, and so their limits (pid_max, shmmax).
    calls.mount("/proc/sys", "/proc/sys", None, calls.MS_BIND)
    read_only = calls.MS_BIND | calls.MS_REMOUNT | calls.MS_RDONLY
    calls.mount(None, "/proc/sys", None, read_only | SAFE | calls.MS_NOEXEC)
    calls.unshare(calls.CLONE_NEWUSER)
    map_ids(0 if fakeroot else SANDBOX_UID, 0, 0)
    calls.drop_capabilities(ROOT_CAPABILITIES if fakeroot else 0)


def _prepare() -> None:
    steps(False), steps(True), third_party(), python_script()


KIND = Kind(
    launch=launch,
    fix=(
        "allow unprivileged user namespaces: sysctl user.max_user_namespaces (and"
        " kernel.apparmor_restrict_unprivileged_userns=0)"
    ),
    install=make_image_support,
    prepare=_prepare,
    folder=False,
    zipapp=True,
    images=True,
    overlays=True,
    server_can_be_killed=False,
    enforces=(*HELD_BY_NAMESPACES, "number of terminals"),
    cannot=("CPU share", "bugs of the kernel"),
    bare=(
        "unshare --user --map-root-user --mount --pid --fork --net --ipc --uts --mount-proc"
        " /bin/true"
    ),
)
