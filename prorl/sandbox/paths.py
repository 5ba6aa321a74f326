"""Where sockets live: a short folder named by a hash, 0700 and ours, whatever the length of the run's own path.

A Unix socket's path may have 107 bytes; Slurm and Lustre paths pass that easily.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from pathlib import Path

from prorl.errors import ConfigError
from prorl.sandbox.wire import MAX_SOCKET_PATH

SAFE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")


def short_folder(root: Path) -> Path:
    """`/tmp/prorl-<uid>/<hash of root>`, made 0700 and checked to be ours. Raises ConfigError."""
    digest = hashlib.blake2b(str(root.resolve()).encode(), digest_size=8).hexdigest()
    base = Path("/tmp") / f"prorl-{os.getuid()}"
    for folder in (base, base / digest):
        own_folder(folder)
    return base / digest


def own_folder(folder: Path) -> None:
    """Make a 0700 folder, or check that the one there is ours and no link. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise ConfigError(f"{folder} belongs to somebody else", "a folder of our own", "remove it") from None
        if about.st_mode & 0o077:
            folder.chmod(0o700)


def check_socket_path(path: str) -> None:
    """Raise ConfigError when no socket can have this path."""
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(f"socket path of {len(os.fsencode(path))} bytes: {path}", f"at most {MAX_SOCKET_PATH}", "choose a shorter folder")
