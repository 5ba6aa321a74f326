"""`ModelEndpoint`: one attempt's model server. Whoever holds one of its connections is that
attempt.

    endpoint = ModelEndpoint(context, Sampler(context))
    async with endpoint.listening(await sandbox.listen()):
        ... run the program until it ends or `endpoint.ended` is done ...
    await endpoint.close()                         # then the record says what trains

| request | answer |
|---|---|
| POST .../chat/completions, .../responses, .../messages | the policy's next message |
| POST ...:generateContent, ...:streamGenerateContent | the same |
| POST .../messages/count_tokens, ...:countTokens | length of the prompt |
| GET .../models, HEAD | what is there |

A reply is sampled whole, then written: as JSON or as the dialect's events. Until it is there the
client is kept waiting by comments or blanks, which begin after a grace, so that an early failure is
still a status. What cannot be expressed here is a 400 that says so, a rollout that has ended a 503.
A client that goes away costs nothing: its reply is kept for whoever asks the same again.

Who asks is not trusted: it may run what the policy wrote. So one attempt has bounds for connections
(`connections.py`), bytes (`MAX_BYTES`, `ModelEndpoint._incoming`), time (`READ_S`, `WRITE_S`) and
its share of the loop (`share.py`). What is large is read and rendered in helpers, and what its
requests cost is charged to the attempt, which ends where it ends a worker twice.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import orjson
from aiohttp import web

from prorl import exact_json
from prorl.agents.capture import chat
from prorl.agents.capture.canonical import ConversationRequest, RefusedError, load_json, read_object
from prorl.agents.capture.connections import Connections
from prorl.agents.capture.conversation_tree import Call, ConversationTree
from prorl.agents.capture.reading import COUNTS, DIALECTS, Dialect, Incoming, read
from prorl.agents.capture.share import Account, share
from prorl.errors import RolloutError, UserError
from prorl.linux import crashes
from prorl.tokenizer import max_token_bytes
from prorl.types import Json
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.agents.context import AttemptContext
    from prorl.agents.sampler import Sampler

MAX_BYTES = 16 << 20
"""The bytes of the largest request that is read, whatever the run's limits are."""
UNSHOWN_BYTES = 256 << 10
"""Bytes that a request may have besides what its prompt shows: schemas, ids, thoughts, options.
Coding agents send 100 KB.
"""
ESCAPED = 2
"""JSON may need so many bytes for a byte of text: a line end takes two, a letter of three bytes
six.
"""
READ_S = wait_limit_s("endpoint.read")
WRITE_S = wait_limit_s("endpoint.write")
KEEP_ALIVE_S = wait_limit_s("endpoint.keep_alive")
_JSON = "application/json"


