"""Serves any `Backend` over HTTP in vLLM's token subset, for `VllmBackend` and others who speak it.

    POST /v1/completions {prompt: [ids], max_tokens, temperature, top_p, top_k, seed,
                          stop_token_ids, request_id, stream}
    GET /health /version /v1/models      POST /tokenize

Invariants: a client that goes away cancels its generation, streamed or not; a request that asks for
what is not served (text prompts, n > 1) is refused, never half served; a stream's pieces laid end
to end are the one object's tokens; an error before the first piece has a status of its own.
`weight_versions` states where the weights changed, which vLLM's completions do not; so does each
event of a stream, for its own tokens. `stream_interval` is the tokens that an event collects. Not
promised: TLS (bind to loopback), or any parameter that is not named here.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING, Annotated, Literal, Self

import msgspec
import numpy as np
import orjson
from aiohttp import web
from msgspec import Meta

from prorl.errors import BackendError, ConfigError
from prorl.types import (
    Completion,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Json,
    PolicyVersion,
    SamplingParams,
)

if TYPE_CHECKING:
    from types import TracebackType

    from aiohttp.typedefs import Handler

    from prorl.protocols import Backend, Tokenizer
    from prorl.types import Int32

MAX_BODY_BYTES = 32 << 20

_Off = Annotated[float, Meta(ge=0, le=0)]


class CompletionBody(msgspec.Struct, kw_only=True):
    """The body of a request for a completion, as far as it is served."""

    prompt: list[int]
    model: str | None = None
    n: Literal[1] = 1
    temperature: Annotated[float, Meta(ge=0, le=1e6)] = 1.0
    top_p: Annotated[float, Meta(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1)] = 0
    max_tokens: Annotated[int, Meta(ge=1, le=1 << 24)] = 16
    seed: Annotated[int, Meta(ge=0)] | None = None
    stop_token_ids: list[int] = []
    request_id: str = ""
    stream: bool = False
    stream_interval: Annotated[int, Meta(ge=1, le=1 << 16)] = 1
    min_p: _Off = 0.0
    repetition_penalty: Annotated[float, Meta(ge=1, le=1)] = 1.0
    presence_penalty: _Off = 0.0
    frequency_penalty: _Off = 0.0


def _ids(values: list[int], name: str, vocab_size: int) -> Int32:
    """Ids below `vocab_size`. Raises ValueError that names them."""
    if wrong := [value for value in values if not 0 <= value < vocab_size]:
        raise ValueError(f"{name}: ids from 0 to {vocab_size - 1} are expected, found {wrong[0]}")
    return np.array(values, np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyShape:
    model: str
    tokenizer: Tokenizer
    label: Callable[[PolicyVersion], str]
    """The label that the server gives its weights."""

    def whole(self, request: GenerateRequest, completion: Completion) -> dict[str, Json]:
        return self.piece(request, completion, 0, completion.finish_reason)

    def piece(
        self, request: GenerateRequest, so_far: Completion, sent: int, finish: FinishReason | None
    ) -> dict[str, Json]:
        """Returns what came behind `sent`; `finish` in the last that has tokens."""
        choice = self._choice(rest_of(so_far, sent), finish)
        return self.last(request, so_far) | {"choices": [choice]}

    def last(self, request: GenerateRequest, completion: Completion) -> dict[str, Json]:
        prompt_tokens, sampled = len(request.prompt_ids_L), len(completion.token_ids_C)
        return {
            "id": f"cmpl-{request.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": sampled,
                "total_tokens": prompt_tokens + sampled,
                "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
            },
        }

    def _choice(self, part: Completion, finish: FinishReason | None) -> dict[str, Json]:
        ids, starts = part.token_ids_C, (0, *part.version_ends)
        return {
            "index": 0,
            "text": self.tokenizer.decode(ids[(ids >= 0) & (ids < self.tokenizer.vocab_size)]),
            "token_ids": np.ascontiguousarray(ids),
            "logprobs": {
                "token_logprobs": np.ascontiguousarray(part.logprobs_C),
                "tokens": None,
                "top_logprobs": None,
            },
            "finish_reason": finish.value if finish else None,
            "stop_reason": None,
            "weight_versions": [
                {"version": self.label(version), "start": start, "end": end}
                for version, start, end in zip(
                    part.versions, starts, part.version_ends, strict=False
                )
            ],
        }


def rest_of(completion: Completion, start: int) -> Completion:
    spans = [
        (end - start, version)
        for end, version in zip(completion.version_ends, completion.versions, strict=False)
        if end > start
    ]
    return replace(
        completion,
        token_ids_C=completion.token_ids_C[start:],
        logprobs_C=completion.logprobs_C[start:],
        version_ends=tuple(end for end, _ in spans),
        versions=tuple(version for _, version in spans),
    )


async def stream(
    http: web.Request, shape: ReplyShape, backend: Backend, request: GenerateRequest
) -> web.StreamResponse:
    """Answer with a stream. Raises BackendError as long as nothing was sent."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    parts: asyncio.Queue[Completion | None] = asyncio.Queue(request.sampling.max_tokens + 1)
    streamed = replace(request, on_part=parts.put_nowait)
    work = asyncio.ensure_future(backend.generate(streamed))
    work.add_done_callback(lambda _: parts.put_nowait(None))
    sent = 0
    try:
        while (part := await parts.get()) is not None:
            await _send(http, response, shape.piece(request, part, sent, None))
            sent = len(part.token_ids_C)
        completion = work.result()
        piece = shape.piece(request, completion, sent, completion.finish_reason)
        await _send(http, response, piece)
        await _send(http, response, shape.last(request, completion))
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    return response


