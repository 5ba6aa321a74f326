"""The bearer token on every Flight call: checked before the call, its grant kept beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import orjson
import pyarrow.flight as fl

from prorl.access import check_flight
from prorl.errors import UnauthorizedError
from prorl.tokens import Keys, TokenGrant

BEARER = "bearer"
"""Name of the middleware that knows a call's token."""


NamedRun = Callable[[bytes], str]
"""A body -> the run that it is about; empty if it names none."""


def named_run(body: bytes) -> str:
    """The run in a ticket, descriptor or action body: a JSON object with `run`."""
    try:
        values = orjson.loads(body or b"{}")
    except orjson.JSONDecodeError:
        return ""
    named = values.get("run", "") if isinstance(values, dict) else ""
    return named if isinstance(named, str) else ""


class Caller(fl.ServerMiddleware):  # type: ignore[misc]
    """What the token of one call allows."""

    def __init__(self, grant: TokenGrant) -> None:
        super().__init__()
        self.grant = grant


class Bearer(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without a token that counts."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys = keys

    def start_call(self, info: fl.CallInfo, headers: Mapping[str, list[str | bytes]]) -> Caller:
        given = (headers.get("authorization") or [""])[0]
        try:
            return Caller(self._keys.check(given.encode() if isinstance(given, str) else given))
        except UnauthorizedError as error:
            raise fl.FlightUnauthenticatedError(str(error)) from None


def check_grant(
    context: fl.ServerCallContext, what: str, body: bytes, named: NamedRun = named_run
) -> None:
    """Raise ForbiddenError unless the caller's token allows this; `body` names the run, as `named`
    reads it.
    """
    grant = context.get_middleware(BEARER).grant
    check_flight(grant.role or None, what)
    if grant.run:
        grant.check_run(named(body))
