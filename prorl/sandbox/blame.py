"""Assigns the blame for a sandbox, or a call in it, that came to nothing: one table, cause -> code.

A cause is told apart by what nothing inside a sandbox can make: how the launcher ended and with
what exit code, what the control group counted, which signals the kind lets an agent send, whether a
process that no agent can stop stands still. What a tool server says of itself is no evidence.

What an agent can bring about is its own: it trains, and is never tried again. What it cannot is
ours: it never trains. `FAILURE_CLASS` says which code is which.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

from prorl.linux.forked import EXIT_CRASHED
from prorl.states import FailureCode

KILLED = 128
"""A launcher ends with this plus the signal that killed what it guards."""


class Cause(StrEnum):
    """The cause of a failure, in the words that a row's message begins with."""

    STOPPED = "the sandbox was stopped"
    UNKNOWN = "the sandbox is not known here"
    NODE_LOST = "sandboxd is gone"
    LAUNCHER_KILLED = "its launcher was killed"
    SERVER_KILLED = "the tool server was killed from outside"
    SERVER_FROZEN = "the tool server was stopped from outside"
    SERVER_CRASHED = "the tool server crashed"
    KILLED_ITSELF = "the tool server was killed by what runs inside"
    OUT_OF_MEMORY = "the sandbox ran out of its memory"
    OVER_LIMIT = "the sandbox used more than it may"
    HUNG_UP = "the tool server hung up"
    SILENT = "the tool server did not answer in time"
    BROKE_PROTOCOL = "the tool server broke its protocol"


CODES: Mapping[Cause, FailureCode] = {
    Cause.STOPPED: FailureCode.SANDBOX_LOST,
    Cause.UNKNOWN: FailureCode.SANDBOX_LOST,
    Cause.NODE_LOST: FailureCode.SANDBOX_LOST,
    Cause.LAUNCHER_KILLED: FailureCode.SANDBOX_LOST,
    Cause.SERVER_KILLED: FailureCode.SANDBOX_LOST,
    Cause.SERVER_FROZEN: FailureCode.SANDBOX_LOST,
    Cause.SERVER_CRASHED: FailureCode.TOOL_PROTOCOL,
    Cause.KILLED_ITSELF: FailureCode.SANDBOX_BROKEN,
    Cause.OUT_OF_MEMORY: FailureCode.SANDBOX_BROKEN,
    Cause.OVER_LIMIT: FailureCode.SANDBOX_BROKEN,
    Cause.HUNG_UP: FailureCode.SANDBOX_BROKEN,
    Cause.SILENT: FailureCode.SANDBOX_BROKEN,
    Cause.BROKE_PROTOCOL: FailureCode.SANDBOX_BROKEN,
}


class Fate(NamedTuple):
    """The reason why a sandbox does not answer, and what a row says of it."""

    code: FailureCode
    message: str


def fate_of(cause: Cause, detail: str = "") -> Fate:
    """The verdict on a cause.

    >>> fate_of(Cause.OVER_LIMIT, "128 MB").code.value
    'sandbox_broken'
    """
    return Fate(CODES[cause], f"{cause.value}: {detail}" if detail else cause.value)


def fate_of_exit(
    status: int,
    *,
    has_launcher: bool,
    server_exposed: bool,
    launcher_exposed: bool,
    out_of_memory: bool,
) -> Fate:
    """The verdict on a sandbox that ended by itself, from its launcher's wait status.

    Without a launcher the status is that of the tool server, pid 1. `..._exposed`: what runs inside
    can signal it. `out_of_memory`: the control group reached its limit, and something in it was
    killed for that; the launcher is in no such group. Without a launcher, a kill from outside
    after the agent has run out of memory cannot be told from the kernel's, and is the agent's.
    """
    if os.WIFSIGNALED(status) and has_launcher:
        cause = Cause.KILLED_ITSELF if launcher_exposed else Cause.LAUNCHER_KILLED
        return fate_of(cause, f"signal {os.WTERMSIG(status)}")
    ended = os.waitstatus_to_exitcode(status)
    code = ended if ended >= 0 else KILLED - ended
    if out_of_memory:
        return fate_of(Cause.OUT_OF_MEMORY)
    if code <= KILLED:
        # it ends only by a signal; whatever else it ended with is a bug
        return fate_of(Cause.SERVER_CRASHED, "" if code == EXIT_CRASHED else f"exit code {code}")
    cause = Cause.KILLED_ITSELF if server_exposed else Cause.SERVER_KILLED
    return fate_of(cause, f"signal {code - KILLED}")
