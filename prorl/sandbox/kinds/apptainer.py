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
import shutil
import subprocess
from typing import NoReturn

from prorl.sandbox.images.tree import has_mount_points
from prorl.sandbox.kind import HELD_BY_NAMESPACES, Kind
from prorl.sandbox.kinds import image_view, wrapped
from prorl.sandbox.kinds.common import limits_of
from prorl.sandbox.kinds.image_view import SUPPORT
from prorl.sandbox.kinds.rootfs import SHM_BYTES
from prorl.sandbox.kinds.wrapped import Mount
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    LAYER,
    SANDBOX_UID,
    WORKSPACE,
    Launch,
    Serve,
    interpreter,
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
IMAGE_SUPPORT = "image"
"""Beside the skeleton: what an image gets at /opt/prorl."""
SKELETON = (
    "usr",
    "etc",
    "tmp",
    "var/tmp",
    "proc",
    "sys",
    "dev",
    "root",
    "home",
    "opt/prorl",
    "workspace",
    "run",
)
"""Folders of what stands for an image; its /etc has the files of `ETC`."""
ETC = {
    "passwd": f"user:x:{SANDBOX_UID}:{SANDBOX_UID}::{WORKSPACE}:/bin/bash\n",
    "group": f"user:x:{SANDBOX_UID}:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "localtime": "",
    "hostname": "",
}
CONFIG, FLAT_CONFIG = "apptainer.conf", "flat.conf"
LEAN = {"binary path": "/nowhere", "config resolv_conf": "no"}
FLAT = {**LEAN, "enable overlay": "no", "enable underlay": "no"}


def program() -> str:
    """Apptainer's or Singularity's executable, or an empty string."""
    return shutil.which("apptainer") or shutil.which("singularity") or ""


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


def make_support(folder: str) -> None:
    """Make what every sandbox of this kind gets read-only at /opt/prorl.

    There is one for images, and one beside a skeleton, which takes the place of an image.
    """
    for name in ("bin", os.path.basename(LAYER)):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    for name in ("python", "python3"):
        if not os.path.lexists(f"{folder}/bin/{name}"):
            os.symlink(interpreter(), f"{folder}/bin/{name}")
    if not os.path.isdir(f"{folder}/{IMAGE_SUPPORT}"):
        _make_image_support(f"{folder}/{IMAGE_SUPPORT}", f"{folder}/server.pyz")
    if not os.path.exists(f"{folder}/{CONFIG}") and program():
        write_configs(folder)
    if not os.path.isdir(f"{folder}/skeleton"):
        _make_skeleton(f"{folder}/skeleton")


def write_configs(folder: str) -> None:
    """Write the site's configuration for images that are folders, without FUSE programs.

    They would be tried three times in each start. An Apptainer that runs setuid, or a Singularity,
    keeps its own.
    """
    said = subprocess.run(
        [program(), "buildcfg"], capture_output=True, text=True, check=False
    ).stdout
    built = dict(line.split("=", 1) for line in said.splitlines() if "=" in line)
    site = built.get("APPTAINER_CONF_FILE", "")
    if built.get("APPTAINER_SUID_INSTALL") != "0" or not os.access(site, os.R_OK):
        return
    with open(site) as file:
        lines = file.readlines()
    for name, settings in ((CONFIG, LEAN), (FLAT_CONFIG, FLAT)):
        kept = [line for line in lines if not line.startswith(tuple(settings))]
        with open(f"{folder}/{name}", "w") as file:
            file.writelines(
                [*kept, "\n", *(f"{key} = {value}\n" for key, value in settings.items())]
            )


def _make_image_support(folder: str, server: str) -> None:
    os.makedirs(f"{folder}/bin")
    for _, shown in image_view.parts():
        os.mkdir(folder + shown.removeprefix(SUPPORT))
    for name in ("python", "python3"):
        with open(
            f"{folder}/bin/{name}", "w", opener=lambda path, flags: os.open(path, flags, 0o755)
        ) as file:
            file.write(image_view.python_script())
    if os.path.exists(server):
        os.link(server, f"{folder}/server.pyz")


def _make_skeleton(skeleton: str) -> None:
    for name in SKELETON:
        os.makedirs(f"{skeleton}/{name}")
    for root in interpreter_roots():
        os.makedirs(skeleton + root, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        os.symlink(f"usr/{name}", f"{skeleton}/{name}")
    if os.path.isdir("/etc/alternatives"):
        shutil.copytree("/etc/alternatives", f"{skeleton}/etc/alternatives", symlinks=True)
    if os.path.exists("/etc/ld.so.cache"):
        shutil.copy("/etc/ld.so.cache", f"{skeleton}/etc/ld.so.cache")
    for name, text in ETC.items():
        with open(f"{skeleton}/etc/{name}", "w") as file:
            file.write(text)


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