class ModelEndpoint:
    """The model server of one attempt. Belongs to the event loop that made it.

    `key`: what a client must send where programs of others can connect; empty where they cannot.
    """

    def __init__(self, context: AttemptContext, sampler: Sampler, *, key: str = "") -> None:
        self._tree, self._key = ConversationTree(context, sampler), key
        self._account, self._same_work = Account(), crashes.current()
        self._connections = Connections(self._handle, self._account)
        room = max_token_bytes(context.renderer) * context.limits.max_tokens
        self._most_bytes = min(MAX_BYTES, ESCAPED * room + UNSHOWN_BYTES)
        self._bytes = 0
        """The bytes of bodies that are being read and placed: at most twice `_most_bytes`."""
        self.first_call: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done with the first request."""
        self.refusal = ""
        """The answer to the last request that was refused: status and reason."""

    @property
    def ended(self) -> asyncio.Future[RolloutError]:
        """Returns a future of the reason why the attempt can sample nothing more: a budget, a lost
        backend.
        """
        return self._tree.ended

    @property
    def has_calls(self) -> bool:
        """Returns whether a request has become a model call, replied to or not."""
        return self._tree.has_calls

    @property
    def counts(self) -> Mapping[str, int]:
        return self._tree.counts

    @asynccontextmanager
    async def listening(self, listener: socket.socket) -> AsyncIterator[None]:
        """Serve who connects there until the block ends."""
        accepting = asyncio.create_task(self._connections.accept(listener))
        try:
            yield
        finally:
            accepting.cancel()
            await asyncio.wait({accepting})

    async def close(self) -> None:
        """End every connection and every model call; what was sampled is in the record."""
        await self._connections.shutdown(0.1)  # 0 would wait for idle connections for ever
        await self._tree.close()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self._connections.begins(request.protocol)
        try:
            return await self.handle(request)
        finally:
            self._connections.ends(request.protocol)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer a request, as a part of the attempt's work: it is charged with what that costs."""
        await share().admit(self._account)
        work = self._account.timed(self._handled(request))
        return await asyncio.create_task(self._same_work(work))

    async def _handled(self, request: web.BaseRequest) -> web.StreamResponse:
        if not self.first_call.done():
            self.first_call.set_result(None)
        if self._key not in ("", sent_key(request)):
            return self._refuse(chat, 401, "authentication_error", "no key of this rollout")
        path = request.path.rstrip("/")
        count = next((count for end, count in COUNTS.items() if path.endswith(end)), None)
        end = count[0] if count else next((end for end in DIALECTS if path.endswith(end)), None)
        if request.method == "GET" and path.endswith("/models"):
            return web.json_response(_MODELS)
        if request.method == "HEAD":
            return web.Response()
        if end is None or request.method != "POST":
            text = f"{request.method} {request.path:.100} is not served here; there are {_ROUTES}"
            return self._refuse(chat, 404, "not_found_error", text)
        dialect = DIALECTS[end]
        try:
            async with self._incoming(request, end) as (conversation, digests):
                if count:
                    return web.json_response({count[1]: await self._tree.count(conversation)})
                call = await self._tree.call(conversation, digests, lambda: _is_open(request))
        except RefusedError as error:
            return self._refuse(dialect, 400, "invalid_request_error", str(error))
        except BusyError as error:
            return self._refuse(dialect, 429, "rate_limit_error", str(error))
        except RolloutError as error:
            return failure(dialect, 503, "api_error", f"the rollout has ended: {error}")
        conversation = replace(
            conversation, messages=(), tools=()
        )  # not as long as its reply takes
        try:
            return await self._answer(request, dialect, conversation, call)
        except (ConnectionError, TimeoutError):  # it went away while we wrote: its reply is kept
            if request.transport is not None:
                request.transport.abort()
            return web.Response()

    def _refuse(self, dialect: Dialect, status: int, kind: str, text: str) -> web.Response:
        self.refusal = f"{status}: {text}"
        return failure(dialect, status, kind, text)

    @asynccontextmanager
    async def _incoming(self, request: web.BaseRequest, end: str) -> AsyncIterator[Incoming]:
        """Yields a parsed request, whose bytes count until the block ends.

        Raises RefusedError, BusyError.
        """
        num_bytes = 0

        def count_bytes(size: int) -> None:
            nonlocal num_bytes
            num_bytes += size
            self._bytes += size
            if self._bytes > 2 * self._most_bytes:
                text = f"requests of more than {2 * self._most_bytes:,} bytes at once"
                raise BusyError(text, "fewer or shorter ones")

        try:
            body = await body_of(request, self._most_bytes, count_bytes)
            yield await read(end, body, self._account.spent_s())
        finally:
            self._bytes -= num_bytes

    async def _answer(
        self,
        request: web.BaseRequest,
        dialect: Dialect,
        conversation: ConversationRequest,
        call: Call,
    ) -> web.StreamResponse:
        """Sends the reply as soon as it is there; until then keep-alives."""
        kind = "text/event-stream" if conversation.stream else _JSON
        response = web.StreamResponse(headers={"content-type": kind, "cache-control": "no-cache"})
        while not (await asyncio.wait({call.task}, timeout=KEEP_ALIVE_S))[0]:
            if not _is_open(request):
                return response
            if not response.prepared:
                await response.prepare(request)
            async with asyncio.timeout(WRITE_S):
                await response.write(dialect.KEEP_ALIVE if conversation.stream else b" ")
        if call.task.cancelled() or (error := call.task.exception()) is not None:
            text = f"the rollout has ended: {'closed' if call.task.cancelled() else error}"
            if not response.prepared:
                return failure(dialect, 503, "api_error", text)
            body = orjson.dumps(dialect.error("api_error", text))
            await response.write(dialect.failed("api_error", text) if conversation.stream else body)
            return response
        reply = call.task.result()
        async with asyncio.timeout(WRITE_S):
            if not response.prepared:
                await response.prepare(request)
            if conversation.stream:
                await response.write(b"".join(dialect.events(conversation, reply)))
            else:
                await response.write(exact_json.dumps(dialect.answer(conversation, reply)))
            await response.write_eof()
        call.delivered |= _is_open(request)
        return response


class BusyError(UserError):
    """Too much at once for one rollout (HTTP 429)."""


_MODELS = {
    "object": "list",
    "data": [{"id": "policy", "object": "model", "created": 0, "owned_by": "prorl"}],
}
_ROUTES = ", ".join(
    f"/v1{end}" if end.startswith("/") else f"/v1beta/models/NAME{end}" for end in DIALECTS
)


def sent_key(request: web.BaseRequest) -> str:
    """A client's key; before /v1 of the address for those whose programs send one of their own."""
    first = request.path.split("/")[1]
    if first != "v1" and "/v1/" in request.path:
        return first
    bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
    return request.headers.get("x-api-key", request.headers.get("x-goog-api-key", bearer))


async def read_body(request: web.BaseRequest) -> dict[str, Json]:
    """The JSON object of a request. Raises RefusedError."""
    try:
        return read_object(load_json(await body_of(request, MAX_BYTES)), "the body")
    except ValueError as cause:
        raise RefusedError(f"the body is no JSON: {cause}", "a JSON object") from None


async def body_of(
    request: web.BaseRequest, most: int, count_bytes: Callable[[int], None] = lambda size: None
) -> bytes:
    """The bytes of a request; `count_bytes` hears the size of each piece. Raises RefusedError."""
    body = bytearray()
    try:
        async with asyncio.timeout(READ_S):
            async for chunk in request.content.iter_any():
                count_bytes(len(chunk))
                body += chunk
                if len(body) > most:
                    size = f"{most / (1 << 20):.3g} MiB"
                    raise RefusedError(f"a body of more than {size}", "a shorter request")
    except TimeoutError:
        text = f"a body that did not arrive within {READ_S:g} s"
        raise RefusedError(text, "all of it at once") from None
    return bytes(body)


def _is_open(request: web.BaseRequest) -> bool:
    return request.transport is not None and not request.transport.is_closing()


def failure(dialect: Dialect, status: int, kind: str, text: str) -> web.Response:
    body = orjson.dumps(dialect.error(kind, text))
    return web.Response(status=status, body=body, content_type=_JSON)
