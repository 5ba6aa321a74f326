"""The border of the HTTP side: who is let in, how much, and errors as JSON.

Bearer tokens, body limits, request ids, and `{code, message, request_id}`, never a traceback.

Plain ASGI, so that a request which is refused costs nothing. Callers on this host have no role;
those of other hosts come over TLS with a certificate that names one (`prorl.access`).
"""

from __future__ import annotations

import logging
import uuid
from contextlib import suppress
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prorl.access import OPEN, check_http, named_run
from prorl.errors import (
    ConflictError,
    FencedError,
    ForbiddenError,
    NotFoundError,
    ProrlError,
    QueueFullError,
    StorageError,
    UnauthorizedError,
    UnavailableError,
    UserError,
)
from prorl.tokens import Keys, TokenGrant

MAX_BODY_BYTES = 8 << 20
MAX_GROUPS_BYTES = 64 << 20
"""Of a batch of groups."""
MAX_MESSAGE = 1000

log = logging.getLogger("prorl.service.http")

_ERRORS: tuple[tuple[type[ProrlError], int, str], ...] = (
    (UnauthorizedError, 401, "unauthorized"),
    (ForbiddenError, 403, "forbidden"),
    (NotFoundError, 404, "not_found"),
    (ConflictError, 409, "conflict"),
    (FencedError, 409, "fenced"),
    (UserError, 422, "invalid"),
    (QueueFullError, 429, "queue_full"),
    (UnavailableError, 503, "unavailable"),
    (StorageError, 507, "storage"),
)


class BodyTooLarge(UserError):
    """More bytes than the route takes (HTTP 413)."""


def status_of(error: ProrlError) -> tuple[int, str]:
    """HTTP status and code of one of our errors."""
    if isinstance(error, BodyTooLarge):
        return 413, "too_large"
    for kind, status, code in _ERRORS:
        if isinstance(error, kind):
            return status, code
    return 500, "internal"


def error_body(code: str, message: str, request_id: str) -> bytes:
    """The JSON that every error answers with."""
    text = message if len(message) <= MAX_MESSAGE else message[:MAX_MESSAGE] + " ..."
    return orjson.dumps({"code": code, "message": text, "request_id": request_id})


class GuardMiddleware:
    """ASGI middleware around the app: refuses before the app sees a request.

    What the app raises it turns into an error body.
    """

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check the request, then pass it on; turn what is raised into an answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["prorl.request_id"] = request_id = uuid.uuid4().hex[:12]
        headers = dict(scope["headers"])
        try:
            self._check(scope, headers.get(b"authorization", b""))
            limit = MAX_GROUPS_BYTES if scope["path"].endswith("/groups") else MAX_BODY_BYTES
            _check_length(headers.get(b"content-length", b"0"), limit)
            await self._pass_on(scope, _Body(receive, send, limit), limit)
        except ProrlError as error:
            status, code = status_of(error)
            await _answer(send, status, code, str(error), request_id)

    async def _pass_on(self, scope: Scope, body: _Body, limit: int) -> None:
        """Let the app answer. Raises ProrlError for a body that went on past `limit` bytes."""
        with suppress(ClientDisconnect):
            await self._app(scope, body.receive, body.send)
        if body.over:
            raise _too_large("a body without end", limit)

    def _check(self, scope: Scope, header: bytes) -> None:
        """Both the certificate, where there is one, and the token must allow it."""
        method, path = scope["method"], scope["path"]
        state = scope.setdefault("state", {})
        check_http(state.get("role"), method, path)
        if path == OPEN:
            return
        grant: TokenGrant = self._keys.check(header)
        check_http(grant.role or None, method, path)
        # Who may make a run names it in the body: the route checks that one.
        if (method, path) != ("POST", "/v1/runs"):
            grant.check_run(named_run(method, path))
        state["grant"] = grant


def _too_large(given: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(given, f"at most {limit} bytes", "send it in several requests")


def _check_length(header: bytes, limit: int) -> None:
    if not header.isdigit() or int(header) > limit:
        raise _too_large(f"a body of {header.decode('latin-1')[:20]} bytes", limit)


class _Body:
    """Counts what comes, whatever the header said.

    Once it is too much, what the app makes of that is not sent.
    """

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive, self._send, self._left = receive, send, limit
        self.over = False

    async def receive(self) -> Message:
        """Next part of the body."""
        message: Message = await self._receive()
        self._left -= len(message.get("body", b""))
        self.over = self._left < 0
        return {"type": "http.disconnect"} if self.over else message

    async def send(self, message: Message) -> None:
        """Pass an answer of the application on to the client."""
        if not self.over:
            await self._send(message)


async def _answer(send: Send, status: int, code: str, message: str, request_id: str) -> None:
    body = error_body(code, message, request_id)
    headers: list[Any] = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
