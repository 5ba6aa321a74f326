"""apptainer: Apptainer or Singularity, rootless, with every isolating flag.

Default runs of Apptainer integrate (they share /tmp, the home, the network and the environment);
here each of these is cut. The tool server is the container's only child and pid 1 (`--no-init`).
One foreground `exec` per sandbox and no instance: an instance is a daemon that outlives whoever
started it, costs 0.3 s to start and 1.7 s to stop, and has a name that others can take.

Images: folders, or none: a skeleton with the host's /usr.

Without an image a virtual environment below /tmp is not shown (no IPython inside then). With
`fakeroot`, /dev is bounded by the memory control group only, and the root inside has an ordinary
container engine's capabilities over files, none over the machine.
"""

from __future__ import annotations

import json
import os
from typing import NoReturn

from prorl.sandbox.images.tree import add_mount_points, has_mount_points
from prorl.sandbox.kind import CONFINED_BY_NAMESPACES, SandboxKind
from prorl.sandbox.kinds.engine import binds, contain, is_stacked, server
from prorl.sandbox.kinds.engine_support import (
    CONFIG,
    FLAT_CONFIG,
    make_support,
    program,
    python_script,
)
from prorl.sandbox.kinds.rootfs import keeps_folders
from prorl.sandbox.launch.spec import WORKSPACE, Launch, Serve

PLAIN_ENV = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "LANG": "C.UTF-8",
}
"""The environment of Apptainer; nothing of the host's is added."""
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


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    contain(launch, listener_fd, status_fd, _start)


def _start(launch: Launch) -> NoReturn:
    argv, state = _command(launch), f"{launch.folder}/state"
    if launch.spec.overlay_bytes:
        add_mount_points(_image(launch))
    folders = {"APPTAINER_CONFIGDIR": state, "APPTAINER_CACHEDIR": state}
    os.execve(argv[0], argv, {**PLAIN_ENV, "HOME": launch.folder, **folders})


def _command(launch: Launch) -> list[str]:
    home, support = launch.folder, os.path.dirname(launch.server)
    argv = [program(), "-s", *_config(launch, support), "exec", *FLAGS]
    argv += ["--hostname", "sandbox"]
    if keeps_folders(launch):
        argv += ["--no-mount", "tmp", "--cwd", "/"]
    else:
        argv += ["--cwd", WORKSPACE, "--workdir", f"{home}/scratch"]
    argv += [*FAKEROOT, NO_WRAPPER] if launch.spec.fakeroot else []
    argv += ["--writable"] if launch.spec.overlay_bytes else []
    # its own /dev has none, and a file of that name would take what is written
    for bind in [*binds(launch, launch.image), "/dev/full:/dev/full"]:
        argv += ["--bind", bind]
    command, config = server(launch, launch.image)
    return [*argv, _image(launch) or f"{support}/skeleton", *command, json.dumps(config)]


def _image(launch: Launch) -> str:
    return f"{launch.folder}/stack/image" if is_stacked(launch) else launch.image


def _config(launch: Launch, support: str) -> list[str]:
    """The configuration for a sandbox's image, if there is one of ours.

    One that has all mount points needs no layer for them.
    """
    image = _image(launch)
    changed = launch.spec.overlay_bytes or launch.spec.fakeroot or launch.files
    flat = not changed and (not image or has_mount_points(image))
    path = f"{support}/{FLAT_CONFIG if flat else CONFIG}"
    return ["--config", path] if os.path.exists(path) else []


KIND = SandboxKind(
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
    overlays=True,
    proxied=True,
    caps_ptys=False,
    server_can_be_killed=False,
    enforces=CONFINED_BY_NAMESPACES,
    cannot=("CPU share", "bugs of the kernel"),
    bare=(
        "apptainer -s exec --userns --containall --cleanenv --no-home --net --network none --bind"
        " /usr:/usr:ro {folder}/skeleton /bin/true"
    ),
)
