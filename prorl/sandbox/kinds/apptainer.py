"""apptainer: Apptainer or Singularity, rootless, with every isolating flag.

    guard (launcher)  new mount and pid namespace -> fork
    `- pid 1          ordinary uid -> fork -> exec of Apptainer; ends when it does

Killing pid 1 kills its FUSE helpers and every daemon inside, and the guard's `waitpid` returns
after the last of them. As root the namespaces need no user namespace; otherwise one with our own
uid mapped to itself, which needs nesting. Apptainer enters a user namespace, and so loses the death
signal that ties it to its parent (the kernel clears it with every change of credentials): so pid 1
is a process of ours that keeps it.

Default runs of Apptainer integrate (they share /tmp, the home, the network and the environment);
here each of these is cut. The tool server is the container's only child and pid 1 (`--no-init`).
One foreground `exec` per sandbox and no instance: an instance is a daemon that outlives whoever
started it, costs 0.3 s to start and 1.7 s to stop, and has a name that others can take.

Images: a folder (fastest: kernel overlay), a .sif (FUSE, ends with the pid namespace), or none: a
skeleton with the host's /usr. Workspace, /tmp, /dev/shm and an overlay over the image are tmpfs of
our own, sized; Apptainer only binds them.

Without an image a virtual environment below /tmp is not shown (no IPython inside then). With
`fakeroot`, /dev is bounded by the memory control group only, and the root inside has an ordinary
container engine's capabilities over files, none over the machine.
"""

from __future__ import annotations

import json
import os
import pwd
import select
import signal
from typing import NamedTuple, NoReturn

from prorl.linux import calls
from prorl.linux.forked import EXIT_CRASHED, Forked
from prorl.sandbox.images.tree import has_mount_points
from prorl.sandbox.kind import HELD_BY_NAMESPACES, Kind
from prorl.sandbox.kinds.apptainer_support import (
    CONFIG,
    FLAT_CONFIG,
    IMAGE_SUPPORT,
    SUPPORT,
    clone,
    inside,
    loader,
    make_support,
    parts,
    program,
    python_script,
)
from prorl.sandbox.kinds.common import (
    exit_like,
    guard,
    join_cgroups,
    limits_of,
    open_cgroups,
    show_interpreter,
    show_stack,
)
from prorl.sandbox.kinds.rootfs import SHM_BYTES
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    BASE_PATH,
    BIN,
    LAYER,
    WORKSPACE,
    Launch,
    Serve,
    interpreter_roots,
    search_path,
    server_command,
    server_config,
)

PLAIN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
"""Of Apptainer; nothing of the host's is added."""
FLAGS = (
    "--containall",
    "--cleanenv",
    "--no-home",
    "--no-eval",
    "--no-init",
    "--net",
    "--network",
    "none",
    "--no-mount",
    "sys",
)
FAKEROOT = (
    "--fakeroot",
    "--no-privs",
    "--add-caps",
    "CAP_CHOWN,CAP_DAC_OVERRIDE,CAP_FOWNER,CAP_FSETID,CAP_SETGID,CAP_SETUID",
)
NO_WRAPPER = "--ignore-fakeroot-command"
"""Apptainer would put the program `fakeroot` around the tool server, which then were not pid 1 and
could be killed.
"""
FOLDERS = ("workspace", "scratch", "shm", "overlay", "state", "stack")


class Mount(NamedTuple):
    """To be mounted in the sandbox's own mount namespace: a tmpfs, or a file over another."""

    target: str
    source: str = "tmpfs"
    options: str = ""


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    """Become the guard of one sandbox: the parent of its pid 1, which it outlives by a wait."""
    root = launch.uid >= 0
    mounts = _mounts(launch)
    groups = open_cgroups(launch)
    parent = os.getppid()
    uid, gid = os.getuid(), os.getgid()
    clones = clone(launch) if root and launch.image else []
    shown = [(launch.image, clones[0])] if clones and not launch.under else []
    shown += [(launch.layer, calls.clone_tree(launch.layer))] if root and launch.layer else []
    calls.unshare(calls.CLONE_NEWNS | calls.CLONE_NEWPID | (0 if root else calls.CLONE_NEWUSER))
    if not root:
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)
    calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
    if root:
        show_interpreter(shown)
    for mount in mounts:
        if mount.options:
            flags = calls.MS_NOSUID | calls.MS_NODEV
            calls.mount("tmpfs", mount.target, "tmpfs", flags, mount.options)
        else:
            calls.mount(mount.source, mount.target, None, calls.MS_BIND)
    if launch.under:
        show_stack(launch, clones, f"{launch.folder}/stack")
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
    _pid_one(launch, listener_fd, status_fd)


