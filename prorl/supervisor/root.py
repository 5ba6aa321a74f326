"""The things of a service besides processes: its root's lock, token, service.json, short folders.

Beside the root lie a folder for the sockets of its processes and one for the notes of its sandboxd.

Invariants: two services never share a root (flock, so a dead owner never blocks); the token and
service.json are readable by their owner only; after `release` neither socket folder nor
service.json is left, after a SIGKILL the next service on the root removes them. Not promised:
protection from another root user, or a lock on network file systems without flock.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import shutil
import stat
import tempfile
from pathlib import Path

from prorl.config import ServiceConfig
from prorl.errors import ConfigError, ConflictError
from prorl.linux import locks
from prorl.linux.files import make_folder, write_private
from prorl.net.bearer import Keys, signing_key
from prorl.net.join import prepare

MAX_SOCKET_PATH = 100
"""Bytes; the kernel takes 107."""
_LONGEST_SOCKET = "/eval-63.sock"


class Root:
    """The root of one service, held from `acquire` to `release`."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.socket_dir = Path()
        self._lock_fd = -1
        self._new_folders: list[Path] = []
        """Folders that did not exist before, outermost first."""

    @property
    def service_file(self) -> Path:
        """Tells what every child reads; also tells clients on this host where the service is."""
        return self.path / "service.json"

    def acquire(self) -> None:
        """Make the folder, lock it, sweep what a dead service left.

        Raises ConfigError or ConflictError.
        """
        try:
            self._new_folders = make_folder(self.path, 0o700)
            self._lock_fd = locks.take(self.path / "lock")
        except BlockingIOError:
            owner = (self.path / "lock").read_text(errors="replace").strip()
            raise ConflictError(
                f"root {self.path} is in use by prorl pid {owner or '?'}",
                "a root of its own for each service",
                "name another with --root",
            ) from None
        except OSError as error:
            raise ConfigError(
                f"root {self.path} cannot be made or written: {error.strerror}",
                "a folder that can be",
                "name one with --root",
            ) from None
        os.ftruncate(self._lock_fd, 0)
        os.pwrite(self._lock_fd, str(os.getpid()).encode(), 0)
        try:
            sweep(self.path)
            self.service_file.unlink(missing_ok=True)
            self.socket_dir = make_socket_dir(self.path)
            _make_box_dir(box_dir(self.path))
        except BaseException:
            self.release(forget=True)
            raise

    def token(self) -> str:
        """The bearer token of this root: made once, kept over restarts, for its owner only."""
        path = self.path / "token"
        try:
            return path.read_text().strip()
        except FileNotFoundError:
            token = secrets.token_urlsafe(32)
            write_private(path, token + "\n")
            return token

    def open_to_others(self, config: ServiceConfig) -> float:
        """Make certificates and join files, and those anew that end soon, when the service is to be
        reached from other hosts; after how many seconds to look again.
        """
        keys = Keys(config.token, signing_key(self.path))
        if config.listener is None:
            return math.inf
        return prepare(self.path, config.listener.url, keys, config.certificate_days).look_s

    def write(self, config: ServiceConfig) -> None:
        """Publish the resolved config, atomically."""
        write_private(self.service_file, config.model_dump_json(indent=1))

    def release(self, *, forget: bool = False) -> None:
        """Remove what is not meant to outlive the service; idempotent.

        With `forget` a root goes too that we made and that holds no run.
        """
        if self._lock_fd < 0:
            return
        self.service_file.unlink(missing_ok=True)
        if self.socket_dir != Path():
            shutil.rmtree(self.socket_dir, ignore_errors=True)
        shutil.rmtree(box_dir(self.path), ignore_errors=True)
        if forget and self._new_folders and not any(self.path.glob("*/manifest.json")):
            shutil.rmtree(self._new_folders[0], ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = -1


def _prefix(root: Path) -> str:
    return f"prl-{hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:8]}-"


def box_dir(root: Path) -> Path:
    """Returns where sandboxd keeps its notes and workspaces: one name per root.

    So a new sandboxd mends what a killed one left.

    Not inside the socket folder: sandboxes run under other uids and must be able to walk to their
    workspace.
    """
    return _temp_dirs()[-1] / f"{_prefix(root)}box"


def _make_box_dir(path: Path) -> None:
    """Make it, or take the one that is there. Raises ConfigError where it is somebody else's."""
    path.mkdir(mode=0o711, exist_ok=True)
    info = path.lstat()
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.geteuid():
        raise ConfigError(
            f"{path} belongs to somebody else", "a folder that only prorl makes", "have it removed"
        )


def _temp_dirs() -> list[Path]:
    return list(dict.fromkeys([Path(tempfile.gettempdir()), Path("/tmp")]))


def make_socket_dir(root: Path) -> Path:
    """A fresh folder 0700 whose sockets' paths are short enough. Raises ConfigError."""
    for parent in _temp_dirs():
        if (
            len(os.fsencode(parent / (_prefix(root) + "x" * 8))) + len(_LONGEST_SOCKET)
            <= MAX_SOCKET_PATH
        ):
            return Path(tempfile.mkdtemp(prefix=_prefix(root), dir=parent))
    raise ConfigError(
        f"temporary folder {tempfile.gettempdir()}",
        "a path under 70 bytes for sockets",
        "set TMPDIR to a short path",
    )


def sweep(root: Path) -> None:
    """Remove socket folders that services left for this root which were killed: whoever holds its
    lock is the only one that lives.
    """
    for parent in _temp_dirs():
        for path in parent.glob(_prefix(root) + "*"):
            info = path.lstat()
            ours = stat.S_ISDIR(info.st_mode) and info.st_uid == os.geteuid()
            if ours and path != box_dir(root):
                shutil.rmtree(path, ignore_errors=True)
