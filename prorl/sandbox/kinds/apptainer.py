"""apptainer: Apptainer or Singularity, rootless, with every isolating flag.

It runs inside a pid namespace of our own (`wrapped.py`).

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

import os
import pwd
from typing import NoReturn

from prorl.sandbox.images.tree import has_mount_points
from prorl.sandbox.kind import HELD_BY_NAMESPACES, Kind
from prorl.sandbox.kinds import image_view, wrapped
from prorl.sandbox.kinds.apptainer_support import (
    CONFIG,
    FLAT_CONFIG,
    IMAGE_SUPPORT,
    make_support,
    program,
)
from prorl.sandbox.kinds.common import limits_of
from prorl.sandbox.kinds.image_view import SUPPORT
from prorl.sandbox.kinds.rootfs import SHM_BYTES
from prorl.sandbox.kinds.wrapped import Mount
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    LAYER,
    WORKSPACE,
    Launch,
    Serve,
    interpreter_roots,
    server_command,
)

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
FOLDERS = ("workspace", "scratch", "shm", "overlay", "state")


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    """Become the guard of one sandbox: the parent of its pid 1, which it outlives by a wait."""
    pid = wrapped.enter(launch, _mounts(launch))
    foreign = wrapped.ForeignCommand([], {}) if pid else _command(launch, listener_fd, status_fd)
    wrapped.run(launch, listener_fd, status_fd, pid, foreign, limits=False, reaper=True)


def _mounts(launch: Launch) -> list[Mount]:
    home, uid = launch.folder, launch.uid if launch.uid >= 0 else os.getuid()
    for name in FOLDERS:
        os.mkdir(f"{home}/{name}", 0o755)
    mounts = [
        Mount.sized(f"{home}/workspace", launch.workspace_bytes, uid),
        Mount.sized(f"{home}/scratch", launch.tmp_bytes, uid, num_files="64k"),
        Mount.sized(f"{home}/shm", SHM_BYTES, uid, "1777", "4k"),
    ]
    if launch.overlay_bytes:
        mounts.append(Mount.sized(f"{home}/overlay", launch.overlay_bytes, uid))
    if launch.uid >= 0:
        os.chown(f"{home}/state", uid, uid)
    # one uid only: a range of them would need newuidmap, which does nothing in a nested namespace
    if launch.fakeroot:
        mounts += [
            Mount(path, os.devnull)
            for path in ("/etc/subuid", "/etc/subgid")
            if os.path.exists(path)
        ]
    return mounts + _passwd(launch, uid)


def _passwd(launch: Launch, uid: int) -> list[Mount]:
    """An account for the sandbox's uid, which Apptainer wants its user to have.

    A uid from our block has one in this mount namespace only.
    """
    try:
        pwd.getpwuid(uid)
    except KeyError:
        path = f"{launch.folder}.passwd"
        with open("/etc/passwd") as known, open(path, "w") as file:
            file.write(
                f"{known.read().rstrip()}\nprorl{uid}:x:{uid}:{uid}::{launch.folder}:/bin/sh\n"
            )
        return [Mount("/etc/passwd", path)]
    return []


def _command(launch: Launch, listener_fd: int, status_fd: int) -> wrapped.ForeignCommand:
    home, support = launch.folder, os.path.dirname(launch.server)
    argv = [program(), "-s", *_config(launch, support), "exec", *FLAGS]
    argv += ["--hostname", "sandbox", "--cwd", WORKSPACE, "--workdir", f"{home}/scratch"]
    argv += [*FAKEROOT, NO_WRAPPER] if launch.fakeroot else []
    argv += ["--overlay", f"{home}/overlay"] if launch.overlay_bytes else []
    for bind in _binds(launch, support):
        argv += ["--bind", bind]
    extra = {
        "limits": limits_of(launch),
        "seccomp": seccomp.bytecode().hex(),
        "with_image": bool(launch.image),
    }
    argv += [launch.image or f"{support}/skeleton", *_server(launch)]
    argv += [wrapped.server_argument(launch, listener_fd, status_fd, extra)]
    state = {"APPTAINER_CONFIGDIR": f"{home}/state", "APPTAINER_CACHEDIR": f"{home}/state"}
    return wrapped.ForeignCommand(argv, {**wrapped.PLAIN_ENV, "HOME": home, **state})


def _binds(launch: Launch, support: str) -> list[str]:
    """What is shown inside beside the image, or beside the skeleton."""
    binds = [f"{launch.folder}/workspace:{WORKSPACE}", f"{launch.folder}/shm:/dev/shm"]
    if launch.image:
        parts = (f"{host}:{shown}:ro" for host, shown in image_view.parts())
        return [*binds, f"{support}/{IMAGE_SUPPORT}:{SUPPORT}:ro", *parts]
    binds += [f"{support}:{SUPPORT}:ro", "/usr:/usr:ro"]
    binds += [f"{launch.layer}:{LAYER}:ro"] if launch.layer else []
    # its own /tmp takes no binds
    roots = (root for root in interpreter_roots() if not root.startswith("/tmp/"))
    return [*binds, *(f"{root}:{root}:ro" for root in roots)]


def _server(launch: Launch) -> list[str]:
    """What starts the tool server inside: in an image by the host's own loader."""
    server = server_command(f"{SUPPORT}/server.pyz")
    if not launch.image:
        return server
    return [*image_view.loader(), image_view.inside(server[0]), *server[1:]]


def _config(launch: Launch, support: str) -> list[str]:
    """The configuration for a sandbox's image, if there is one of ours.

    A folder that has all mount points needs no layer for them; a .sif needs the FUSE programs that
    ours does not look for.
    """
    if launch.image and not os.path.isdir(launch.image):
        return []
    flat = (
        not launch.overlay_bytes
        and not launch.fakeroot
        and (not launch.image or has_mount_points(launch.image))
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
    prepare=image_view.prepare,
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
