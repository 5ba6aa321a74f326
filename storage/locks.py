"""One process of this host at a time, by `flock` of a run's folder.

Where a run is not on a local disk nothing is locked: there conditional puts decide who comes first.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from prorl.storage.layout import RunDir


@contextmanager
def locked(run: RunDir, folder: str, *, wait: bool) -> Iterator[None]:
    """Nobody else who asks for the same folder of the run meanwhile.

    Raises BlockingIOError when somebody has it and we shall not `wait`.
    """
    if not run.local:
        yield
        return
    handle = os.open(run.path(folder), os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)
