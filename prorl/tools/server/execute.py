"""exec: run one program without a shell.

Its stdin is fed, its output capped, and its whole session ended at the deadline.
"""

from __future__ import annotations

import os
import time

from prorl.tools.server.children import EXIT_TIMEOUT, signal_group, spawn
from prorl.tools.server.events import Events
from prorl.tools.server.light import TYPE_CHECKING, signal
from prorl.tools.server.output import Capped, result_of

if TYPE_CHECKING:
    from typing import Any

    from prorl.tools.server.place import Place

LINGER_S = 0.2
"""The seconds for which output is awaited after the program has ended while something it left
behind holds the pipe.
"""
KILL_S = 1.0
"""For a killed session to be reaped: a process in the kernel ends after it."""


def execute(place: Place, argv: list[str], stdin: bytes, until: float) -> dict[str, Any]:
    """Run a program with these bytes as stdin; what came out.

    Exit code 124 at the deadline, 126/127 when it cannot be run, 128 + n when signal n ended it.
    """
    output = Capped()
    source = _stdin_of(stdin)
    read, write = os.pipe2(os.O_CLOEXEC)
    try:
        actions = [
            (os.POSIX_SPAWN_DUP2, old, new) for old, new in ((source, 0), (write, 1), (write, 2))
        ]
        pid = place.room(lambda: spawn(argv, actions, place.env, place.cwd))
    except OSError as error:
        os.close(read)
        output.feed((f"{argv[0]}: {error.strerror}\n").encode("utf-8", "replace"))
        return result_of(output, 127 if isinstance(error, FileNotFoundError) else 126)
    finally:
        os.close(write)
        os.close(source)
    place.events.watch(pid)
    try:
        exit_code = _wait(place.events, pid, read, output, until)
    finally:
        # Also when all went well: what the program left in its own session goes with it.
        signal_group(pid, signal.SIGKILL)
        _reap(place.events, pid)
        os.close(read)
    return result_of(output, exit_code if exit_code >= 0 else EXIT_TIMEOUT, exit_code < 0)


def _stdin_of(data: bytes) -> int:
    if not data:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    fd = os.memfd_create("stdin", os.MFD_CLOEXEC)
    os.write(fd, data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _wait(events: Events, pid: int, read: int, output: Capped, until: float) -> int:
    ended_at = None
    while True:
        status = events.status(pid)
        if status is not None and ended_at is None:
            ended_at = time.monotonic()
        limit = until if ended_at is None else min(until, ended_at + LINGER_S)
        if time.monotonic() >= limit:
            return -1 if status is None else status
        if events.wait([read], limit):
            data = os.read(read, 1 << 16)
            output.feed(data)
            if not data:
                return _exit_code(events, pid, until)


def _exit_code(events: Events, pid: int, until: float) -> int:
    """After the end of its output: wait for the program itself."""
    while True:
        status = events.status(pid)
        if status is not None:
            return status
        if time.monotonic() >= until:
            return -1
        events.wait([], until)


def _reap(events: Events, pid: int) -> None:
    client, events.client = events.client, -1
    until = time.monotonic() + KILL_S
    while events.status(pid) is None and time.monotonic() < until:
        events.wait([], until)
    events.forget(pid)
    events.client = client
