"""Folders that are root file systems: copied, made harmless, hashed, measured.

Blocking; no root needed.

An image belongs as a whole to whoever owns the registry: inside a sandbox only one uid means
anything.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
from collections.abc import Iterator

from prorl.errors import UserError
from prorl.pluralize import pluralize

FILES = ("etc/hosts", "etc/passwd", "etc/group", "etc/localtime", "etc/hostname")
MOUNT_POINTS = (*FILES, "proc", "sys", "dev", "tmp", "var/tmp", "workspace", "opt/prorl")
SHELLS = ("bin/bash", "usr/bin/bash", "usr/local/bin/bash")


def has_shell(folder: str) -> bool:
    """Returns whether a folder can be an image: our Python comes along, but bash is the image's
    own.
    """
    return any(os.path.lexists(os.path.join(folder, name)) for name in SHELLS)


def check_shell(folder: str, source: str) -> None:
    """Raise UserError for a folder that can be no image."""
    if not has_shell(folder):
        expected = "bin/bash or usr/bin/bash in it"
        raise UserError(f"{source} is no root file system: it has no bash", expected)


def entries(tree: str) -> Iterator[tuple[str, os.stat_result]]:
    """Everything below a folder in a fixed order, each folder before what is in it."""
    pending = [tree]
    while pending:
        for entry in sorted(os.scandir(pending.pop()), key=lambda entry: entry.name):
            yield entry.path, entry.stat(follow_symlinks=False)
            if entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)


def copy_tree(source: str, target: str, never: str) -> None:
    """Copy folders, files and links of one file system.

    No devices, no mounts, not the folder `never`. What an ordinary user may not read is left out,
    with a line on standard output: in root's trees that is /etc/shadow and its like.
    """
    device = os.stat(source).st_dev
    missed: list[str] = []

    def keep_out(folder: str, names: list[str]) -> set[str]:
        return {
            name for name in names if _is_foreign(os.path.join(folder, name), device, never, missed)
        }

    shutil.copytree(source, target, symlinks=True, ignore=keep_out)
    if missed:
        files = pluralize(len(missed), "file")
        print(f"left out {files} that this user may not read: {', '.join(missed[:5])}", flush=True)


def _is_foreign(path: str, device: int, never: str, missed: list[str]) -> bool:
    about = os.lstat(path)
    if stat.S_ISLNK(about.st_mode):
        return False
    if not stat.S_ISREG(about.st_mode) and not stat.S_ISDIR(about.st_mode):
        return True
    if about.st_dev != device or os.path.realpath(path) == never:
        return True
    if not os.access(path, os.R_OK | (os.X_OK if stat.S_ISDIR(about.st_mode) else 0)):
        missed.append(path)
        return True
    return False


def tidy(tree: str) -> None:
    """Removes devices, sockets and pipes, and makes all of it ours, with folders that we can list
    and clear.
    """
    os.chown(tree, os.getuid(), os.getgid())
    os.chmod(tree, 0o755)
    for path, about in entries(tree):
        if (
            stat.S_ISREG(about.st_mode)
            or stat.S_ISLNK(about.st_mode)
            or stat.S_ISDIR(about.st_mode)
        ):
            if about.st_uid != os.getuid():
                os.lchown(path, os.getuid(), os.getgid())
            if stat.S_ISDIR(about.st_mode) and about.st_mode & 0o700 != 0o700:
                os.chmod(path, about.st_mode & 0o7777 | 0o700)
        else:
            os.unlink(path)


def add_mount_points(tree: str) -> None:
    """Make empty folders and files for what launchers mount, where they are missing.

    A layer for them would cost each start 10 ms.
    """
    for path in MOUNT_POINTS:
        parent = tree
        for name in path.split("/")[:-1]:
            parent = os.path.join(parent, name)
            if os.path.islink(parent):
                break  # never follow an image's links on the host
            os.makedirs(parent, exist_ok=True)
        else:
            full = os.path.join(tree, path)
            if not os.path.lexists(full):
                os.mkdir(full) if path not in FILES else open(full, "x").close()


def has_mount_points(tree: str) -> bool:
    """Returns whether nothing has to be layered over an image to run it read-only."""
    return all(os.path.lexists(os.path.join(tree, path)) for path in MOUNT_POINTS)


def digest_of(tree: str) -> str:
    """sha256 over every entry's path, kind, mode and content, in order of paths.

    Reads everything.
    """
    whole = hashlib.sha256()
    for path, about in entries(tree):
        whole.update(
            f"{stat.S_IFMT(about.st_mode):o} {about.st_mode & 0o7777:o} ".encode()
            + os.fsencode(os.path.relpath(path, tree))
        )
        if stat.S_ISLNK(about.st_mode):
            whole.update(b"\0" + os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(about.st_mode):
            with open(path, "rb") as file:
                whole.update(b"\0" + hashlib.file_digest(file, "sha256").digest())
        whole.update(b"\0\0")
    return whole.hexdigest()


def measure(tree: str) -> tuple[int, int]:
    sizes = [about.st_blocks * 512 for _, about in entries(tree)]
    return sum(sizes) + os.lstat(tree).st_blocks * 512, len(sizes)
