"""bwrap: bubblewrap with every isolating flag, inside a pid namespace of our own (`wrapped.py`).

Contains what pyns contains, by a program that many eyes have read. The tool server runs as a zipapp and is pid 1 inside.
bwrap is started with a minimal environment: `--clearenv` does not clean its own /proc entry.
"""

from __future__ import annotations

import os
import shutil
from typing import NoReturn

from prorl.sandbox import seccomp
from prorl.sandbox.kinds import wrapped
from prorl.sandbox.kinds.rootfs import ETC_FILES, ETC_FOLDERS, GROUP, HOSTS, LINKS, NSSWITCH, PASSWD, SHM_BYTES
from prorl.sandbox.launch import BIN, SANDBOX_UID, WORKSPACE, Launch, interpreter, interpreter_roots
from prorl.sandbox.zygote import Serve

SERVER = "/opt/prorl/server.pyz"
NAMESPACES = ["user", "pid", "ipc", "uts", "net"]


def launch(launch: Launch, listener_fd: int, status_fd: int, serve: Serve) -> NoReturn:
    """Become the guard of one sandbox."""
    program = os.open(launch.server, os.O_RDONLY)
    pid = wrapped.enter(launch)
    foreign = wrapped.Foreign([], {}) if pid else _command(launch, listener_fd, status_fd, program)
    wrapped.run(launch, listener_fd, status_fd, pid, foreign)


def _command(launch: Launch, listener_fd: int, status_fd: int, program: int) -> wrapped.Foreign:
    os.set_inheritable(program, True)
    argv = [shutil.which("bwrap") or "bwrap", *(f"--unshare-{name}" for name in NAMESPACES), "--unshare-cgroup-try"]
    argv += ["--uid", str(SANDBOX_UID), "--gid", str(SANDBOX_UID), "--hostname", "sandbox", "--die-with-parent", "--as-pid-1"]
    argv += ["--cap-drop", "ALL", "--disable-userns", "--clearenv", *_seccomp()]
    argv += _system(launch.image)
    argv += ["--proc", "/proc", "--dev", "/dev", "--size", str(SHM_BYTES), "--tmpfs", "/dev/shm", "--remount-ro", "/dev"]
    argv += ["--size", str(launch.tmp_bytes), "--perms", "1777", "--tmpfs", "/tmp"]
    argv += ["--size", str(launch.workspace_bytes), "--tmpfs", WORKSPACE]
    argv += _interpreter()
    argv += ["--ro-bind-data", str(program), SERVER]
    argv += ["--remount-ro", "/", "--chdir", WORKSPACE, "--", interpreter(), *wrapped.python_flags(), SERVER]
    argv += [wrapped.argument(launch, listener_fd, status_fd)]
    return wrapped.Foreign(argv, wrapped.PLAIN_ENV)


def _seccomp() -> list[str]:
    code = seccomp.bytecode()
    return ["--seccomp", str(_data(code))] if code else []


def _system(image: str) -> list[str]:
    """The image (a folder), or the host's /usr, read-only; then a small /etc."""
    argv: list[str] = []
    if image:
        argv += ["--ro-bind", image, "/", "--tmpfs", "/opt/prorl"]
    else:
        argv += ["--ro-bind", "/usr", "/usr"]
        for name in LINKS:
            if os.path.islink(f"/{name}"):
                argv += ["--symlink", os.readlink(f"/{name}"), f"/{name}"]
            elif os.path.isdir(f"/{name}"):
                argv += ["--ro-bind", f"/{name}", f"/{name}"]
        for name in (*ETC_FOLDERS, *ETC_FILES):
            argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
        for name, text in {"passwd": PASSWD, "group": GROUP, "hosts": HOSTS, "nsswitch.conf": NSSWITCH}.items():
            argv += ["--ro-bind-data", str(_data(text.encode())), f"/etc/{name}"]
        argv += ["--dir", "/var", "--symlink", "../tmp", "/var/tmp", "--dir", "/run", "--dir", "/home"]
    return argv


def _interpreter() -> list[str]:
    """Our Python at its own path, after what could cover it: a virtual environment may lie below /tmp."""
    argv: list[str] = []
    for root in interpreter_roots():
        argv += ["--ro-bind", root, root]
    for name in ("python", "python3"):
        argv += ["--symlink", interpreter(), f"{BIN}/{name}"]
    return argv


def _data(content: bytes) -> int:
    """An inheritable descriptor from which bwrap reads a small file."""
    fd = os.memfd_create("prorl", 0)
    os.set_inheritable(fd, True)
    os.write(fd, content)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd
