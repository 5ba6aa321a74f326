"""The files that a sandbox of a container engine has inside, beside its workspace.

An image's files belong to the sandbox's uid. As root each sandbox has a uid of its own, so the
image is shown by an idmapped mount in which its owner is that uid: it can read what its owner can,
and change it in its overlay. Nothing on disk changes. Otherwise the image belongs to whoever runs
sandboxd, or is foreign.

Our Python runs with the host's own C library, so an image may be old, musl, or have no Python at
all; bash is all that it needs:

    /opt/prorl/host        the host's /usr: loader, libraries, our Python if it is installed there
    /opt/prorl/part0 ...   what else our Python runs from
    /opt/prorl/bin         python and python3 for images that have none: last on PATH

What all sandboxes share sandboxd makes once: /opt/prorl, a skeleton for those without an image, and
Apptainer's configuration without what would cost each start.
"""

from __future__ import annotations

import os
import shlex
from functools import cache

from prorl.linux import calls
from prorl.sandbox.launch.spec import (
    ENVIRONMENT_FILE,
    LAYER,
    SANDBOX_UID,
    WORKSPACE,
    Launch,
    interpreter,
    interpreter_roots,
)

SUPPORT = "/opt/prorl"
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
SHELL = ("bash", "-c", f'[ -f /{ENVIRONMENT_FILE} ] && . /{ENVIRONMENT_FILE}; exec "$0" "$@"')
"""Sets an image's variables for the tool server, as Apptainer does by itself."""
MOUNT_POINT_BYTES = 1 << 20
"""Over an image that is read-only, for mount points that it lacks."""
IMAGE_SUPPORT = "image"
"""Beside the skeleton: what an image gets at /opt/prorl."""
SKELETON = (
    "usr",
    "etc",
    "etc/ssl",
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
    "passwd": f"user:x:{SANDBOX_UID}:{SANDBOX_UID}::{WORKSPACE}:/bin/bash\n"
    "nobody:x:65534:65534::/:/usr/sbin/nologin\n",
    "group": f"user:x:{SANDBOX_UID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files\n",
}
"""Files of /etc that are the same in every sandbox without an image."""
CONFIG, FLAT_CONFIG = "apptainer.conf", "flat.conf"
LEAN = {"binary path": "/nowhere", "config resolv_conf": "no"}
FLAT = {**LEAN, "enable overlay": "no", "enable underlay": "no"}


# ---- the image


def clone(launch: Launch) -> list[int]:
    """Clones, as root and before any namespace, detached mounts of the image's folders, topmost
    first.

    Raises OSError where an overlay needs what the kernel refuses.
    """
    flags = calls.MOUNT_ATTR_RDONLY | calls.MOUNT_ATTR_NOSUID | calls.MOUNT_ATTR_NODEV
    trees = [calls.clone_tree(path) for path in (launch.image, *launch.under)]
    about = os.stat(launch.image)
    owners = _user_namespace((about.st_uid, about.st_gid), launch.uid)
    try:
        for tree in trees:
            calls.change_tree(tree, flags | calls.MOUNT_ATTR_IDMAP, owners)
        return trees
    # an old kernel, or a file system without it: what its modes let others read is all there is
    except OSError as error:
        if launch.spec.overlay_bytes:
            problem = f"no overlay over {launch.image}: its file system has no idmapped mounts"
            raise OSError(error.errno, problem) from error
    finally:
        os.close(owners)
    for tree in trees:
        calls.change_tree(tree, flags)
    return trees


def _user_namespace(owner: tuple[int, int], uid: int) -> int:
    """A user namespace that maps one owner to one uid, held by nothing but the descriptor."""
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    go_read, go_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go_write)
            calls.unshare(calls.CLONE_NEWUSER)
            os.write(ready_write, b"x")
            os.read(go_read, 1)  # runs until we have the descriptor
        finally:
            os._exit(0)
    os.close(ready_write)
    os.close(go_read)
    try:
        os.read(ready_read, 1)
        for name, number in zip(("uid_map", "gid_map"), owner, strict=True):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"{number} {uid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(go_write)
        os.close(ready_read)
        os.waitpid(pid, 0)


# ---- our Python


