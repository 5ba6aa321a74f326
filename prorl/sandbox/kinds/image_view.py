"""A task's image as one sandbox gets it: read-only, and with our Python beside it.

Its files belong to the sandbox's uid.

As root each sandbox has a uid of its own, so the image is shown by an idmapped mount in which its
owner is that uid: it can read what its owner can, and change it in its overlay. Nothing on disk
changes. Otherwise the image belongs to whoever runs sandboxd, or is foreign.

Our Python runs with the host's own C library, so an image may be old, musl, or have no Python at
all; bash is all that it needs:

    /opt/prorl/host        the host's /usr: loader, libraries, our Python if it is installed there
    /opt/prorl/part0 ...   what else our Python runs from
    /opt/prorl/bin         python and python3 for images that have none: last on PATH
"""

from __future__ import annotations

import os
import shlex
from functools import cache

from prorl.linux import calls
from prorl.sandbox.launch.spec import Launch, interpreter, interpreter_roots

SUPPORT = "/opt/prorl"


def clone(launch: Launch) -> int:
    """As root, before any namespace: a detached mount of the image.

    Raises OSError where an overlay needs what the kernel refuses.
    """
    tree = calls.clone_tree(launch.image)
    flags = calls.MOUNT_ATTR_RDONLY | calls.MOUNT_ATTR_NOSUID | calls.MOUNT_ATTR_NODEV
    if os.path.isdir(launch.image):
        about = os.stat(launch.image)
        owners = _user_namespace((about.st_uid, about.st_gid), launch.uid)
        try:
            calls.change_tree(tree, flags | calls.MOUNT_ATTR_IDMAP, owners)
            return tree
        # an old kernel, or a file system without it: what its modes let others read is all there is
        except OSError as error:
            if launch.overlay_bytes:
                raise OSError(
                    error.errno,
                    f"no overlay over {launch.image}: its file system has no idmapped mounts",
                ) from error
        finally:
            os.close(owners)
    calls.change_tree(tree, flags)
    return tree


def _user_namespace(owner: tuple[int, int], uid: int) -> int:
    """A user namespace that maps one owner to one uid, held by nothing but the descriptor."""
    pid, ready, go = _forked_with_namespace()
    try:
        os.read(ready, 1)
        for name, number in zip(("uid_map", "gid_map"), owner, strict=True):
            with open(f"/proc/{pid}/{name}", "w") as file:
                file.write(f"{number} {uid} 1")
        return os.open(f"/proc/{pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(go)
        os.close(ready)
        os.waitpid(pid, 0)


def _forked_with_namespace() -> tuple[int, int, int]:
    """Fork a child in a new user namespace.

    It says so on the second descriptor, and lives until the third is closed.
    """
    ready_read, ready_write = os.pipe2(os.O_CLOEXEC)
    go_read, go_write = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        try:
            os.close(go_write)
            calls.unshare(calls.CLONE_NEWUSER)
            os.write(ready_write, b"x")
            os.read(go_read, 1)
        finally:
            os._exit(0)
    os.close(ready_write)
    os.close(go_read)
    return pid, ready_read, go_write


# ---- our Python


def prepare() -> None:
    """Compute what does not change, once for every launcher that is forked from here."""
    python_script()


@cache
def parts() -> tuple[tuple[str, str], ...]:
    """(folder of the host, where it is shown inside), all read-only."""
    found = [("/usr", f"{SUPPORT}/host")]
    for path in (*interpreter_roots(), *_library_folders()):
        if not any(path == known or path.startswith(known + "/") for known, _ in found):
            found.append((path, f"{SUPPORT}/part{len(found) - 1}"))
    return tuple(found)


def inside(path: str) -> str:
    """The path under which an image shows a file of ours."""
    for host, shown in parts():
        if path == host or path.startswith(host + "/"):
            return shown + path[len(host) :]
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
