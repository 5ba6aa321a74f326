"""An image is a stack of folders, which others share.

    images/LAYER    mount points that it lacks, its environment and working directory
    images/LAYER    ... of its archives: each is an entry of the registry, unpacked once

A sandbox mounts it by overlayfs, in its own namespaces. Where this kernel lets no ordinary user do
so, or the file system holds no marks, an image is merged by hard links instead: folders of its own,
files shared.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from prorl.linux import calls
from prorl.linux.forked import ForkedChild
from prorl.sandbox.images.tree import FILES, MOUNT_POINTS, SHELLS, entries
from prorl.sandbox.images.unpack import OPAQUE, OPAQUE_ATTRIBUTE, WHITEOUT, is_mark
from prorl.sandbox.launch.spec import ENVIRONMENT_FILE
from prorl.sandbox.trees import remove_tree

WORKDIR_FILE = ".prorl-workdir"
"""The file of an image that says, one a line: its working directory, its user, and HOME where its
variables say it.
"""


def lookup(layers: Sequence[str], path: str) -> os.stat_result | None:
    """Returns what overlayfs shows at a path of a stack, lowest first; no link is followed."""
    parent = os.path.dirname(path)
    if parent:
        above = lookup(layers, parent)
        if above is None or not stat.S_ISDIR(above.st_mode):
            return None
    status: os.stat_result | None = None
    for layer in layers:
        folder = os.path.join(layer, parent) if parent else layer
        try:
            about = os.lstat(folder)
        except OSError:
            continue
        if not stat.S_ISDIR(about.st_mode) or _is_opaque(folder):
            status = None
        try:
            about = os.lstat(os.path.join(layer, path))
        except OSError:
            continue
        status = None if is_mark(about) else about
    return status


def _is_opaque(folder: str) -> bool:
    try:
        return os.getxattr(folder, OPAQUE_ATTRIBUTE, follow_symlinks=False) == b"y"
    except OSError:
        return False


def stack_has_shell(layers: Sequence[str]) -> bool:
    return any(lookup(layers, path) for path in SHELLS)


def make_top(top: Path, layers: Sequence[str], config: Mapping[str, Any]) -> None:
    top.mkdir(mode=0o755)
    for point in (*MOUNT_POINTS, WORKDIR_FILE, ENVIRONMENT_FILE):
        folder, blocked = top, False
        for index, name in enumerate(point.split("/")[:-1]):
            below = lookup(layers, "/".join(point.split("/")[: index + 1]))
            folder /= name
            blocked = blocked or bool(below and not stat.S_ISDIR(below.st_mode))
            if not blocked and not folder.exists():
                folder.mkdir()
                folder.chmod(stat.S_IMODE(below.st_mode) if below else 0o755)
        full = top / point
        if blocked or full.exists():
            continue
        if point == WORKDIR_FILE:
            full.write_text(_world(config))
        elif point == ENVIRONMENT_FILE:
            pairs = (str(pair).partition("=") for pair in config.get("Env") or ())
            lines = (f"export {n}={shlex.quote(v)}\n" for n, _, v in pairs if n.isidentifier())
            full.write_text("".join(lines))
        elif lookup(layers, point) is None:
            full.touch() if point in FILES else full.mkdir()


def _world(config: Mapping[str, Any]) -> str:
    """Returns the content of `WORKDIR_FILE` for an image."""
    home = dict(str(pair).partition("=")[::2] for pair in config.get("Env") or ()).get("HOME", "")
    user = str(config.get("User") or "root").partition(":")[0]
    lines = (str(config.get("WorkingDir") or "/"), user, home)
    return "".join(f"{line}\n" for line in lines if "\n" not in line).rstrip("\n") + "\n"


def merge(layers: Sequence[str], target: Path) -> None:
    """Make one folder of a stack, lowest first; its files are hard links."""
    target.mkdir(mode=0o755, exist_ok=True)
    for layer in layers:
        for path, about in entries(layer):
            there = target / os.path.relpath(path, layer)
            if there.name == OPAQUE:
                continue
            if is_mark(about):
                remove_tree(str(there))
            elif there.name.startswith(WHITEOUT):
                remove_tree(str(there.with_name(there.name.removeprefix(WHITEOUT))))
            elif stat.S_ISDIR(about.st_mode):
                hides = _is_opaque(path) or os.path.lexists(os.path.join(path, OPAQUE))
                if hides or not there.is_dir() or there.is_symlink():
                    remove_tree(str(there))
                    there.mkdir()
                there.chmod(stat.S_IMODE(about.st_mode) | 0o700)
            else:
                if os.path.lexists(there):
                    remove_tree(str(there))
                os.link(path, there, follow_symlinks=False)


def can_stack(work: Path) -> bool:
    """Returns whether sandboxes of this user can mount stacks that lie on the file system of
    `work`.
    """
    for name in ("low", "high", "seen"):
        (work / name).mkdir()
    (work / "low" / "gone").touch()
    try:
        os.mknod(work / "high" / "gone", stat.S_IFCHR, 0)
        os.setxattr(work / "high", OPAQUE_ATTRIBUTE, b"n")
    except OSError:
        return False
    pid = os.fork()
    if pid == 0:
        with ForkedChild(os.open(os.devnull, os.O_WRONLY)):
            root = os.getuid() == 0
            calls.unshare(calls.CLONE_NEWNS | (0 if root else calls.CLONE_NEWUSER))
            calls.mount(None, "/", None, calls.MS_REC | calls.MS_PRIVATE)
            os.chdir(work)
            calls.mount_overlay(["high", "low"], str(work / "seen"))
            os._exit(1 if os.path.lexists(work / "seen" / "gone") else 0)
    return os.waitpid(pid, 0)[1] == 0
