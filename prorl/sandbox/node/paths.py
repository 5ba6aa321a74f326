"""The folders of sockets: short, named by a hash, 0700 and ours.

It is short whatever the length of the run's own path.

A Unix socket's path may have 107 bytes; Slurm and Lustre paths pass that easily.

    /tmp/prorl-<uid>/<hash of root>/owner   which root this is; locked while its sandboxd lives
    /tmp/prorl-<uid>/<hash of root>/<id>    one socket per sandbox

The kernel frees the lock with the process, so whoever can take it knows that its owner is dead
(`orphans`), wherever the root was and whether or not it is still there. Not promised: a lock
between machines or containers that share a root but not /tmp.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from prorl.errors import ConfigError
from prorl.linux import locks
from prorl.sandbox.wire import MAX_SOCKET_PATH

OWNER = "owner"
RETRY_S, RETRIES = 0.05, 100
"""Between two looks at a lock: its holder may be a sibling that sweeps the folder, or an owner that
is about to end.
"""


class SocketFolder:
    """One root's folder, held until `remove` or `release`.

    `claim` gives it to its owner, `orphans` to whoever sweeps it.
    """

    def __init__(self, path: Path, root: Path | None, lock: int) -> None:
        self.path, self._lock = path, lock
        self.root = root
        """None when its owner died before it could say."""

    @property
    def name(self) -> str:
        """Short and unique on this machine: other things of the same sandboxd are named by it."""
        return self.path.name

    def remove(self) -> None:
        """Remove it with all sockets, then free it; idempotent."""
        if self._lock < 0:
            return
        for entry in self.path.iterdir():
            if entry.name != OWNER:
                entry.unlink(missing_ok=True)
        (self.path / OWNER).unlink(missing_ok=True)
        try:
            self.path.rmdir()
        except OSError:
            pass  # its next owner was quicker: the folder is theirs now
        self.release()

    def release(self) -> None:
        """Free it and leave everything where it is; idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def base_folder() -> Path:
    return Path("/tmp") / f"prorl-{os.getuid()}"


async def claim(root: Path) -> SocketFolder:
    """This root's folder, made 0700 and ours. Raises ConfigError, also when another has it."""
    root = root.resolve()
    path = base_folder() / hashlib.blake2b(str(root).encode(), digest_size=8).hexdigest()
    own_folder(path.parent)
    for _ in range(RETRIES):
        lock = _try_lock(path)
        if lock >= 0:
            os.ftruncate(lock, 0)
            os.pwrite(lock, os.fsencode(root), 0)
            return SocketFolder(path, root, lock)
        await asyncio.sleep(RETRY_S)
    raise ConfigError(
        f"another sandboxd works in {root}", "a root of its own", "stop it or choose another root"
    )


def orphans(mine: SocketFolder) -> Iterator[SocketFolder]:
    """Folders whose sandboxd has died.

    Each is locked against its next owner until it is removed or released.
    """
    for path in sorted(mine.path.parent.iterdir()):
        # without a lock's file it was made this instant
        lock = _try_lock(path) if path != mine.path and (path / OWNER).exists() else -1
        if lock >= 0:
            root = os.pread(lock, 8192, 0)
            yield SocketFolder(path, Path(os.fsdecode(root)) if root else None, lock)


def _try_lock(path: Path) -> int:
    """The lock of a folder, or -1 when somebody has it or has just removed it."""
    try:
        own_folder(path)
        lock = locks.take(path / OWNER)
    except (FileNotFoundError, BlockingIOError):
        return -1
    if os.fstat(lock).st_nlink:
        return lock
    os.close(lock)
    return -1


def own_folder(folder: Path) -> None:
    """Make a 0700 folder, or check that the one there is ours and no link. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700)
    except FileExistsError:
        about = folder.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid():
            raise ConfigError(
                f"{folder} belongs to somebody else", "a folder of our own", "remove it"
            ) from None
        if about.st_mode & 0o077:
            folder.chmod(0o700)


def check_socket_path(path: str) -> None:
    if len(os.fsencode(path)) > MAX_SOCKET_PATH:
        raise ConfigError(
            f"socket path of {len(os.fsencode(path))} bytes: {path}",
            f"at most {MAX_SOCKET_PATH}",
            "choose a shorter folder",
        )
