"""`Door`: one attempt's model server. Whoever holds one of its connections is that attempt.

    door = Door(context, Sampler(context))
    server = await loop.create_server(door.protocol, sock=await sandbox.listen())
    ... run the program until it ends or `door.ended` is done ...
    await door.close()                         # then the record says what trains

| request | answer |
|---|---|
| POST .../chat/completions, .../responses, .../messages | the policy's next message |
| POST .../messages/count_tokens | length of the prompt |
| GET .../models, HEAD | what is there |

A reply is sampled whole, then written: as JSON or as the dialect's events. Until it is there the
client is kept waiting by comments or blanks, which begin after a grace, so that an early failure is
still a status. What cannot be expressed here is a 400 that says so, a rollout that has ended a 503.
A client that goes away costs nothing: its reply is kept for whoever asks the same again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

import orjson
from aiohttp import web

from prorl import exact_json
from prorl.capture import chat, messages, responses
from prorl.capture.canonical import Asked, RefusedError, Reply, read_object
from prorl.capture.ledger import Call, Ledger
from prorl.errors import RolloutError
from prorl.types import Json

if TYPE_CHECKING:
    from prorl.agents.context import AttemptContext
    from prorl.agents.sampler import Sampler

MAX_BYTES = 16 << 20
"""Largest request."""
KEEP_ALIVE_S = 10.0
"""Grace before an answer begins without its reply, and time between two signs of life then."""
_JSON = "application/json"


class Dialect(Protocol):
    """A module that reads and writes one API."""

    KEEP_ALIVE: bytes

    def parse(self, body: dict[str, Json]) -> Asked:
        """What a request asks. Raises RefusedError."""

    def answer(self, asked: Asked, reply: Reply) -> Json:
        """The whole answer."""

    def events(self, asked: Asked, reply: Reply) -> Iterator[bytes]:
        """The same as a stream."""

    def error(self, kind: str, message: str) -> Json:
        """Body of an answer that is none."""

    def failed(self, kind: str, message: str) -> bytes:
        """Event that ends a stream which had begun."""


DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {"/chat/completions": chat, "/responses": responses, "/messages": messages}
)


class Door:
    """The model server of one attempt. Belongs to the event loop that made it.

    `key`: of clients that could be others; where only the attempt's can connect, none is needed.
    """

    def __init__(self, context: AttemptContext, sampler: Sampler, *, key: str = "") -> None:
        self._ledger, self._key = Ledger(context, sampler), key
        self._server = web.Server(self.handle, access_log=None)
        self.asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with the first request."""

    @property
    def ended(self) -> asyncio.Future[RolloutError]:
        """Why the attempt can say nothing more, once it cannot: a budget, a lost backend."""
        return self._ledger.ended

    @property
    def counts(self) -> Mapping[str, int]:
        return self._ledger.counts

    def protocol(self) -> asyncio.Protocol:
        """A connection's, for `create_server`, `create_unix_connection` and their like."""
        return self._server()

    async def close(self) -> None:
        """End every connection and every model call; what was sampled is in the record."""
        await self._server.shutdown(0.1)  # 0 would wait for idle connections for ever
        await self._ledger.close()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.asked.done():
            self.asked.set_result(None)
        if self._key not in ("", sent_key(request)):
            return failure(chat, 401, "authentication_error", "no key of this rollout")
        path = request.path.rstrip("/")
        counts = path.endswith("/messages/count_tokens")
        path = path.removesuffix("/count_tokens") if counts else path
        dialect = next((d for end, d in DIALECTS.items() if path.endswith(end)), None)
        if request.method == "GET" and path.endswith("/models"):
            return web.json_response(_MODELS)
        if request.method == "HEAD":
            return web.Response()
        if dialect is None or request.method != "POST":
            text = f"{request.method} {request.path} is not served here; there are {_ROUTES}"
            return failure(chat, 404, "not_found_error", text)
        try:
            asked = dialect.parse(await read_body(request))
            if counts:
                return web.json_response({"input_tokens": self._ledger.count(asked)})
            call = self._ledger.call(asked, lambda: _is_open(request))
        except RefusedError as error:
            return failure(dialect, 400, "invalid_request_error", str(error))
        except RolloutError as error:
            return failure(dialect, 503, "api_error", f"the rollout has ended: {error}")
        try:
            return await self._answer(request, dialect, asked, call)
        except ConnectionResetError:  # it went away while we wrote: its reply is kept
            return web.Response()

    async def _answer(
        self, request: web.BaseRequest, dialect: Dialect, asked: Asked, call: Call
    ) -> web.StreamResponse:
        """The reply, as soon as it is there; until then signs of life."""
        kind = "text/event-stream" if asked.stream else _JSON
        response = web.StreamResponse(headers={"content-type": kind, "cache-control": "no-cache"})
        while not (await asyncio.wait({call.task}, timeout=KEEP_ALIVE_S))[0]:
            if not _is_open(request):
                return response
            if not response.prepared:
                await response.prepare(request)
            await response.write(dialect.KEEP_ALIVE if asked.stream else b" ")
        if call.task.cancelled() or (error := call.task.exception()) is not None:
            text = f"the rollout has ended: {'closed' if call.task.cancelled() else error}"
            if not response.prepared:
                return failure(dialect, 503, "api_error", text)
            body = orjson.dumps(dialect.error("api_error", text))
            await response.write(dialect.failed("api_error", text) if asked.stream else body)
            return response
        reply = call.task.result()
        if not response.prepared:
            await response.prepare(request)
        if asked.stream:
            await response.write(b"".join(dialect.events(asked, reply)))
        else:
            await response.write(exact_json.dumps(dialect.answer(asked, reply)))
        await response.write_eof()
        call.delivered |= _is_open(request)
        return response


_MODELS = {
    "object": "list",
    "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "prorl"}],
}
_ROUTES = ", ".join(f"/v1{path}" for path in DIALECTS)


def sent_key(request: web.BaseRequest) -> str:
    """A client's key; before /v1 of the address for those whose programs send one of their own."""
    first = request.path.split("/")[1]
    if first != "v1" and "/v1/" in request.path:
        return first
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    return request.headers.get("x-api-key", bearer)


async def read_body(request: web.BaseRequest) -> dict[str, Json]:
    """The JSON object of a request. Raises RefusedError."""
    body = bytearray()
    async for chunk in request.content.iter_any():
        body += chunk
        if len(body) > MAX_BYTES:
            raise RefusedError(f"a body of more than {MAX_BYTES >> 20} MiB", "a shorter request")
    try:
        return read_object(exact_json.loads(bytes(body)), "the body")
    except orjson.JSONDecodeError as cause:
        raise RefusedError(f"the body is no JSON: {cause}", "a JSON object") from None


def _is_open(request: web.BaseRequest) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def failure(dialect: Dialect, status: int, kind: str, text: str) -> web.Response:
    body = orjson.dumps(dialect.error(kind, text))
    return web.Response(status=status, body=body, content_type=_JSON)
