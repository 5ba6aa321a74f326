"""The short folders beside a root: sockets of its processes, notes of its sandboxd."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import tempfile
from pathlib import Path

from prorl.errors import ConfigError
from prorl.linux.procfs import start_ticks

MAX_SOCKET_PATH = 100
"""Bytes; the kernel takes 107."""
_LONGEST_SOCKET = "/eval-63.sock"


def _prefix(root: Path) -> str:
    return f"prl-{hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:8]}-"


def box_dir(root: Path) -> Path:
    """Where sandboxd keeps its notes and workspaces: one name per root.

    So a new sandboxd mends what a killed one left.

    Not inside the socket folder: sandboxes run under other uids and must be able to walk to their
    workspace.
    """
    return _temp_dirs()[-1] / f"{_prefix(root)}box"


def make_box_dir(path: Path) -> None:
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
    """A fresh folder 0700 whose sockets' paths are short enough, with its owner's name inside.

    Raises ConfigError.
    """
    for parent in _temp_dirs():
        if (
            len(os.fsencode(parent / (_prefix(root) + "x" * 8))) + len(_LONGEST_SOCKET)
            <= MAX_SOCKET_PATH
        ):
            path = Path(tempfile.mkdtemp(prefix=_prefix(root), dir=parent))
            owner = {"pid": os.getpid(), "start_ticks": start_ticks(os.getpid())}
            (path / "owner.json").write_text(json.dumps(owner))
            return path
    raise ConfigError(
        f"temporary folder {tempfile.gettempdir()}",
        "a path under 70 bytes for sockets",
        "set TMPDIR to a short path",
    )


def sweep(root: Path) -> list[Path]:
    """Remove socket folders that dead services left for this root.

    The folder of a live process is never touched.
    """
    removed = []
    for parent in _temp_dirs():
        for path in parent.glob(_prefix(root) + "*"):
            info = path.lstat()
            if path == box_dir(root):
                continue
            if (
                stat.S_ISDIR(info.st_mode)
                and info.st_uid == os.geteuid()
                and not _owner_lives(path)
            ):
                shutil.rmtree(path, ignore_errors=True)
                removed.append(path)
    return removed


def _owner_lives(path: Path) -> bool:
    with contextlib.suppress(OSError, ValueError, KeyError):
        owner = json.loads((path / "owner.json").read_text())
        return bool(start_ticks(int(owner["pid"])) == owner["start_ticks"])
    return False
