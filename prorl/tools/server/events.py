"""Waiting: one `poll` over descriptors, children and the client that asked, up to a deadline.

The server is often pid 1 of its sandbox, so it reaps every child, its own and orphans alike.
Statuses of watched children are kept until taken. Nothing else in the server may call `waitpid`.
"""

from __future__ import annotations

import os
import select
import time

from prorl.tools.server.light import TYPE_CHECKING, signal

if TYPE_CHECKING:
    from collections.abc import Callable

HANGUP = select.POLLHUP | select.POLLERR | select.POLLNVAL
LONGEST_POLL_MS = 1e6
"""poll(2) takes 31 bits; who waits looks at the clock again."""
PEER_HANGUP = HANGUP | getattr(select, "POLLRDHUP", 0x2000)


def _always() -> bool:
    return True


class ClientDisconnected(Exception):
    """The client that asked for the running call has hung up: nobody wants the result."""


class Events:
    """One per process; the handlers live until the process ends."""

    def __init__(self) -> None:
        self._wake_read, self._wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._status: dict[int, int | None] = {}
        self._stopped: dict[int, bool] = {}
        self.client = -1
        """Connection whose hang-up ends the running call; -1 for none."""
        self.wants_end: Callable[[], bool] = _always
        """Returns whether a client that hung up wanted its call to end with it."""

    def watch(self, pid: int) -> None:
        """Keep this child's exit status.

        Call before it can have been reaped, that is, straight after the fork.
        """
        self._status[pid] = None

    def status(self, pid: int) -> int | None:
        """Exit code of a watched child (128 + signal when killed), or None while it lives."""
        return self._status.get(pid, 0)

    def forget(self, pid: int) -> None:
        self._status.pop(pid, None)
        self._stopped.pop(pid, None)

    def take_stopped(self, pid: int) -> bool:
        """Returns whether the child was stopped (SIGSTOP) since the last call."""
        return self._stopped.pop(pid, False)

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid not in self._status:
                continue
            if os.WIFSTOPPED(status):
                self._stopped[pid] = True
            else:
                self._status[pid] = (
                    128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
                )

    def wait(self, fds: list[int], until: float | None, peers: bool = False) -> list[int]:
        """Readable ones of `fds`; none at the time `until` (monotonic), or when a child changed.

        Raises ClientGone when the client of the running call hangs up and wants its end, unless
        `peers` says that `fds` are the clients.
        """
        poller = select.poll()
        for fd in fds:
            poller.register(fd, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        watch_client = self.client >= 0 and not peers
        if watch_client:
            poller.register(self.client, PEER_HANGUP & ~HANGUP)
        timeout_ms = None
        if until is not None:
            timeout_ms = min(max(0.0, (until - time.monotonic()) * 1000.0), LONGEST_POLL_MS)
        ready = dict(poller.poll(timeout_ms))
        if ready.pop(self._wake_read, 0):
            self._drain()
            self.reap()
        if watch_client and ready.pop(self.client, 0):
            if self.wants_end():
                raise ClientDisconnected
            self.client = -1  # it died: the call goes on for whoever comes after it
        return [fd for fd in fds if fd in ready]

    def _drain(self) -> None:
        try:
            while os.read(self._wake_read, 4096):
                pass
        except BlockingIOError:
            pass