def _pid_one(launch: Launch, listener_fd: int, status_fd: int) -> NoReturn:
    """Run Apptainer with both descriptors open, reap all orphans, and end with it.

    The tool server sets its own limits: Apptainer's threads and address space do not fit in an
    agent's.
    """
    argv = _command(launch, listener_fd, status_fd)
    main = os.fork()
    if main:
        os.close(listener_fd)
        os.close(status_fd)
        while True:
            pid, status = os.wait()
            if pid == main:
                exit_like(status)
    with Forked(status_fd):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
        os.setsid()
        for fd in (listener_fd, status_fd, launch.user_tools_fd):
            if fd >= 0:
                os.set_inheritable(fd, True)
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 0)
        os.dup2(null, 1)
        os.dup2(status_fd, 2)  # its complaints become the error of the start
        os.chdir("/")
        state = f"{launch.folder}/state"
        folders = {"APPTAINER_CONFIGDIR": state, "APPTAINER_CACHEDIR": state}
        os.execve(argv[0], argv, {**PLAIN_ENV, "HOME": launch.folder, **folders})
    os._exit(EXIT_CRASHED)


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
        sized("workspace", launch.workspace_bytes),
        sized("scratch", launch.tmp_bytes, "64k"),
        sized("shm", SHM_BYTES, "4k", "1777"),
    ]
    if launch.overlay_bytes:
        mounts.append(sized("overlay", launch.overlay_bytes))
    # one uid only: a range of them would need newuidmap, which does nothing in a nested namespace
    if launch.fakeroot:
        known = (path for path in ("/etc/subuid", "/etc/subgid") if os.path.exists(path))
        mounts += [Mount(path, os.devnull) for path in known]
    # Apptainer wants its user to have an account; a uid from our block has one in here only
    try:
        pwd.getpwuid(uid)
    except KeyError:
        path = f"{home}.passwd"
        with open("/etc/passwd") as accounts, open(path, "w") as file:
            file.write(f"{accounts.read().rstrip()}\nprorl{uid}:x:{uid}:{uid}::{home}:/bin/sh\n")
        mounts.append(Mount("/etc/passwd", path))
    return mounts


def _command(launch: Launch, listener_fd: int, status_fd: int) -> list[str]:
    home, support = launch.folder, os.path.dirname(launch.server)
    argv = [program(), "-s", *_config(launch, support), "exec", *FLAGS]
    argv += ["--hostname", "sandbox", "--cwd", WORKSPACE, "--workdir", f"{home}/scratch"]
    argv += [*FAKEROOT, NO_WRAPPER] if launch.fakeroot else []
    argv += ["--overlay", f"{home}/overlay"] if launch.overlay_bytes else []
    for bind in _binds(launch, support):
        argv += ["--bind", bind]
    own = f"{BASE_PATH}:{BIN}" if launch.image else f"{BIN}:{BASE_PATH}"
    config = server_config(launch, WORKSPACE, search_path(launch, own), refuse_uid=-1, alone=True)
    server = server_command(f"{SUPPORT}/server.pyz")
    if launch.image:  # it starts by the host's own loader
        server = [*loader(), inside(server[0]), *server[1:]]
        config["python"] = f"{BIN}/python3"
        config["packages"] = [inside(path) for path in config["packages"]]
    config |= {
        "listener": listener_fd,
        "status": status_fd,
        "limits": limits_of(launch),
        "seccomp": seccomp.bytecode().hex(),
        "with_image": bool(launch.image),
    }
    return [*argv, _image(launch) or f"{support}/skeleton", *server, json.dumps(config)]


def _binds(launch: Launch, support: str) -> list[str]:
    """What is shown inside beside the image, or beside the skeleton."""
    binds = [f"{launch.folder}/workspace:{WORKSPACE}", f"{launch.folder}/shm:/dev/shm"]
    if launch.image:
        ours = (f"{host}:{shown}:ro" for host, shown in parts())
        return [*binds, f"{support}/{IMAGE_SUPPORT}:{SUPPORT}:ro", *ours]
    binds += [f"{support}:{SUPPORT}:ro", "/usr:/usr:ro"]
    binds += [f"{launch.layer}:{LAYER}:ro"] if launch.layer else []
    # its own /tmp takes no binds
    roots = (root for root in interpreter_roots() if not root.startswith("/tmp/"))
    return [*binds, *(f"{root}:{root}:ro" for root in roots)]


def _image(launch: Launch) -> str:
    return f"{launch.folder}/stack/image" if launch.under else launch.image


def _config(launch: Launch, support: str) -> list[str]:
    """The configuration for a sandbox's image, if there is one of ours.

    A folder that has all mount points needs no layer for them; a .sif needs the FUSE programs that
    ours does not look for.
    """
    image = _image(launch)
    if image and not os.path.isdir(image):
        return []
    flat = (
        not launch.overlay_bytes and not launch.fakeroot and (not image or has_mount_points(image))
    )
    path = f"{support}/{FLAT_CONFIG if flat else CONFIG}"
    return ["--config", path] if os.path.exists(path) else []


KIND = Kind(
    launch=launch,
    missing=lambda: "" if program() else "neither apptainer nor singularity is installed",
    fix=(
        "install Apptainer (configs/install-apptainer.sh on Debian 12) and allow unprivileged user"
        " namespaces"
    ),
    install=make_support,
    prepare=python_script,
    folder=True,
    zipapp=True,
    images=True,
    sif=True,
    overlays=True,
    caps_ptys=False,
    server_can_be_killed=False,
    enforces=HELD_BY_NAMESPACES,
    cannot=("CPU share", "bugs of the kernel"),
    bare=(
        "apptainer -s exec --userns --containall --cleanenv --no-home --net --network none --bind"
        " /usr:/usr:ro {folder}/skeleton /bin/true"
    ),
)
