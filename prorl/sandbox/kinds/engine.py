"""The launcher of kinds whose container is made by an engine: a program, rootless, in our walls.

    guard (launcher)  new mount and pid namespace -> fork
    `- pid 1          ordinary uid -> fork -> exec of the engine; ends when it does

Killing pid 1 kills the engine, its helpers and every daemon inside, and the guard's `waitpid`
returns after the last of them. As root the namespaces need no user namespace; otherwise one with
our own uid mapped to itself, which needs nesting. An engine enters a user namespace, and so loses
the death signal that ties it to its parent (the kernel clears it with every change of credentials):
so pid 1 is a process of ours that keeps it.

Workspace, /tmp, /dev/shm and what is written over an image are tmpfs of our own, sized; the engine
only binds them. It gets the tool server's descriptors as `LISTENER`, `STATUS` and `USER_TOOLS`.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import select
import signal
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

from prorl.linux import calls
from prorl.linux.forked import EXIT_CRASHED, ForkedChild
from prorl.sandbox.kinds.common import (
    exit_like,
    guard,
    join_cgroups,
    limits_of,
    open_cgroups,
    show_interpreter,
    show_stack,
)
from prorl.sandbox.kinds.engine_support import (
    IMAGE_SUPPORT,
    SUPPORT,
    clone,
    inside,
    loader,
    parts,
)
from prorl.sandbox.kinds.rootfs import SHM_BYTES, keeps_folders
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    BASE_PATH,
    BIN,
    LAYER,
    WORKSPACE,
    Launch,
    interpreter_roots,
    search_path,
    server_command,
    server_config,
)

LISTENER, STATUS, USER_TOOLS = 3, 4, 5
"""Descriptors of what an engine runs."""
FOLDERS = ("workspace", "scratch", "shm", "overlay", "state", "stack")
Start = Callable[[Launch], NoReturn]
"""Becomes the engine of one sandbox, by exec."""


class Mount(NamedTuple):
    """A mount for the sandbox's own mount namespace: a tmpfs, or a file over another."""

    target: str
    source: str = "tmpfs"
    options: str = ""


def contain(launch: Launch, listener_fd: int, status_fd: int, start: Start) -> NoReturn:
    """Become the guard of one sandbox: the parent of its pid 1, which it outlives by a wait."""
    root, stacked = launch.uid >= 0, is_stacked(launch)
    mounts = _mounts(launch)
    groups = open_cgroups(launch)
    parent = os.getppid()
    uid, gid = os.getuid(), os.getgid()
    clones = clone(launch) if root and launch.image else []
    trees = [(launch.image, clones[0])] if clones and not stacked else []
    trees += [(launch.layer, calls.clone_tree(launch.layer))] if root and launch.layer else []
    calls.unshare(calls.CLONE_NEWNS | calls.CLONE_NEWPID | (0 if root else calls.CLONE_NEWUSER))
    if not root:
        calls.map_ids(uid, uid, gid)
    calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
    if root:
        show_interpreter(trees)
    for mount in mounts:
        if mount.options:
            flags = calls.MS_NOSUID | calls.MS_NODEV
            calls.mount("tmpfs", mount.target, "tmpfs", flags, mount.options)
        else:
            calls.mount(mount.source, mount.target, None, calls.MS_BIND)
    if stacked:
        above = _make_overlay(launch) if launch.spec.overlay_bytes else ""
        show_stack(launch, clones, f"{launch.folder}/stack", above)
    calls.die_with_parent(signal.SIGKILL, parent)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    alive_read, alive_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid:
        for fd in (alive_read, *groups, listener_fd, status_fd):
            os.close(fd)
        guard(pid)
    os.close(alive_write)
    join_cgroups(groups)
    calls.mount("proc", "/proc", "proc", calls.MS_NOSUID | calls.MS_NODEV | calls.MS_NOEXEC)
    calls.drop_to(launch.uid)
    calls.die_with_parent(signal.SIGKILL)
    if select.select([alive_read], [], [], 0)[0]:
        os._exit(1)
    os.close(alive_read)
    _run_as_init(launch, listener_fd, status_fd, start)


def is_stacked(launch: Launch) -> bool:
    """Returns whether the image is a stack that we mount. One that is written over is: in a user
    namespace an engine's own overlay can remove no folder of the image (EIO), for want of
    `userxattr`.
    """
    return bool(launch.under or launch.spec.overlay_bytes)


def _make_overlay(launch: Launch) -> str:
    """The folder of the sandbox that takes what is written."""
    above, uid = f"{launch.folder}/overlay", launch.uid if launch.uid >= 0 else os.getuid()
    for name in ("upper", "work"):
        os.mkdir(f"{above}/{name}", 0o755)
        os.chown(f"{above}/{name}", uid, -1)
    return above


