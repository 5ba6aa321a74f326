"""What RUN and the gateway say to each other about model servers.

The gateway assigns; RUN, which makes the calls, is the first to know that one fails.
"""

from __future__ import annotations

from prorl.control.payload import Count, Kind, Payload, Request, Version
from prorl.types import AttemptKey, Trouble


class Assigned(Payload, frozen=True, kw_only=True):
    """The backend that serves the attempt from here on; the same one when there is no other."""

    kind = Kind.REPLY
    backend: str


class Failover(Request[Assigned], frozen=True, kw_only=True):
    """(run): a model call of this attempt went wrong; which backend goes on with it?

    Answered when there is one, which may take as long as a rollout may wait. Code `fenced`: the
    attempt is superseded or has ended.
    """

    kind, reply = Kind.FAILOVER, Assigned
    attempt: AttemptKey
    backend: str
    """That went wrong; asked again, what stands is answered."""
    trouble: Trouble
    message: str = ""
    faults: Count = 1
    """Calls that went wrong alike, of this worker's last `calls` to that backend."""
    calls: Count = 1
    min_version: Version = 0
    """No backend with older weights may go on."""


class BackendsTold(Payload, frozen=True, kw_only=True):
    """To RUN, on its hello and whenever it changes: what it must know of model servers."""

    kind = Kind.BACKENDS
    gone: tuple[str, ...] = ()
    """Dead or silent: calls that wait for them are given up."""
    keyed: tuple[str, ...] = ()
    """May be sent the key: the operator named them."""
