"""Uids of their own for sandboxes, where we are root.

Otherwise one agent's `kill -9 -1` would hit its neighbours.

Each sandboxd claims a block of uids by binding an abstract socket and locking a file, both of which
the kernel frees with the process. Uids are the machine's: an abstract name belongs to one network
namespace and a file to those who share /tmp, so that either alone would give two daemons one block.
Whoever has a block may end every process in it that is not his own; nobody else may. The range is
one that no distribution, systemd or subuid allocation uses (systemd's UIDS-GIDS list:
1879048192 to 2147483647 is unused).
"""

from __future__ import annotations

import os
import signal
import socket
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prorl.errors import UnavailableError
from prorl.linux import locks, procfs
from prorl.sandbox.node.paths import base_folder, own_folder

FIRST_UID = 1879048192
BLOCK = 4096
BLOCKS = 256


class Uids:
    """A claimed block; on machines where we are not root, every uid is -1 (our own)."""

    def __init__(self) -> None:
        self._lock: ExitStack | None = None
        self._block = -1
        self._free: deque[int] = deque()
        if os.getuid() == 0:
            self._claim()

    def _claim(self) -> None:
        for block in range(BLOCKS):
            lock = _try_lock(block)
            if lock is None:
                continue
            self._lock, self._block = lock, block
            first = FIRST_UID + block * BLOCK
            # What a daemon left that died together with all its guards: end it, and leave its uid
            # alone until it is gone.
            in_use = {uid for uid in living_uids().values() if first <= uid < first + BLOCK}
            for uid in in_use:
                kill_uid(uid)
            self._free.extend(uid for uid in range(first, first + BLOCK) if uid not in in_use)
            return
        raise UnavailableError(f"all {BLOCKS} blocks of sandbox uids are in use on this machine")

    @property
    def block(self) -> range:
        """Every uid that it may give; none without root."""
        first = FIRST_UID + self._block * BLOCK
        return range(first, first + BLOCK) if self._lock is not None else range(0)

    def take(self) -> int:
        """The uid that was free for longest, or -1 without root. Raises UnavailableError."""
        if self._lock is None:
            return -1
        if not self._free:
            raise UnavailableError(f"all {BLOCK} uids of this sandboxd are in use")
        return self._free.popleft()

    def give(self, uid: int) -> None:
        """Put a uid at the end of the queue, once its last process has ended; -1 is ignored."""
        if uid >= 0:
            self._free.append(uid)

    @contextmanager
    def holding_dead_block(self, uid: int) -> Iterator[bool]:
        """Yields whether all that a uid has is a dead daemon's, and keeps it so for this block of
        code.

        False when a living daemon, or we, have the block by now: whoever claimed it ended what was
        there.
        """
        block = (uid - FIRST_UID) // BLOCK
        lock = _try_lock(block) if uid >= 0 and block != self._block else None
        try:
            yield lock is not None
        finally:
            if lock is not None:
                lock.close()

    def close(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None


def _try_lock(block: int) -> ExitStack | None:
    """A block, until it is closed, unless somebody has it who shares our network or our /tmp."""
    with ExitStack() as stack:
        name = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            name.bind(f"\0prorl-uids-{block}")
            # Raises BlockingIOError when somebody has it. The file stays: nobody can remove it
            # safely.
            folder = base_folder().with_name(f"{base_folder().name}-uids")
            own_folder(folder)
            stack.callback(os.close, locks.take(folder / str(block)))
        except OSError:
            return None
        return stack.pop_all()


def kill_uid(uid: int) -> bool:
    """SIGKILL to whatever has this uid now; whether there was anything."""
    pids = [pid for pid, owner in living_uids().items() if owner == uid]
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return bool(pids)


def living_uids() -> dict[int, int]:
    uids = {}
    for pid in procfs.pids():
        try:
            uids[pid] = os.stat(f"/proc/{pid}").st_uid
        except OSError:
            continue
    return uids
