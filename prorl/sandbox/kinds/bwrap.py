"""bwrap: bubblewrap with every isolating flag, inside a pid namespace of our own (`wrapped.py`).

Contains what pyns contains, by a program that many eyes have read. The tool server runs as a zipapp
and is pid 1 inside. bwrap is started with a minimal environment: `--clearenv` does not clean its
own /proc entry.
"""

from __future__ import annotations

import glob
import os
import shutil
from typing import NoReturn

from prorl.sandbox.kind import HELD_BY_NAMESPACES, Kind
from prorl.sandbox.kinds import image_view, wrapped
from prorl.sandbox.kinds.rootfs import (
    ETC_FILES,
    ETC_FOLDERS,
    ETC_TEXTS,
    LINKS,
    SHM_BYTES,
)
from prorl.sandbox.kinds.wrapped import Mount
from prorl.sandbox.launch import seccomp
from prorl.sandbox.launch.spec import (
    BIN,
    LAYER,
    SANDBOX_UID,
    WORKSPACE,
    Launch,
    Serve,
    interpreter,
    interpreter_roots,
    server_command,
)

SERVER = "/opt/prorl/server.pyz"
NAMESPACES = ["user", "pid", "ipc", "uts", "net"]
FLAGS = (
    *("--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID)),
    *("--hostname", "sandbox"),
    *("--die-with-parent", "--as-pid-1"),
    *("--cap-drop", "ALL", "--disable-userns"),
)


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    """Become the guard of one sandbox: the parent of its pid 1, which it outlives by a wait."""
    program = os.open(launch.server, os.O_RDONLY)
    pid = wrapped.enter(launch, _mounts(launch))
    foreign = (
        wrapped.ForeignCommand([], {}) if pid else _command(launch, listener_fd, status_fd, program)
    )
    wrapped.run(launch, listener_fd, status_fd, pid, foreign)


def _mounts(launch: Launch) -> list[Mount]:
    """What can be written, each bounded in bytes and files, which bwrap's own tmpfs is not.

    Each sandbox mounts over the same folders.
    """
    uid = launch.uid if launch.uid >= 0 else os.getuid()
    for name in ("workspace", "tmp", "vartmp", "shm", "pts"):
        os.makedirs(_place(launch, name), exist_ok=True)
    return [
        Mount.sized(_place(launch, "workspace"), launch.workspace_bytes, uid),
        Mount.sized(_place(launch, "tmp"), launch.tmp_bytes, uid, "1777", "64k"),
        *(
            [Mount.sized(_place(launch, "vartmp"), launch.tmp_bytes, uid, "1777", "64k")]
            if launch.image
            else []
        ),
        Mount.sized(_place(launch, "shm"), SHM_BYTES, uid, "1777", "4k"),
        Mount.ptys(_place(launch, "pts")),
    ]


def _place(launch: Launch, name: str) -> str:
    return f"{os.path.dirname(launch.server)}/{name}"


def _command(
    launch: Launch, listener_fd: int, status_fd: int, program: int
) -> wrapped.ForeignCommand:
    os.set_inheritable(program, True)
    argv = [shutil.which("bwrap") or "bwrap", *(f"--unshare-{name}" for name in NAMESPACES)]
    argv += ["--unshare-cgroup-try", *FLAGS, "--clearenv", *_seccomp()]
    argv += _image(launch.image) if launch.image else _system()
    argv += _own(launch)
    argv += _interpreter_beside() if launch.image else _interpreter()
    argv += ["--ro-bind", launch.layer, LAYER] if launch.layer else []
    argv += ["--perms", "0644", "--file", str(program), SERVER]
    argv += ["--remount-ro", "/", "--chdir", WORKSPACE, "--", *_server(launch.image)]
    extra = {"with_image": bool(launch.image)}
    argv += [wrapped.server_argument(launch, listener_fd, status_fd, extra)]
    return wrapped.ForeignCommand(argv, wrapped.PLAIN_ENV)


def _own(launch: Launch) -> list[str]:
    """The sandbox's own /proc and /dev, and what can be written."""
    # what belongs to its namespaces, such as pid_max, would be its own to change
    argv = ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys"]
    argv += ["--dev", "/dev", "--dev-bind", _place(launch, "pts"), "/dev/pts"]
    argv += ["--bind", _place(launch, "shm"), "/dev/shm", "--remount-ro", "/dev"]
    argv += ["--bind", _place(launch, "tmp"), "/tmp"]
    if launch.image and os.path.isdir(f"{launch.image}/var/tmp"):
        argv += ["--bind", _place(launch, "vartmp"), "/var/tmp"]
    return [*argv, "--bind", _place(launch, "workspace"), WORKSPACE]


def _server(image: str) -> list[str]:
    """What starts the tool server inside: in an image by the host's own loader."""
    server = server_command(SERVER)
    if not image:
        return server
    server = [*image_view.loader(), image_view.inside(server[0]), *server[1:]]
    asks = _asks(image)
    return ["/bin/bash", "-c", asks, "prorl", *server] if asks else server


def _seccomp() -> list[str]:
    code = seccomp.bytecode()
    return ["--seccomp", str(_data(code))] if code else []


def _system() -> list[str]:
    """The host's /usr, read-only; then a small /etc."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in LINKS:
        argv += _shown(f"/{name}", f"/{name}")
    for name in (*ETC_FOLDERS, *ETC_FILES):
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name, text in ETC_TEXTS.items():
        argv += _file(text, f"/etc/{name}")
    argv += ["--dir", "/var", "--symlink", "../tmp", "/var/tmp"]
    return [*argv, "--dir", "/run", "--dir", "/home"]


def _image(image: str) -> list[str]:
    """What the image (a folder) holds, piece by piece, so that ours find a place beside it.

    bwrap makes no folder in a read-only one.
    """
    argv: list[str] = []
    for name in sorted(os.listdir(image)):
        if name == "opt" and not os.path.islink(f"{image}/opt"):
            for inner in sorted(
                set(os.listdir(f"{image}/opt")) - {os.path.basename(image_view.SUPPORT)}
            ):
                argv += _shown(f"{image}/opt/{inner}", f"/opt/{inner}")
        elif f"/{name}" not in (WORKSPACE, "/tmp", "/proc", "/dev", "/sys"):
            argv += _shown(f"{image}/{name}", f"/{name}")
    return argv


def _asks(image: str) -> str:
    """What sets the image's %environment before the tool server starts, as Apptainer does.

    Empty for an image that has none.
    """
    if not any(glob.iglob(f"{glob.escape(image)}/.singularity.d/env/9*-environment.sh")):
        return ""
    files = "/.singularity.d/env/9*-environment.sh"
    return f'for each in {files}; do [ -r "$each" ] && . "$each"; done; exec "$@"'


def _shown(source: str, target: str) -> list[str]:
    """A folder or file read-only, a link as it is, nothing else."""
    if os.path.islink(source):
        return ["--symlink", os.readlink(source), target]
    return ["--ro-bind", source, target] if os.path.exists(source) else []


def _interpreter_beside() -> list[str]:
    """Our Python below /opt/prorl with the host's own libraries, whatever the image has."""
    argv: list[str] = []
    for host, shown in image_view.parts():
        argv += ["--ro-bind", host, shown]
    for name in ("python", "python3"):
        argv += _file(image_view.python_script(), f"{BIN}/{name}", "0755")
    return argv


def _interpreter() -> list[str]:
    """Our Python at its own path.

    It comes after what could cover it: a virtual environment may lie below /tmp.
    """
    argv: list[str] = []
    for root in interpreter_roots():
        argv += ["--ro-bind", root, root]
    for name in ("python", "python3"):
        argv += ["--symlink", interpreter(), f"{BIN}/{name}"]
    return argv


def _file(text: str, path: str, mode: str = "0644") -> list[str]:
    """A file in the root's own tmpfs, which is read-only at the end.

    That is two mounts less than binding one.
    """
    return ["--perms", mode, "--file", str(_data(text.encode())), path]


def _data(content: bytes) -> int:
    """An inheritable descriptor from which bwrap reads a small file."""
    fd = os.memfd_create("prorl", 0)
    os.set_inheritable(fd, True)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


KIND = Kind(
    launch=launch,
    missing=lambda: "" if shutil.which("bwrap") else "bwrap is not installed",
    fix="install bubblewrap (apt-get install bubblewrap) and allow unprivileged user namespaces",
    prepare=image_view.prepare,
    folder=False,
    zipapp=True,
    images=True,
    server_can_be_killed=False,
    enforces=(*HELD_BY_NAMESPACES, "number of terminals"),
    cannot=("CPU share", "bugs of the kernel"),
    bare="bwrap --unshare-all --die-with-parent --ro-bind / / --proc /proc --dev /dev /bin/true",
)
