"""Files that only their owner may read."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_private(path: Path, text: str) -> None:
    """Write a file with mode 0600, atomically: readers see the old text or the new one."""
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with open(fd, "w") as file:
            file.write(text)
        os.replace(name, path)
    except OSError:
        os.unlink(name)
        raise