async def _send(http: web.Request, response: web.StreamResponse, value: Json) -> None:
    if not response.prepared:
        await response.prepare(http)
    await response.write(
        b"data: " + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"
    )


class TokenServer:
    """One backend behind one address. `async with TokenServer(...) as server: server.url`.

    `routes` are added as they are: an engine's own, such as pause and weight updates. With an
    `api_key`, everything but /health asks for it as bearer token: a process that shares this host's
    loopback, such as a `local` sandbox, is not the service.
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer,
        *,
        model: str,
        host: str = "127.0.0.1",
        port: int = 0,
        max_model_len: int = 1 << 20,
        routes: Iterable[web.RouteDef] = (),
        api_key: str = "",
        label: Callable[[PolicyVersion], str] = str,
    ) -> None:
        self._api_key = api_key
        self._shape = ReplyShape(model=model, tokenizer=tokenizer, label=label)
        self._backend, self._tokenizer, self._model = backend, tokenizer, model
        self._host, self._port, self._max_model_len = host, port, max_model_len
        # Cancelling the handler is what turns a client's hang-up into an abort.
        self._runner = web.AppRunner(
            self._app(routes), handler_cancellation=True, access_log=None, shutdown_timeout=1.0
        )
        self.url = ""

    async def __aenter__(self) -> Self:
        """Listen. Raises ConfigError when the port is taken."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port)
        try:
            await site.start()
        except OSError as cause:
            await self._runner.cleanup()
            raise ConfigError(
                f"cannot listen on {self._host}:{self._port}: {cause.strerror}",
                "a free port",
                "0 takes any",
            ) from cause
        self.url = f"http://{self._host}:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._runner.cleanup()

    def _app(self, routes: Iterable[web.RouteDef]) -> web.Application:
        app = web.Application(
            client_max_size=MAX_BODY_BYTES, middlewares=[self._authorize] if self._api_key else []
        )
        app.add_routes(
            [
                web.post("/v1/completions", self._completions),
                web.get("/health", self._health),
                web.get("/version", self._version),
                web.get("/v1/models", self._models),
                web.post("/tokenize", self._tokenize),
                *routes,
            ]
        )
        return app

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path != "/health" and not hmac.compare_digest(
            token.encode(), self._api_key.encode()
        ):
            return _error(401, "a bearer token is expected")
        return await handler(request)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        try:
            body = msgspec.json.decode(await request.read(), type=CompletionBody)
            generation = self._generate_request(body, request.headers.get("x-session-id", ""))
        except (ValueError, msgspec.MsgspecError) as cause:
            return _error(400, str(cause))
        try:
            if body.stream:
                return await stream(request, self._shape, self._backend, generation)
            completion = await self._backend.generate(generation)
            return _json(self._shape.whole(generation, completion))
        except BackendError as error:
            return _error(503 if error.code is FailureCode.BACKEND_UNAVAILABLE else 500, str(error))

    def _generate_request(self, body: CompletionBody, session: str) -> GenerateRequest:
        """The request that a body asks for. Raises ValueError with what is wrong."""
        if body.model not in (None, "", self._model):
            raise ValueError(f"the model {body.model!r} is not served; {self._model!r} is")
        if not 0 < len(body.prompt) < self._max_model_len:
            raise ValueError(
                f"the prompt has {len(body.prompt)} tokens; the context is {self._max_model_len}"
            )
        size = self._tokenizer.vocab_size
        return GenerateRequest(
            prompt_ids_L=_ids(body.prompt, "prompt", size),
            sampling=SamplingParams(
                temperature=body.temperature,
                top_p=body.top_p,
                top_k=max(0, body.top_k),
                max_tokens=body.max_tokens,
            ),
            seed=time.time_ns() >> 1 if body.seed is None else body.seed,
            stop_token_ids=tuple(_ids(body.stop_token_ids, "stop_token_ids", size).tolist()),
            request_id=body.request_id or str(time.monotonic_ns()),
            session=session,
            part_tokens=body.stream_interval,
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return _json({"version": f"prorl-{distribution_version('prorl')}"})

    async def _models(self, request: web.Request) -> web.Response:
        model = {
            "id": self._model,
            "object": "model",
            "root": self._model,
            "max_model_len": self._max_model_len,
        }
        return _json({"object": "list", "data": [model]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        try:
            text = orjson.loads(await request.read())["prompt"]
            ids = self._tokenizer.encode(text)
        except (ValueError, KeyError, TypeError):
            return _error(400, "prompt: a text is expected")
        return _json({"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids})


def _json(value: Json) -> web.Response:
    return web.Response(
        body=orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY), content_type="application/json"
    )


def _error(status: int, message: str) -> web.Response:
    value = {
        "error": {
            "message": message,
            "type": "BadRequestError" if status < 500 else "InternalServerError",
            "code": status,
        }
    }
    return web.Response(status=status, body=orjson.dumps(value), content_type="application/json")
