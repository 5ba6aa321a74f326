"""podman: Podman with runc or crun, rootless, no daemon; runs images.

    guard - pid 1 - podman - conmon, runc      all in a pid namespace of ours (`engine.py`)
                             `- tool server    pid 1 of the container's own

Podman is given what it would make itself: a user namespace of one uid, where it would ask newuidmap
for ranges and leave a process to hold it; a folder that is a root file system already; state of
its own, so that sandboxes share no lock and no database. The image is a stack over which lies a
small tmpfs for mount points that it lacks, and the container sees it read-only.

The container's one uid is its root, for runc knows no other way; all its power is to map that uid
into a further user namespace, in which the tool server is run by an ordinary one, unless the task
asks for `fakeroot`. Podman's own seccomp filter would
forbid that; ours is installed after.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from typing import NoReturn

from prorl.linux import calls
from prorl.sandbox.kind import HELD_BY_NAMESPACES, Kind
from prorl.sandbox.kinds.engine import binds, contain, map_ids, server
from prorl.sandbox.kinds.engine_support import (
    MOUNT_POINT_BYTES,
    SHELL,
    SUPPORT,
    SYSTEM_PATH,
    make_support,
    python_script,
)
from prorl.sandbox.launch.spec import SANDBOX_UID, WORKSPACE, Launch, Serve

RUNTIMES = ("runc", "crun")
STATE = "/dev/shm"
"""A tmpfs of each sandbox's own: Podman wants a path that is short, and keeps its locks there."""
CONFIG = "containers.conf"
SETTINGS = """
[engine]
cgroup_manager = "cgroupfs"
events_logger = "none"
[containers]
pids_limit = 0
apparmor_profile = ""
"""
"""In the place of the machine's and the user's own."""
FLAGS = (
    *("--rm", "--network", "none", "--ipc", "none", "--hostname", "sandbox", "--no-hosts"),
    *("--cap-drop", "all", "--log-driver", "none"),
    *("--security-opt", "no-new-privileges", "--security-opt", "seccomp=unconfined"),
    *("--security-opt", "label=disable", "--passwd=false", "--user", "0:0"),
    *("--oom-score-adj", "1000", "--unsetenv", "container"),
)
ROOT_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID")
"""Of the root that `fakeroot` asks for: an ordinary engine's over files and ids."""
BECOME = (
    f"import sys; sys.path.insert(0, {SUPPORT + '/server.pyz'!r});"
    f" from prorl.tools.server.children import become; become({SANDBOX_UID}, sys.argv[1:])"
)


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    image = launch.image or f"{os.path.dirname(launch.server)}/skeleton"

    def start(within: Launch) -> NoReturn:
        _start(within, launch.image, bool(launch.spec.overlay_bytes))

    num_bytes = launch.spec.overlay_bytes or MOUNT_POINT_BYTES
    filled = replace(launch, image=image, spec=replace(launch.spec, overlay_bytes=num_bytes))
    contain(filled, listener_fd, status_fd, start, writable=True)


def _start(launch: Launch, image: str, writable: bool) -> NoReturn:
    """Run Podman as root of a user namespace that has no uid but ours."""
    uid, gid = os.getuid(), os.getgid()
    calls.unshare(calls.CLONE_NEWUSER | calls.CLONE_NEWNS)
    map_ids(0, uid, gid)
    calls.mount("tmpfs", STATE, "tmpfs", calls.MS_NOSUID | calls.MS_NODEV, "size=8m,mode=700")
    support = os.path.dirname(launch.server)
    name = runtime()
    argv = [program(), "--log-level", "fatal", "--storage-driver", "vfs", "--runtime", name]
    argv += ["--root", f"{STATE}/root", "--runroot", f"{STATE}/run", "run", *FLAGS]
    argv += [] if writable else ["--read-only", "--read-only-tmpfs=false"]
    for capability in ROOT_CAPABILITIES if launch.spec.fakeroot else ("SETFCAP",):
        argv += ["--cap-add", capability]
    argv += ["--cgroups", "disabled"] if name.endswith("crun") else []
    argv += ["--preserve-fds", "3" if launch.user_tools_fd >= 0 else "2", "--workdir", WORKSPACE]
    scratch = f"{launch.folder}/scratch"
    for bind in (*binds(launch, image), f"{scratch}:/tmp", f"{scratch}:/var/tmp"):
        argv += ["--volume", bind]
    command, config = server(launch, image)
    command = command if launch.spec.fakeroot else [*command[:-1], BECOME, *command]
    command = [*SHELL, *command] if image else command
    environment = {
        "PATH": SYSTEM_PATH,
        "HOME": STATE,
        "XDG_RUNTIME_DIR": STATE,
        "CONTAINERS_CONF": f"{support}/{CONFIG}",
        # the user namespace is there: as `buildah unshare` tells it
        "_CONTAINERS_USERNS_CONFIGURED": "done",
        "_CONTAINERS_ROOTLESS_UID": str(uid),
        "_CONTAINERS_ROOTLESS_GID": str(gid),
    }
    argv += ["--rootfs", f"{launch.folder}/stack/image", *command, json.dumps(config)]
    os.execve(argv[0], argv, environment)


def program() -> str:
    return shutil.which("podman") or ""


def runtime() -> str:
    """What runs Podman's containers here, or an empty string."""
    return next(filter(None, (shutil.which(name, path=SYSTEM_PATH) for name in RUNTIMES)), "")


def _missing() -> str:
    if not program():
        return "podman is not installed"
    return "" if runtime() else f"podman without {' or '.join(RUNTIMES)}"


def _install(folder: str) -> None:
    make_support(folder)
    with open(f"{folder}/{CONFIG}", "w") as file:
        file.write(SETTINGS)


KIND = Kind(
    launch=launch,
    missing=_missing,
    fix="apt-get install podman runc, Linux 5.19 or later, and allow unprivileged user namespaces",
    install=_install,
    prepare=python_script,
    folder=True,
    zipapp=True,
    images=True,
    overlays=True,
    caps_ptys=False,
    server_can_be_killed=False,
    enforces=HELD_BY_NAMESPACES,
    cannot=("CPU share", "bugs of the kernel"),
    bare=(
        "podman --runtime runc --log-level fatal --storage-driver vfs run --rm --network none"
        " --cgroups no-conmon --ulimit nofile=1024:1024 --ulimit nproc=1024:1024"
        " --log-driver none --volume /usr:/usr:ro --rootfs {folder}/skeleton /bin/true"
    ),
)
