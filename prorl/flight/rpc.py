"""The Flight server behind a `FlightNetwork`: its RPC threads check, route and hand to the loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.flight as fl

from prorl.access import check_flight
from prorl.errors import (
    ConfigError,
    NotFoundError,
    ProrlError,
)
from prorl.flight.bearer import BEARER, Bearer, NamedRun, check_grant, named_run
from prorl.flight.channel import CLOSE_S, ServedChannel
from prorl.flight.refusals import STREAM_ERRORS, to_flight
from prorl.flight.wire import Opening, check_hello, check_peer_schema
from prorl.protocols import Accept
from prorl.tls import Credentials, role_of
from prorl.tokens import Keys

if TYPE_CHECKING:
    from prorl.flight.server import FlightNetwork

ACCEPT_S = 10.0
"""How long a handler may take to accept or refuse a stream."""


Routes = Mapping[str, tuple[Accept, pa.Schema, pa.Schema]]


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightReads:
    """What a listener answers beside channels.

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


class RpcServer(fl.FlightServerBase):  # type: ignore[misc]
    """The RPC threads' side: every method hands over to the loop and waits."""

    def __init__(
        self,
        network: FlightNetwork,
        location: str,
        routes: Routes,
        reads: FlightReads | None,
        keys: Keys,
        credentials: Credentials | None,
    ) -> None:
        super().__init__(
            location,
            middleware={BEARER: Bearer(keys)},
            **(_tls(location, credentials) if location.startswith("grpc+tls://") else {}),
        )
        self._secure = location.startswith("grpc+tls://")
        self._network, self._routes, self._reads = network, routes, reads

    def do_exchange(
        self,
        context: fl.ServerCallContext,
        descriptor: fl.FlightDescriptor,
        reader: Any,
        writer: Any,
    ) -> None:
        try:
            opening = Opening.decode(descriptor.command)
            self._check(context, f"exchange {opening.path}")
            accept, receives, sends = self._route(opening)
            check_peer_schema(reader.schema, receives, opening.path)
            stream = self._network.begin_stream(opening, accept)
            stream.wait_accepted(ACCEPT_S)
        except ProrlError as error:
            raise to_flight(error) from None
        _begin(writer, sends, stream)
        stream.serve(reader, writer)

    def _check(
        self,
        context: fl.ServerCallContext,
        what: str,
        body: bytes = b"",
        named: NamedRun = named_run,
    ) -> None:
        """Raise ForbiddenError unless the caller's certificate and token allow this.

        `body` names the run.
        """
        if self._secure:
            check_flight(role_of(context.peer_identity().decode(errors="replace")), what)
        check_grant(context, what, body, named)

    def _route(self, opening: Opening) -> tuple[Accept, pa.Schema, pa.Schema]:
        check_hello(
            opening.hello, f"{opening.hello.get('worker', 'the dialler')} of {opening.path}"
        )
        if opening.path not in self._routes:
            raise NotFoundError(
                f"no route {opening.path}; served: {', '.join(sorted(self._routes))}"
            )
        return self._routes[opening.path]

    def _check_read(
        self, context: fl.ServerCallContext, what: str, body: bytes, named: NamedRun = named_run
    ) -> None:
        try:
            self._check(context, what, body, named)
        except ProrlError as error:
            raise to_flight(error) from None

    def get_flight_info(
        self, context: fl.ServerCallContext, descriptor: fl.FlightDescriptor
    ) -> fl.FlightInfo:
        body = bytes(descriptor.command or b"")
        self._check_read(context, "info", body)
        if self._reads is None or self._reads.info is None:
            raise to_flight(NotFoundError("this endpoint describes nothing"))
        return self._network.answer(context, self._reads.info, body)

    def do_get(self, context: fl.ServerCallContext, ticket: fl.Ticket) -> fl.RecordBatchStream:
        self._check_read(context, "get", bytes(ticket.ticket))
        if self._reads is None:
            raise to_flight(NotFoundError("this endpoint serves no data"))
        return fl.RecordBatchStream(
            self._network.answer(context, self._reads.get, bytes(ticket.ticket))
        )

    def do_action(self, context: fl.ServerCallContext, action: fl.Action) -> list[bytes]:
        body = action.body.to_pybytes()
        named = self._reads.named.get(action.type, named_run) if self._reads else named_run
        self._check_read(context, f"action {action.type}", body, named)
        handler = self._reads.actions.get(action.type) if self._reads is not None else None
        if handler is None:
            raise to_flight(NotFoundError(f"no action {action.type}"))
        return [self._network.answer(context, handler, body)]

    def list_actions(self, context: fl.ServerCallContext) -> list[tuple[str, str]]:
        return [(name, "") for name in (self._reads.actions if self._reads is not None else {})]


def _tls(location: str, credentials: Credentials | None) -> dict[str, Any]:
    if credentials is None:
        raise ConfigError(f"{location} without a certificate", "credentials of the service")
    return {
        "tls_certificates": [(credentials.certificate, credentials.key)],
        "verify_client": True,
        "root_certificates": credentials.authority,
    }


async def shut_down(server: RpcServer) -> None:
    """`shutdown` waits for open streams without limit, so it gets a thread and a deadline."""
    stopping = threading.Thread(target=server.shutdown, name="flight-shutdown", daemon=True)
    stopping.start()
    await asyncio.to_thread(stopping.join, CLOSE_S)


def _begin(writer: Any, sends: pa.Schema, stream: ServedChannel) -> None:
    """Send the schema, by which the dialler knows that it is accepted. Raises FlightError."""
    try:
        writer.begin(sends)
    except STREAM_ERRORS:
        stream.abandon()
        raise fl.FlightCancelledError("the dialler went away") from None
