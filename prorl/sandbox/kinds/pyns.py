"""pyns: a rootless namespace sandbox in pure Python, no package needed.

The order of the steps is the whole secret.

    zygote    clone(2) into user, mount, pid, net, ipc and uts namespaces; maps one uid
    `- pid 1  that uid, a root of its own on tmpfs, /usr read-only, own /dev /proc /tmp /workspace,
              pivot_root, second user namespace (uid 1000, no capability over the mounts), limits,
              tool server

pid 1 is the tool server, so nothing inside can kill it, and its end takes every process, mount and
file of the sandbox along. It dies with the zygote, the zygote with sandboxd. The zygote reaps it,
so a kill never hits another process that has its pid.

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
from functools import partial
from typing import NoReturn

from prorl.linux import calls
from prorl.linux.forked import EXIT_CRASHED, ForkedChild
from prorl.sandbox.kind import CONFINED_BY_NAMESPACES, SandboxKind
from prorl.sandbox.kinds.common import OPENER_DECIDES, join_cgroups, limits_of, open_cgroups
from prorl.sandbox.kinds.engine import STATUS, hand_over, server
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
    Become,
    Child,
    Launch,
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
"""The capabilities of `fakeroot`: CHOWN, DAC_OVERRIDE, FOWNER, FSETID, SETGID, SETUID."""


def start(launch: Launch, become: Become) -> int:
    """Make pid 1 of one sandbox, which is the tool server.

    Only the zygote may open what the sandbox's uid may not, and say which uid it is.
    """
    as_root = launch.uid >= 0
    uid, gid = (launch.uid, launch.uid) if as_root else (os.getuid(), os.getgid())
    if uid == 0:
        raise PermissionError("refusing to run a sandbox as uid 0")
    groups = open_cgroups(launch)
    sources, image = (open_sources(launch), open_image(launch)) if as_root else ([], [])
    go_read, go_write = os.pipe2(os.O_CLOEXEC)
    pid = calls.fork_into(NAMESPACES)
    if pid == 0:
        become(partial(_run_as_init, launch, groups, sources, image, (go_read, go_write)))
    try:
        if not OPENER_DECIDES:
            join_cgroups(groups, pid)
        calls.go_first(pid)
        calls.map_ids(0, uid, gid, pid)
        os.write(go_write, b"x")
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise
    return pid


def _run_as_init(
    launch: Launch,
    groups: list[int],
    sources: list[Source],
    image: list[int],
    go: tuple[int, int],
    child: Child,
) -> NoReturn:
    go_read, go_write = go
    os.close(go_write)
    calls.die_with_parent(signal.SIGKILL)
    if not os.read(go_read, 1):  # the zygote has ended, or could not say who we are
        os._exit(1)
    os.close(go_read)
    os.setresgid(0, 0, 0)  # as its user namespace has them: the sandbox's uid
    os.setresuid(0, 0, 0)
    calls.prctl(calls.PR_SET_DUMPABLE, 1)  # else its files in /proc are not its own
    calls.die_with_parent(signal.SIGKILL)
    if launch.uid < 0:
        sources, image = open_sources(launch), open_image(launch)
    if OPENER_DECIDES:
        join_cgroups(groups)
    calls.unshare(calls.CLONE_NEWCGROUP)  # after it has joined: it sees itself as the top
    socket.sethostname("sandbox")
    calls.loopback_up()
    build_root(launch, sources, image)
    _lock(launch.spec.fakeroot)
    restrict(limits_of(launch), seccomp.bytecode())
    # The last change of credentials has cleared it; and a zygote that ended before this line is
    # noticed by the pipe.
    calls.die_with_parent(signal.SIGKILL)
    if select.select([child.alive_fd], [], [], 0)[0]:
        os._exit(1)
    os.close(child.alive_fd)
    if launch.image:
        _run_in_image(launch, child.listener_fd, child.status_fd)
    refuse_uid = SANDBOX_UID if launch.uid >= 0 else -1
    path = search_path(launch, f"{BIN}:{BASE_PATH}")
    config = server_config(launch, WORKSPACE, path, refuse_uid, alone=True)
    child.serve(child.listener_fd, child.status_fd, config)
    os._exit(EXIT_CRASHED)


def _run_in_image(launch: Launch, listener_fd: int, status_fd: int) -> NoReturn:
    launch = hand_over(launch, listener_fd, status_fd)
    with ForkedChild(STATUS):
        command, config = server(launch, launch.image)
        config |= {"limits": {}, "seccomp": ""}  # they are in force
        shell = _program(SHELL[0])
        os.execve(shell, [*SHELL, *command, json.dumps(config)], {"PATH": SYSTEM_PATH})
    os._exit(EXIT_CRASHED)


def _program(name: str) -> str:
    paths = (f"{folder}/{name}" for folder in SYSTEM_PATH.split(":"))
    return next(filter(os.path.exists, paths), f"/bin/{name}")


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
    calls.map_ids(0 if fakeroot else SANDBOX_UID, 0, 0)
    calls.drop_capabilities(ROOT_CAPABILITIES if fakeroot else 0)


def _prepare() -> None:
    steps(False), steps(True), third_party(), python_script()


KIND = SandboxKind(
    start=start,
    fix=(
        "allow unprivileged user namespaces: sysctl user.max_user_namespaces (and"
        " kernel.apparmor_restrict_unprivileged_userns=0); a container, whose /proc is masked, has"
        " to run with --privileged"
    ),
    install=make_image_support,
    prepare=_prepare,
    folder=False,
    zipapp=True,
    images=True,
    overlays=True,
    proxied=True,
    server_can_be_killed=False,
    enforces=(*CONFINED_BY_NAMESPACES, "number of terminals"),
    cannot=("CPU share", "bugs of the kernel"),
    bare=(
        "unshare --user --map-root-user --mount --pid --fork --net --ipc --uts --mount-proc"
        " /bin/true"
    ),
)
