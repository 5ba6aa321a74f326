"""Room on a file system."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

FULL_BYTES: Final = 1 << 20
"""A file system with less room than this is full: nobody is to blame for failing there."""


def disk_full(path: Path) -> str:
    """What is wrong with the room where a path lies; empty when there is some."""
    found = os.statvfs(path)
    if found.f_bavail * found.f_frsize >= FULL_BYTES:
        return ""
    return f"the disk of {path} is full: waiting for room"
