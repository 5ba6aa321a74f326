"""Serves any `Backend` over HTTP in vLLM's token subset.

So `VllmBackend`, and whoever else speaks to vLLM, can use it.

    POST /v1/completions {prompt: [ids], max_tokens, temperature, top_p, top_k, seed,
                          stop_token_ids, request_id, stream}
    GET /health /version /v1/models /metrics      POST /tokenize /detokenize

Invariants: a client that goes away cancels its generation; a request that asks for what is not
served (text prompts, n > 1) is refused, never half served. `weight_versions` states where the
weights changed, which vLLM's completions do not; so does each event of a stream, for its own
tokens. `stream_interval` is the tokens that an event collects. Not promised: TLS (bind to
loopback), or any parameter that is not named here.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import version as distribution_version
from typing import TYPE_CHECKING, Self

import numpy as np
import orjson
from aiohttp import web

from prorl.backends.server_reply import Shape, stream
from prorl.errors import BackendError, ConfigError
from prorl.types import FailureCode, GenerateRequest, Json, PolicyVersion, SamplingParams

if TYPE_CHECKING:
    from types import TracebackType

    from aiohttp.typedefs import Handler

    from prorl.protocols import Backend, Tokenizer
    from prorl.types import Int32


def read_request(
    body: Mapping[str, Json], model: str, vocab_size: int, session: str
) -> GenerateRequest:
    """The request that a body asks for. Raises ValueError with what is wrong."""
    if body.get("model") not in (None, "", model):
        raise ValueError(f"the model {body['model']!r} is not served; {model!r} is")
    if body.get("n", 1) != 1 or body.get("echo"):
        raise ValueError("echo and n > 1 are not served")
    for name, off in _OFF.items():
        if body.get(name, off) != off:
            raise ValueError(f"{name}: {off:g} is expected, others are not served")
    sampling = SamplingParams(
        temperature=_number(body, "temperature", 1.0, 0.0, 1e6),
        top_p=_number(body, "top_p", 1.0, 0.0, 1.0),
        top_k=max(0, int(_number(body, "top_k", 0, -1, 1 << 31))),
        max_tokens=int(_number(body, "max_tokens", 16, 1, 1 << 24)),
    )
    stops = body.get("stop_token_ids") or []
    return GenerateRequest(
        prompt_ids_L=read_ids(body.get("prompt"), "prompt", vocab_size),
        sampling=sampling,
        seed=_integer(body, "seed"),
        stop_token_ids=tuple(read_ids(stops, "stop_token_ids", vocab_size).tolist())
        if stops
        else (),
        request_id=str(body.get("request_id") or time.monotonic_ns()),
        session=session,
        part_tokens=int(_number(body, "stream_interval", 1, 1, 1 << 16)),
    )


_OFF = {
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


def read_ids(values: Json, name: str, vocab_size: int) -> Int32:
    """A list of ids below `vocab_size`, not empty. Raises ValueError that names it."""
    array = np.asarray(values if isinstance(values, list) else None)
    if array.ndim != 1 or array.dtype.kind != "i" or not len(array):
        raise ValueError(f"{name}: a list of token ids is expected")
    if array.min() < 0 or array.max() >= vocab_size:
        raise ValueError(
            f"{name}: ids from 0 to {vocab_size - 1} are expected, found {array.min()} to"
            f" {array.max()}"
        )
    ids: np.ndarray[tuple[int], np.dtype[np.int32]] = array.astype(np.int32)
    return ids


def _number(body: Mapping[str, Json], name: str, default: float, low: float, high: float) -> float:
    value = body.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name}: a number from {low:g} to {high:g} is expected, found {value!r}")
    return value


def _integer(body: Mapping[str, Json], name: str) -> int:
    value = body.get(name)
    if value is None:
        return time.time_ns() >> 1
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: an integer >= 0 is expected, found {value!r}")
    return value


MAX_BODY_BYTES = 32 << 20


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
        self._shape = Shape(model=model, tokenizer=tokenizer, label=label)
        self._backend, self._tokenizer, self._model = backend, tokenizer, model
        self._host, self._port, self._max_model_len = host, port, max_model_len
        self._running = self._prompt_tokens = self._generated_tokens = self._cached_tokens = 0
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
                web.get("/metrics", self._metrics),
                web.post("/tokenize", self._tokenize),
                web.post("/detokenize", self._detokenize),
                *routes,
            ]
        )
        return app

    @web.middleware
    async def _authorize(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if request.path != "/health" and not hmac.compare_digest(
            given.encode(), self._api_key.encode()
        ):
            return _error(401, "a bearer token is expected")
        return await handler(request)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        try:
            wanted = self._wanted(body, request.headers.get("x-session-id", ""))
        except ValueError as cause:
            return _error(400, str(cause))
        self._running += 1
        try:
            if body.get("stream"):
                response, completion = await stream(request, self._shape, self._backend, wanted)
            else:
                completion = await self._backend.generate(wanted)
                response = _json(self._shape.whole(wanted, completion))
        except BackendError as error:
            return _error(503 if error.code is FailureCode.BACKEND_UNAVAILABLE else 500, str(error))
        finally:
            self._running -= 1
        self._prompt_tokens += len(wanted.prompt_ids_L)
        self._generated_tokens += len(completion.token_ids_C)
        self._cached_tokens += completion.cached_tokens
        return response

    def _wanted(self, body: Mapping[str, Json], session: str) -> GenerateRequest:
        """As `read_request`; raises ValueError also for a prompt that fills the context."""
        wanted = read_request(body, self._model, self._tokenizer.vocab_size, session)
        length = len(wanted.prompt_ids_L)
        if length >= self._max_model_len:
            raise ValueError(
                f"the prompt has {length} tokens; the context is {self._max_model_len}"
            )
        return wanted

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

    async def _metrics(self, request: web.Request) -> web.Response:
        values = {
            "num_requests_running": self._running,
            "num_requests_waiting": 0,
            "prompt_tokens_total": self._prompt_tokens,
            "generation_tokens_total": self._generated_tokens,
            "prompt_tokens_cached_total": self._cached_tokens,
        }
        lines = [
            f'vllm:{name}{{model_name="{self._model}"}} {value}\n' for name, value in values.items()
        ]
        return web.Response(text="".join(lines), content_type="text/plain")

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await _body(request)
        prompt = body.get("prompt")
        if not isinstance(prompt, str):
            return _error(400, "prompt: a text is expected")
        ids = self._tokenizer.encode(prompt)
        return _json({"count": len(ids), "max_model_len": self._max_model_len, "tokens": ids})

    async def _detokenize(self, request: web.Request) -> web.Response:
        try:
            return _json(
                {
                    "prompt": self._tokenizer.decode(
                        read_ids(
                            (await _body(request)).get("tokens"),
                            "tokens",
                            self._tokenizer.vocab_size,
                        )
                    )
                }
            )
        except ValueError as cause:
            return _error(400, str(cause))


async def _body(request: web.Request) -> Mapping[str, Json]:
    try:
        value = orjson.loads(await request.read())
    except orjson.JSONDecodeError as cause:
        raise web.HTTPBadRequest(text=f"not valid JSON: {cause}") from cause
    if not isinstance(value, dict):
        raise web.HTTPBadRequest(text="a JSON object is expected")
    return value


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
