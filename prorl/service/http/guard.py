"""The border of the HTTP side: who is let in, and how much. Bearer tokens, body limits, request
ids. Plain ASGI, so that a request which is refused costs nothing. Callers on this host have no
role; those of other hosts come over TLS with a certificate that names one (`prorl.net.access`).
"""

from __future__ import annotations

import uuid
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from prorl.errors import ProrlError, UnauthorizedError
from prorl.net.access import OPEN, check_http, named_run
from prorl.net.bearer import Keys, TokenGrant
from prorl.net.tls import Caller
from prorl.service.http.answers import BodyTooLarge, refusal

MAX_BODY_BYTES = 8 << 20
MAX_GROUPS_BYTES = 64 << 20


class GuardMiddleware:
    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self._app, self._keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope["prorl.request_id"] = request_id = uuid.uuid4().hex[:12]
        headers = dict(scope["headers"])
        try:
            named = [value for name, value in scope["headers"] if name == b"authorization"]
            if len(named) > 1:
                raise UnauthorizedError("two bearer tokens", "one header `Authorization`")
            self._check(scope, *named or [b""])
            limit = MAX_GROUPS_BYTES if scope["path"].endswith("/groups") else MAX_BODY_BYTES
            length = headers.get(b"content-length", b"0")
            if not length.isdigit() or int(length) > limit:
                raise _too_large(f"a body of {length.decode('latin-1')[:20]} bytes", limit)
            body = _Body(receive, send, limit)
            with suppress(ClientDisconnect):
                await self._app(scope, body.receive, body.send)
            if body.over:
                raise _too_large("a body without end", limit)
        except ProrlError as error:
            await refusal(error, request_id)(scope, receive, send)

    def _check(self, scope: Scope, header: bytes) -> None:
        """Both the certificate, where there is one, and the token must allow it."""
        method, path = scope["method"], scope["path"]
        state = scope.setdefault("state", {})
        caller: Caller | None = state.get("caller")
        check_http(caller.role if caller is not None else None, method, path)
        if path == OPEN:
            return
        grant: TokenGrant = self._keys.check(header)
        check_http(grant.role or None, method, path)
        # Who may make a run names it in the body: the route checks that one.
        if (method, path) != ("POST", "/v1/runs"):
            grant.check_run(named_run(method, path))
        state["grant"] = grant


def _too_large(content: str, limit: int) -> BodyTooLarge:
    return BodyTooLarge(content, f"at most {limit} bytes", "send it in several requests")


class _Body:
    """Counts what comes, whatever the header said. Once it is too much, what the app makes of that
    is not sent.
    """

    def __init__(self, receive: Receive, send: Send, limit: int) -> None:
        self._receive, self._send, self._remaining = receive, send, limit
        self.over = False

    async def receive(self) -> Message:
        message: Message = await self._receive()
        self._remaining -= len(message.get("body", b""))
        self.over = self._remaining < 0
        return {"type": "http.disconnect"} if self.over else message

    async def send(self, message: Message) -> None:
        if not self.over:
            await self._send(message)
