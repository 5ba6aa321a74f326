"""What the processes of a uid leave on the host outside of their sandbox's folder.

For kinds that share the host's files and IPC namespace: the next sandbox of that uid would own it.

Looked for where any user may write: `FOLDERS`, and folders of root's below them. Not found: a file
in a folder that another sandbox opened to everybody, which goes with that one. Blocking.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Container

from prorl.linux import calls, procfs
from prorl.sandbox.trees import remove_tree

FOLDERS = ("/tmp", "/var/tmp", "/dev/shm", "/dev/mqueue", "/run/lock")


def remove(uids: Container[int]) -> None:
    """Everything that belongs to these uids, none of which may have a process left."""
    for found in procfs.sysv_objects():
        if found.uid in uids or found.creator in uids:
            _quietly_remove_sysv(found)
    for folder in {os.path.realpath(folder) for folder in FOLDERS}:
        _sweep(folder, uids)


def _quietly_remove_sysv(found: procfs.SysVObject) -> None:
    try:
        calls.remove_sysv(found.kind, found.id)
    except OSError:
        pass  # gone meanwhile


def _sweep(folder: str, uids: Container[int]) -> None:
    try:
        entries = list(os.scandir(folder))
    except OSError:
        return
    for entry in entries:
        try:
            about = entry.stat(follow_symlinks=False)
            if about.st_uid in uids:
                remove_tree(entry.path)
            # Only root's: into another's we could be led astray by a link that takes its place.
            elif stat.S_ISDIR(about.st_mode) and about.st_mode & 0o002 and about.st_uid == 0:
                _sweep(entry.path, uids)
        except OSError:
            continue  # gone meanwhile
