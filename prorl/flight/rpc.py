"""The Flight server behind a `FlightNetwork`: its RPC threads check, route and hand to the loop."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import orjson
import pyarrow as pa
import pyarrow.flight as fl

from prorl.errors import ConfigError, NotFoundError, ProrlError, UnauthorizedError
from prorl.flight.refusals import STREAM_ERRORS, to_flight
from prorl.flight.wire import Opening, Routes, check_peer_schema, route_of
from prorl.net.access import check_flight, check_node
from prorl.net.bearer import Keys, TokenGrant
from prorl.net.tls import Caller, Credentials
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.flight.channel import ServedChannel
    from prorl.protocols import Accept

ACCEPT_S = wait_limit_s("flight.accept")


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


NOT_SERVED = {
    fl.FlightMethod.LIST_FLIGHTS: "list_flights",
    fl.FlightMethod.GET_SCHEMA: "get_schema",
    fl.FlightMethod.DO_PUT: "do_put",
    fl.FlightMethod.HANDSHAKE: "handshake",
}


class Granted(fl.ServerMiddleware):  # type: ignore[misc]
    """The grant of the token of one call."""

    def __init__(self, grant: TokenGrant) -> None:
        super().__init__()
        self.grant = grant


class Bearer(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses every call without a token that counts."""

    def __init__(self, keys: Keys) -> None:
        super().__init__()
        self._keys = keys

    def start_call(self, info: fl.CallInfo, headers: Mapping[str, list[str | bytes]]) -> Granted:
        authorizations = headers.get("authorization") or [""]
        authorization = authorizations[0] if len(authorizations) == 1 else "two bearer tokens"
        try:
            return Granted(
                self._keys.check(
                    authorization.encode() if isinstance(authorization, str) else authorization
                )
            )
        except UnauthorizedError as error:
            raise fl.FlightUnauthenticatedError(str(error)) from None


class ServedVerbs(fl.ServerMiddlewareFactory):  # type: ignore[misc]
    """Refuses the verbs that nothing here serves: pyarrow's own answers are tracebacks."""

    def start_call(self, info: fl.CallInfo, headers: object) -> None:
        if info.method in NOT_SERVED:
            verb = NOT_SERVED[info.method]
            raise to_flight(NotFoundError(f"{verb} is not served; docs/protocol.md says what is"))


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightReads:
    """Holds what a listener answers beside channels.

    The coroutines run on the loop, and are cancelled when their client goes.
    """

    get: Callable[[bytes], Awaitable[pa.Table | pa.RecordBatchReader]]
    """Ticket -> data for `do_get`. A Table should hold batches below `MAX_BATCH_BYTES`."""
    info: Callable[[bytes], Awaitable[fl.FlightInfo]] | None = None
    """Descriptor command -> `get_flight_info`."""
    actions: Mapping[str, Callable[[bytes], Awaitable[bytes]]] = field(default_factory=dict)
    """Action type -> handler, body -> one result."""
    named: Mapping[str, NamedRun] = field(default_factory=dict)
    """Action type -> the run that a body is about, where that is no JSON object with `run`: a token
    for one run is checked against it. It must be the run that the handler takes.
    """


AnswerT = TypeVar("AnswerT")


class Loop(Protocol):
    """The event loop's side of a listener, as RPC threads call it."""

    def begin_stream(self, opening: Opening, accept: Accept, node: str) -> ServedChannel:
        """Hand a stream to the loop, which accepts or refuses it."""

    def answer(
        self,
        context: fl.ServerCallContext,
        handler: Callable[[bytes], Awaitable[AnswerT]],
        argument: bytes,
    ) -> AnswerT:
        """Run a read on the loop and wait for it; raises Flight errors."""


