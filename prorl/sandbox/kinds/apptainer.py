"""apptainer: Apptainer or Singularity, rootless, with every isolating flag, inside a pid namespace of our own (`wrapped.py`).

Default runs of Apptainer integrate (they share /tmp, the home, the network and the environment); here each of these is cut. The tool
server is the container's only child and pid 1 (`--no-init`). One foreground `exec` per sandbox and no instance: an instance is a daemon
that outlives whoever started it, costs 0.3 s to start and 1.7 s to stop, and has a name that others can take.

Images: a folder (fastest: kernel overlay), a .sif (FUSE, ends with the pid namespace), or none: a skeleton with the host's /usr.
Sized by apptainer.conf's `sessiondir max size`: /tmp and /dev/shm. Not bounded: the workspace on disk, except per file. A virtual
environment below /tmp is not shown (no IPython inside then).
"""

from __future__ import annotations

import os
import pwd
import shutil
from typing import NoReturn

from prorl.sandbox import seccomp
from prorl.sandbox.kinds import wrapped
from prorl.sandbox.kinds.common import limits_of
from prorl.sandbox.launch import SANDBOX_UID, WORKSPACE, Launch, interpreter, interpreter_roots
from prorl.sandbox.zygote import Serve

SUPPORT = "/opt/prorl"
CONFIG = "/etc/apptainer/apptainer.conf"
FLAGS = ("--containall", "--cleanenv", "--no-home", "--no-eval", "--no-init", "--net", "--network", "none", "--no-mount", "sys")


def program() -> str:
    """Apptainer's or Singularity's executable, or an empty string."""
    return shutil.which("apptainer") or shutil.which("singularity") or ""


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    """Become the guard of one sandbox."""
    pid = wrapped.enter(launch, _passwd(launch))
    foreign = wrapped.Foreign([], {}) if pid else _command(launch, listener_fd, status_fd)
    wrapped.run(launch, listener_fd, status_fd, pid, foreign, limits=False)


def _passwd(launch: Launch) -> list[tuple[str, str]]:
    """Apptainer wants its user to have an account; a uid from our block has one in this mount namespace only."""
    uid = launch.uid if launch.uid >= 0 else os.getuid()
    try:
        pwd.getpwuid(uid)
    except KeyError:
        path = f"{launch.folder}.passwd"
        with open("/etc/passwd") as known, open(path, "w") as file:
            file.write(f"{known.read().rstrip()}\nprorl{uid}:x:{uid}:{uid}::{launch.folder}:/bin/sh\n")
        return [(path, "/etc/passwd")]
    return []


def _command(launch: Launch, listener_fd: int, status_fd: int) -> wrapped.Foreign:
    home, support = launch.folder, os.path.dirname(launch.server)
    for name in ("workspace", "state"):
        os.mkdir(f"{home}/{name}", 0o755)
    config = f"{home}/apptainer.conf"
    _write_config(config, launch.tmp_bytes)
    binds = [f"{home}/workspace:{WORKSPACE}", f"{support}:{SUPPORT}:ro"]
    binds += [f"{root}:{root}:ro" for root in interpreter_roots() if not root.startswith("/tmp/")]  # its own /tmp takes no binds
    image = launch.image or f"{support}/skeleton"
    if not launch.image:
        binds.append("/usr:/usr:ro")
    argv = [program(), "-s", "--config", config, "exec", *FLAGS, "--hostname", "sandbox", "--cwd", WORKSPACE]
    for bind in binds:
        argv += ["--bind", bind]
    argv += [image, interpreter(), *wrapped.python_flags(), f"{SUPPORT}/server.pyz"]
    extra = {"limits": limits_of(launch), "seccomp": seccomp.bytecode().hex()}
    argv.append(wrapped.argument(launch, listener_fd, status_fd, extra))
    outer = dict(wrapped.PLAIN_ENV, HOME=home, APPTAINER_CONFIGDIR=f"{home}/state", APPTAINER_CACHEDIR=f"{home}/state")
    return wrapped.Foreign(argv, outer)


def _write_config(path: str, tmp_bytes: int) -> None:
    """The site's configuration with our size for temporary file systems."""
    with open(CONFIG) as file:
        lines = [line for line in file if not line.startswith("sessiondir max size")]
    with open(path, "w") as file:
        file.writelines([*lines, f"\nsessiondir max size = {max(1, tmp_bytes >> 20)}\n"])


def make_support(folder: str) -> None:
    """What every sandbox of this kind gets read-only: our interpreter's names, and a skeleton for those without an image."""
    os.makedirs(f"{folder}/bin", exist_ok=True)
    for name in ("python", "python3"):
        if not os.path.lexists(f"{folder}/bin/{name}"):
            os.symlink(interpreter(), f"{folder}/bin/{name}")
    skeleton = f"{folder}/skeleton"
    if os.path.isdir(skeleton):
        return
    for name in ("usr", "etc", "tmp", "var/tmp", "proc", "sys", "dev", "root", "home", "opt/prorl", "workspace", "run"):
        os.makedirs(f"{skeleton}/{name}")
    for root in interpreter_roots():
        os.makedirs(skeleton + root, exist_ok=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        os.symlink(f"usr/{name}", f"{skeleton}/{name}")
    if os.path.isdir("/etc/alternatives"):
        shutil.copytree("/etc/alternatives", f"{skeleton}/etc/alternatives", symlinks=True)
    if os.path.exists("/etc/ld.so.cache"):
        shutil.copy("/etc/ld.so.cache", f"{skeleton}/etc/ld.so.cache")
    texts = {"passwd": f"user:x:{SANDBOX_UID}:{SANDBOX_UID}::{WORKSPACE}:/bin/bash\n", "group": f"user:x:{SANDBOX_UID}:\n"}
    for name, text in {**texts, "hosts": "127.0.0.1 localhost sandbox\n", "resolv.conf": "", "localtime": ""}.items():
        with open(f"{skeleton}/etc/{name}", "w") as file:
            file.write(text)
