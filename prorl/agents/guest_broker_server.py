"""The HTTP of a `GuestBroker`, for guests from elsewhere, on a listener of RUN's own
(docs/guests.md).

What comes after a lease's end gets 410, an outcome that is said again 200, another one 409. Model
calls count as heartbeats; all paths but a lease's own are the attempt's model endpoint
(`prorl.agents.capture.model_endpoint`).
"""

from __future__ import annotations

import asyncio
import hmac
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import lru_cache, partial
from typing import TYPE_CHECKING

from aiohttp import web

from prorl.agents.capture import chat
from prorl.agents.capture.model_endpoint import failure, read_body, sent_key
from prorl.errors import ConfigError, ForbiddenError, UnauthorizedError, UserError
from prorl.net.access import check_guest_lease
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.agents.guest_broker import GuestBroker, GuestLease
    from prorl.net.bearer import Keys
    from prorl.net.tls import AnyCredentials, Credentials

MAX_WAIT_S, MAX_SLOTS = wait_limit_s("guest.ask"), 64
_ENDS = {409: "it has ended otherwise", 410: "this lease has ended"}


@asynccontextmanager
async def serving(guest_broker: GuestBroker) -> AsyncIterator[None]:
    """Let guests in until the block ends; over TLS with credentials. Raises ConfigError where the
    port is taken.
    """
    assert guest_broker.at is not None, "a broker without a port has no server"
    host, port, _ = guest_broker.at
    server = web.Server(partial(_handle, guest_broker, guest_broker.keys), access_log=None)
    context = _tls_context(guest_broker.credentials) if guest_broker.credentials else None
    try:
        loop = asyncio.get_running_loop()
        listening = await loop.create_server(server, host, port, ssl=context)
    except OSError as error:
        raise ConfigError(f"guests at {host}:{port}: {error}", "a free port") from None
    try:
        yield
    finally:
        listening.close()
        await server.shutdown(0.1)


async def _handle(
    guest_broker: GuestBroker, keys: Keys, request: web.BaseRequest
) -> web.StreamResponse:
    sent = sent_key(request)
    path = request.path.strip("/").split("/")
    try:
        if path[:2] == ["v1", "guests"] and path[3:] == ["lease"]:
            return await _lend(guest_broker, keys, request, path[2])
        lease_id, _, _ = sent.partition(".")
        if not hmac.compare_digest(sent.encode(), guest_broker.key(lease_id).encode()):
            raise UnauthorizedError("no key of a lease", "the bearer that came with it")
        how = path[4] if path[:3] == ["v1", "guests", "leases"] and len(path) == 5 else ""
        if how and path[3] != lease_id:
            raise UnauthorizedError("the key of another lease", "the bearer that came with it")
        if how in ("done", "failed"):
            return _status_reply(guest_broker.end(lease_id, how, await read_body(request)))
        lease = guest_broker.lease_of(lease_id)
        return await _serve(lease, request, how) if lease else _status_reply(410)
    except UnauthorizedError as error:
        return failure(chat, 401, "authentication_error", str(error))
    except ForbiddenError as error:
        return failure(chat, 403, "authentication_error", str(error))
    except (UserError, ValueError, TypeError) as error:
        return failure(chat, 400, "invalid_request_error", str(error))


async def _lend(
    guest_broker: GuestBroker, keys: Keys, request: web.BaseRequest, name: str
) -> web.Response:
    grant = keys.check(request.headers.get("authorization", "").encode())
    check_guest_lease(grant.role)
    body = await read_body(request)
    slots = min(int(body.get("slots", 1)), MAX_SLOTS)
    await guest_broker.wait_for(name, min(MAX_WAIT_S, float(body.get("wait_s", 30.0))), grant)
    if request.transport is None or request.transport.is_closing():
        return web.Response()  # nobody is there to take one
    return web.json_response([lease.offer for lease in guest_broker.take(name, slots, grant)])


async def _serve(lease: GuestLease, request: web.BaseRequest, how: str) -> web.StreamResponse:
    lease.asking += 1
    try:
        return _status_reply(200) if how == "alive" else await lease.answer(request)
    finally:
        lease.asking -= 1
        lease.note_activity()


def _status_reply(status: int) -> web.Response:
    if status == 200:
        return web.json_response({})
    return failure(chat, status, "invalid_request_error", _ENDS[status])


def _tls_context(credentials: AnyCredentials) -> ssl.SSLContext:
    """Shows the service's certificate of the moment of each handshake, and asks for none."""

    @lru_cache(maxsize=1)
    def context_of(current: Credentials) -> ssl.SSLContext:
        context = current.server_context()
        context.verify_mode = ssl.CERT_NONE  # who it is says its token
        return context

    def renew(tls: ssl.SSLObject, name: str | None, _: ssl.SSLContext) -> None:
        tls.context = context_of(credentials.current)

    context = context_of(credentials.current)
    context.sni_callback = renew
    return context