class RpcServer(fl.FlightServerBase):  # type: ignore[misc]
    """The RPC threads' side: every method hands over to the loop and waits."""

    def __init__(
        self,
        loop: Loop,
        location: str,
        routes: Routes,
        reads: FlightReads | None,
        keys: Keys,
        credentials: Credentials | None,
    ) -> None:
        self._secure = location.startswith("grpc+tls://")
        of_node = credentials is not None and credentials.role == "node"
        self._by_token = not (self._secure and of_node)
        """The service shows nodes its certificate and no token: whatever it sent them they could
        use in its name.
        """
        super().__init__(
            location,
            middleware={
                "served": ServedVerbs(),
                **({BEARER: Bearer(keys)} if self._by_token else {}),
            },
            **(_tls(location, credentials) if self._secure else {}),
        )
        self._loop, self._routes, self._reads = loop, routes, reads

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: Any,
        writer: Any,
    ) -> None:
        with _as_flight():
            opening = Opening.decode(descriptor.command)
            caller = self._check(context, f"exchange {opening.path}")
            if caller.role == "node":
                check_node(caller.node, opening.hello)
            accept, receives, sends = route_of(self._routes, opening)
            check_peer_schema(reader.schema, receives, opening.path)
            stream = self._loop.begin_stream(opening, accept, caller.node)
            stream.wait_accepted(ACCEPT_S)
        try:
            writer.begin(sends)  # the schema, by which the dialler knows that it is accepted
        except STREAM_ERRORS:
            stream.abandon()
            raise fl.FlightCancelledError("the dialler went away") from None
        stream.serve(reader, writer)

    def get_flight_info(
        self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor
    ) -> fl.FlightInfo:
        body = bytes(descriptor.command or b"")
        with _as_flight():
            self._check(context, "info", body)
            if self._reads is None or self._reads.info is None:
                raise NotFoundError("this endpoint describes nothing")
        return self._loop.answer(context, self._reads.info, body)

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        with _as_flight():
            self._check(context, "get", bytes(ticket.ticket))
            if self._reads is None:
                raise NotFoundError("this endpoint serves no data")
        return fl.RecordBatchStream(
            self._loop.answer(context, self._reads.get, bytes(ticket.ticket))
        )

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[bytes]:
        body = action.body.to_pybytes()
        named = self._reads.named.get(action.type, named_run) if self._reads else named_run
        with _as_flight():
            self._check(context, f"action {action.type}", body, named)
            handler = self._reads.actions.get(action.type) if self._reads is not None else None
            if handler is None:
                raise NotFoundError(f"no action {action.type}")
        return [self._loop.answer(context, handler, body)]

    def list_actions(self, context: fl.ServerCallContext) -> list[tuple[str, str]]:
        with _as_flight():
            self._check(context, "list_actions", None)
        return [(name, "") for name in (self._reads.actions if self._reads is not None else {})]

    def _check(
        self,
        context: fl.ServerCallContext,
        action: str,
        body: bytes | None = b"",
        named: NamedRun = named_run,
    ) -> Caller:
        """Returns who calls; raises ForbiddenError unless certificate and token both allow this.

        `body` names the run; None: what is asked is about none.
        """
        caller = Caller("")
        if self._secure:
            caller = Caller.of(context.peer_identity().decode(errors="replace"))
            check_flight(caller.role, action)
        if self._by_token:
            grant = context.get_middleware(BEARER).grant
            check_flight(grant.role or None, action)
            if grant.runs and body is not None:
                grant.check_run(named(body))
            if not self._secure:
                caller = Caller(grant.role)
        return caller


@contextmanager
def _as_flight() -> Iterator[None]:
    """Sends a refusal over the wire as its own class, without a traceback."""
    try:
        yield
    except ProrlError as error:
        raise to_flight(error) from None


def _tls(location: str, credentials: Credentials | None) -> dict[str, Any]:
    if credentials is None:
        raise ConfigError(f"{location} without a certificate", "credentials of the service")
    return {
        "tls_certificates": [(credentials.certificate, credentials.key)],
        "verify_client": True,
        "root_certificates": credentials.authority,
    }