@cache
def parts() -> tuple[tuple[str, str], ...]:
    """Returns (folder of the host, where it is shown inside), all read-only."""
    folders = [("/usr", f"{SUPPORT}/host")]
    for path in (*interpreter_roots(), *_library_folders()):
        if not any(path == folder or path.startswith(folder + "/") for folder, _ in folders):
            folders.append((path, f"{SUPPORT}/part{len(folders) - 1}"))
    return tuple(folders)


def inside(path: str) -> str:
    for host, target in parts():
        if path == host or path.startswith(host + "/"):
            return target + path[len(host) :]
    return path


@cache
def loader() -> tuple[str, ...]:
    """The host's dynamic loader with its library path, as seen inside.

    It is what to put before our Python's executable.
    """
    own = next(path for path in _mapped_libraries() if os.path.basename(path).startswith("ld-"))
    return inside(own), "--library-path", ":".join(inside(path) for path in _library_folders())


@cache
def python_script() -> str:
    """The shell script that is `python3` in an image without one: our Python by its own loader."""
    return f'#!/bin/sh\nexec {shlex.join((*loader(), inside(interpreter())))} "$@"\n'


def _library_folders() -> list[str]:
    """Our Python's own first: /usr may hold a libpython of the same name."""
    folders = dict.fromkeys(
        os.path.dirname(path) for path in _mapped_libraries() if "/lib-dynload/" not in path
    )
    return sorted(folders, key=lambda folder: not folder.startswith(interpreter_roots()))


def _mapped_libraries() -> list[str]:
    """Shared libraries of this very process: the ones that our Python needs."""
    with open("/proc/self/maps") as file:
        paths = [
            line.split(maxsplit=5)[5].strip() for line in file if ".so" in line and "/" in line
        ]
    return list(
        dict.fromkeys(
            path
            for path in paths
            if "site-packages" not in path and ".so" in os.path.basename(path)
        )
    )


# ---- what all sandboxes share


def program() -> str:
    """Apptainer's or Singularity's executable, or an empty string."""
    import shutil  # not above: each sandbox of `pyns` is a fork of what this module imports

    return shutil.which("apptainer") or shutil.which("singularity") or ""


def make_support(folder: str) -> None:
    """Make what sandboxes of an engine get read-only at /opt/prorl.

    There is one for images, and one beside a skeleton, which takes the place of an image.
    """
    for name in ("bin", os.path.basename(LAYER)):
        os.makedirs(f"{folder}/{name}", exist_ok=True)
    for name in ("python", "python3"):
        if not os.path.lexists(f"{folder}/bin/{name}"):
            os.symlink(interpreter(), f"{folder}/bin/{name}")
    make_image_support(folder)
    if not os.path.exists(f"{folder}/{CONFIG}") and program():
        write_configs(folder)
    if not os.path.isdir(f"{folder}/skeleton"):
        _make_skeleton(f"{folder}/skeleton")


def write_configs(folder: str) -> None:
    """Write the site's configuration for images that are folders, without FUSE programs.

    They would be tried three times in each start. An Apptainer that runs setuid, or a Singularity,
    keeps its own.
    """
    import subprocess

    buildcfg = subprocess.run(
        [program(), "buildcfg"], capture_output=True, text=True, check=False
    ).stdout
    built = dict(line.split("=", 1) for line in buildcfg.splitlines() if "=" in line)
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


def make_image_support(support: str) -> None:
    """Make what every sandbox that runs an image gets read-only at /opt/prorl."""
    folder, server = f"{support}/{IMAGE_SUPPORT}", f"{support}/server.pyz"
    if os.path.isdir(folder):
        return
    os.makedirs(f"{folder}/bin")
    for _, target in parts():
        os.mkdir(folder + target.removeprefix(SUPPORT))
    for name in ("python", "python3"):
        with open(
            f"{folder}/bin/{name}", "w", opener=lambda path, flags: os.open(path, flags, 0o755)
        ) as file:
            file.write(python_script())
    if os.path.exists(server):
        os.link(server, f"{folder}/server.pyz")


def _make_skeleton(skeleton: str) -> None:
    import shutil

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
    for name, text in {**ETC, "localtime": "", "hostname": ""}.items():
        with open(f"{skeleton}/etc/{name}", "w") as file:
            file.write(text)