def _run_as_init(launch: Launch, listener_fd: int, status_fd: int, start: Start) -> NoReturn:
    """Run the engine with all descriptors open, reap all orphans, and end with it.

    The tool server sets its own limits: an engine's threads and address space do not fit in an
    agent's.
    """
    main = os.fork()
    if main:
        os.close(listener_fd)
        os.close(status_fd)
        while True:
            pid, status = os.wait()
            if pid == main:
                exit_like(status)
    launch = hand_over(launch, listener_fd, status_fd)
    with ForkedChild(STATUS):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        os.setsid()
        start(launch)
    os._exit(EXIT_CRASHED)


def hand_over(launch: Launch, listener_fd: int, status_fd: int) -> Launch:
    """Put the tool server's descriptors where `server` says that they are, for an exec."""
    fds = [fd for fd in (listener_fd, status_fd, launch.user_tools_fd) if fd >= 0]
    fds = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, USER_TOOLS + 1) for fd in fds]
    for number, fd in enumerate(fds, LISTENER):
        os.dup2(fd, number)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    os.dup2(STATUS, 2)  # complaints become the error of the start
    os.chdir("/")
    return launch._replace(user_tools_fd=USER_TOOLS) if len(fds) > 2 else launch


def _mounts(launch: Launch) -> list[Mount]:
    """Make the sandbox's folders; what is to be mounted over them, and over files of the host."""
    home, uid = launch.folder, launch.uid if launch.uid >= 0 else os.getuid()
    for name in FOLDERS:
        os.mkdir(f"{home}/{name}", 0o755)
    if launch.uid >= 0:
        os.chown(f"{home}/state", uid, uid)

    def sized(name: str, num_bytes: int, num_files: str = "256k", mode: str = "755") -> Mount:
        options = f"size={num_bytes},nr_inodes={num_files},uid={uid},gid={uid},mode={mode}"
        return Mount(f"{home}/{name}", options=options)

    mounts = [
        sized("workspace", launch.spec.workspace_bytes),
        sized("scratch", launch.spec.tmp_bytes, "64k", "1777"),
        sized("shm", SHM_BYTES, "4k", "1777"),
    ]
    if launch.spec.overlay_bytes:
        mounts.append(sized("overlay", launch.spec.overlay_bytes))
    # one uid only: a range of them would need newuidmap, which does nothing in a nested namespace
    if launch.spec.fakeroot:
        id_files = (path for path in ("/etc/subuid", "/etc/subgid") if os.path.exists(path))
        mounts += [Mount(path, os.devnull) for path in id_files]
    # an engine wants its user to have an account; a uid from our block has one in here only
    try:
        pwd.getpwuid(uid)
    except KeyError:
        path = f"{home}.passwd"
        with open("/etc/passwd") as accounts, open(path, "w") as file:
            file.write(f"{accounts.read().rstrip()}\nprorl{uid}:x:{uid}:{uid}::{home}:/bin/sh\n")
        mounts.append(Mount("/etc/passwd", path))
    return mounts


def binds(launch: Launch, image: str) -> list[str]:
    """Returns what is shown inside beside the image, or beside the skeleton where that is empty."""
    support = os.path.dirname(launch.server)
    specs = [f"{launch.folder}/shm:/dev/shm", *(f"{pair}:ro" for pair in launch.files)]
    if not keeps_folders(launch):
        specs.insert(0, f"{launch.folder}/workspace:{WORKSPACE}")
    if image:
        ours = (f"{host}:{target}:ro" for host, target in parts())
        return [*specs, f"{support}/{IMAGE_SUPPORT}:{SUPPORT}:ro", *ours]
    folders = filter(os.path.isdir, ("/usr", "/etc/ssl"))
    specs += [f"{support}:{SUPPORT}:ro", *(f"{folder}:{folder}:ro" for folder in folders)]
    specs += [f"{launch.layer}:{LAYER}:ro"] if launch.layer else []
    # its own /tmp takes no binds
    roots = (root for root in interpreter_roots() if not root.startswith("/tmp/"))
    return [*specs, *(f"{root}:{root}:ro" for root in roots)]


def server(launch: Launch, image: str) -> tuple[list[str], dict[str, Any]]:
    """Returns the command of the tool server inside, and its configuration."""
    own = f"{BASE_PATH}:{BIN}" if image else f"{BIN}:{BASE_PATH}"
    config = server_config(launch, WORKSPACE, search_path(launch, own), refuse_uid=-1, alone=True)
    command = server_command(f"{SUPPORT}/server.pyz")
    if image:  # it starts by the host's own loader
        command = [*loader(), inside(command[0]), *command[1:]]
        config["python"] = f"{BIN}/python3"
        config["packages"] = [inside(path) for path in config["packages"]]
    return command, config | {
        "listener": LISTENER,
        "status": STATUS,
        "limits": limits_of(launch),
        "seccomp": seccomp.bytecode().hex(),
        "with_image": bool(image),
    }
