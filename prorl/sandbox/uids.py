"""Uids of their own for sandboxes, where we are root: otherwise one agent's `kill -9 -1` would hit its neighbours.

Each sandboxd claims a block of uids by binding an abstract socket, which the kernel frees with the process. The range is one that
no distribution, systemd or subuid allocation uses (systemd's UIDS-GIDS list: 1879048192 to 2147483647 is unused).
"""

from __future__ import annotations

import os
import socket
from collections import deque

from prorl.errors import UnavailableError

FIRST_UID = 1879048192
BLOCK = 4096
BLOCKS = 256


class Uids:
    """A claimed block; on machines where we are not root, every uid is -1 (our own)."""

    def __init__(self) -> None:
        self._lock: socket.socket | None = None
        self._free: deque[int] = deque()
        if os.getuid() == 0:
            self._claim()

    def _claim(self) -> None:
        for block in range(BLOCKS):
            lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                lock.bind(f"\0prorl-uids-{block}")
            except OSError:
                lock.close()
                continue
            self._lock = lock
            first = FIRST_UID + block * BLOCK
            in_use = _living_uids()
            self._free.extend(uid for uid in range(first, first + BLOCK) if uid not in in_use)
            return
        raise UnavailableError(f"all {BLOCKS} blocks of sandbox uids are in use on this machine")

    def take(self) -> int:
        """The uid that was free for longest, or -1 without root."""
        if self._lock is None:
            return -1
        return self._free.popleft()

    def give(self, uid: int) -> None:
        """Give one back after its last process has ended."""
        if uid >= 0:
            self._free.append(uid)

    def close(self) -> None:
        """Free the block; idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _living_uids() -> set[int]:
    """Uids that some process has now: left by a daemon that died together with all its guards."""
    uids = set()
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                uids.add(os.stat(f"/proc/{name}").st_uid)
            except OSError:
                continue
    return uids
