"""Removing a folder that an agent has filled.

Any depth, any names, no link followed, constant stack and descriptors.
"""

from __future__ import annotations

import errno
import os
import stat


def remove_tree(path: str) -> None:
    """Remove a folder and all below it, or a file; one that is not there is no error.

    Deep folders are moved up to the top before they are emptied, so a chain of 100,000 costs no
    recursion and no long path.
    """
    try:
        top = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    except OSError as error:
        if error.errno not in (errno.ENOTDIR, errno.ELOOP):
            raise
        os.unlink(path)
        return
    try:
        serial = 0
        while names := os.listdir(top):
            for name in names:
                serial = _remove(top, name, serial)
    finally:
        os.close(top)
    os.rmdir(path)


def _remove(top: int, name: str, serial: int) -> int:
    """Remove an entry of the top folder; the sub-folders of a folder become entries of the top."""
    about = os.stat(name, dir_fd=top, follow_symlinks=False)
    if not stat.S_ISDIR(about.st_mode):
        os.unlink(name, dir_fd=top)
        return serial
    if not about.st_mode & 0o200 or not about.st_mode & 0o100:
        os.chmod(name, 0o700, dir_fd=top)
    folder = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=top)
    try:
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                serial += 1
                fresh = f".prorl-{serial}-{os.urandom(4).hex()}"
                os.rename(entry.name, fresh, src_dir_fd=folder, dst_dir_fd=top)
            else:
                os.unlink(entry.name, dir_fd=folder)
    finally:
        os.close(folder)
    os.rmdir(name, dir_fd=top)
    return serial
