"""A guardian: a process that all orphans below it come to, and that ends them all.

For one that made itself a subreaper, has one thread, and blocks `WATCHED`.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable

from prorl.linux import calls, procfs

WATCHED = {signal.SIGTERM, signal.SIGCHLD}


def become(parent: int) -> None:
    """Make this process a guardian, which hears of its parent's death as of a SIGTERM."""
    # TERM, not KILL: when the parent dies there must still be time to end what is below
    signal.pthread_sigmask(signal.SIG_BLOCK, WATCHED)
    calls.die_with_parent(signal.SIGTERM, parent)
    calls.prctl(calls.PR_SET_CHILD_SUBREAPER, 1)


def watch(pid: int) -> int | None:
    """Reap until this child has ended: its wait status; None on SIGTERM."""
    while True:
        status = _reap(pid)
        if status is not None:
            return status
        if signal.sigwait(WATCHED) == signal.SIGTERM:
            return None


def _reap(pid: int) -> int | None:
    """Reap whatever has ended; the status of `pid` if that is among it."""
    exit_status = None
    while True:
        try:
            done, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return exit_status
        if done == 0:
            return exit_status
        if done == pid:
            exit_status = status


def kill_descendants() -> None:
    """SIGKILL to everything below; one of them may have forked meanwhile."""
    for pid in procfs.descendants(os.getpid()):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def end_all(kill: Callable[[], None] = kill_descendants) -> None:
    """Kill until no child is left; all orphans are our children."""
    while True:
        kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                # all at once: the dead of a fork storm would make each round longer than the one
                # before
                pass
        except ChildProcessError:
            return
        signal.sigtimedwait({signal.SIGCHLD}, 0.02)
