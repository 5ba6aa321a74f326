"""vLLM over HTTP, token ids in and out.

`POST /v1/completions` with `return_token_ids` and `logprobs: 0`, streamed.

Invariants: a completion is returned only when every part of the reply makes sense
(`prorl.completion`), else BackendError says `backend_protocol`; trouble with the connection is
`backend_unavailable`; cancelling `generate` closes its connection, upon which vLLM aborts the
request; tokens that came before a stream broke were told to `on_part`. A token has the version that
its reply states (our own server), else the label that `/weight_info` gave before and after the
call, else none (`prorl/backends/labels.py`). Bounded: requests in flight, bytes of a reply.
Protocol as measured with vLLM 0.20 - 0.32.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import orjson

from prorl.backends.labels import Labels
from prorl.backends.logprobs import check_logprobs
from prorl.backends.vllm_http import Connections, HttpLimits
from prorl.backends.vllm_reply import Events, Reply
from prorl.completion import check_completion
from prorl.errors import BackendError, boundary
from prorl.types import Completion, FailureCode, GenerateRequest, Json, Trouble

if TYPE_CHECKING:
    from prorl.backends.catalogue import BackendContext

LABEL_S = 10.0
"""For one answer about weights."""
PART_S = 0.2
"""A stream's tokens are handed on this often."""
_STREAMED: Mapping[str, Json] = {"stream": True, "stream_options": {"include_usage": True}}


def open_vllm(url: str, context: BackendContext) -> VllmBackend:
    """A model server by its address. Raises nothing: it is not asked yet."""
    return VllmBackend(
        url, context.renderer.vocab_size, model=context.model, api_key=context.api_key
    )


class VllmBackend:
    """Implements `prorl.protocols.ProbedBackend`.

    The connection pool opens with the first call and belongs to that call's event loop.
    """

    def __init__(
        self,
        url: str,
        vocab_size: int,
        *,
        model: str = "",
        api_key: str = "",
        limits: HttpLimits | None = None,
    ) -> None:
        self.name = url.rstrip("/")
        self.vocab_size, self._model = vocab_size, model
        self.max_model_len = 0
        self._limits = limits or HttpLimits()
        self._connections = Connections(self.name, api_key, self._limits)
        self._labels = Labels(self._label)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises BackendError; MAX_TOKENS when the prompt leaves the model's context no room.
        """
        model = self._model or await self.discover()
        if self.max_model_len and len(request.prompt_ids_L) >= self.max_model_len:
            raise BackendError(
                FailureCode.MAX_TOKENS,
                f"{len(request.prompt_ids_L)} tokens fill a context of {self.max_model_len}",
            )
        request = self._fitted(request)
        before = await self._labels.before()
        body = orjson.dumps(self._body(request, model), option=orjson.OPT_SERIALIZE_NUMPY)
        reply, began = Reply(request, self.name), time.monotonic()
        await self._receive(request, body, reply)
        label = before if reply.states_labels else await self._labels.proved(before)
        with self._malformed():
            completion = reply.completion(label, time.monotonic() - began)
        return check_completion(completion, self.vocab_size, request.sampling.max_tokens)

    def _fitted(self, request: GenerateRequest) -> GenerateRequest:
        """Asking for no more tokens than the context has room for: vLLM refuses that."""
        room = self.max_model_len - len(request.prompt_ids_L)
        if not self.max_model_len or request.sampling.max_tokens <= room:
            return request
        return replace(request, sampling=replace(request.sampling, max_tokens=room))

    async def _receive(self, request: GenerateRequest, body: bytes, reply: Reply) -> None:
        """Fill `reply`; what a broken stream brought is told before it raises BackendError."""
        headers = {"x-session-id": quote(request.session, safe="")}
        tell, told_at = request.on_part or _nobody, 0.0
        try:
            async with self._connections.stream("POST", "/v1/completions", body, headers) as (
                kind,
                parts,
            ):
                if kind != "text/event-stream":
                    with self._malformed():
                        reply.take(orjson.loads(b"".join([part async for part in parts])))
                    return
                async for value in self._events(parts):
                    with self._malformed():
                        reply.take(value)
                    if reply.has_news and time.monotonic() - told_at >= PART_S:
                        told_at = time.monotonic()
                        tell(self._part(reply))
        except (BackendError, asyncio.CancelledError):
            if reply.has_news:
                tell(self._part(reply))
            raise

    async def _events(self, parts: AsyncIterator[bytes]) -> AsyncIterator[Json]:
        events = Events()
        async for part in parts:
            with self._malformed():
                values = list(events.feed(part))
            for value in values:
                yield value
        if not events.is_done:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"{self.name} ended a stream in the middle",
                Trouble.REFUSED,
            )

    def _part(self, reply: Reply) -> Completion:
        with self._malformed():
            return reply.part()

    def _malformed(self) -> AbstractContextManager[None]:
        return boundary(
            BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.name} sent a malformed reply"
        )

    async def probe(self) -> None:
        """Refuse a server whose logprobs are not those of the distribution it samples from.

        Raises ConfigError, or BackendError when the server cannot be asked.
        """
        await self.discover()
        await check_logprobs(self, self.vocab_size)

    def weights_changed(self) -> None:
        """The server serves others from here on: what it last said of them is over."""
        self._labels.expire()

    async def health(self) -> None:
        """Return when the server says that it is well. Raises BackendError."""
        await self._connections.exchange("GET", "/health")

    async def close(self) -> None:
        """Close every connection; idempotent."""
        await self._connections.close()

    async def discover(self) -> str:
        """The model's name; its context length is known afterwards. Raises BackendError."""
        models = await self.models()
        name = self._model or next(iter(models), "")
        if name not in models:
            raise BackendError(
                FailureCode.BACKEND_PROTOCOL, f"{self.name} serves {list(models)}, not {name!r}"
            )
        self._model, self.max_model_len = name, models[name]
        return name

    async def models(self) -> dict[str, int]:
        """Context length of each model that it serves; 0 = not said. Raises BackendError."""
        reply = await self._connections.exchange("GET", "/v1/models")
        with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.name}/v1/models"):
            return {
                str(model["id"]): int(model.get("max_model_len") or 0)
                for model in orjson.loads(reply)["data"]
            }

    async def tokenize(self, text: str) -> list[int] | None:
        """The ids that the server gives a text; None when it does not say. Raises BackendError."""
        body = orjson.dumps({"model": self._model, "prompt": text, "add_special_tokens": False})
        try:
            reply = await self._connections.exchange("POST", "/tokenize", body)
        except BackendError as error:
            if error.trouble in (Trouble.MALFORMED, Trouble.DECLINED):
                return None
            raise
        with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.name}/tokenize"):
            return [int(one) for one in orjson.loads(reply)["tokens"]]

    async def _label(self) -> str | None:
        try:
            reply = await self._connections.exchange("GET", "/weight_info", limit_s=LABEL_S)
        except BackendError as error:
            if error.trouble in (Trouble.MALFORMED, Trouble.DECLINED):
                return None  # vLLM outside of its developer mode
            raise
        try:
            return str(orjson.loads(reply)["weight_version"])
        except (ValueError, TypeError, KeyError):
            return None

    def _body(self, request: GenerateRequest, model: str) -> dict[str, Json]:
        sampling = request.sampling
        body: dict[str, Json] = {
            "model": model,
            "prompt": np.ascontiguousarray(request.prompt_ids_L),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": request.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "skip_special_tokens": False,
            "stop_token_ids": request.stop_token_ids,
            "request_id": request.request_id,
        }
        if interval := self._limits.stream_interval:
            body |= {**_STREAMED, "stream_interval": interval}
        return body | {"top_k": sampling.top_k} if sampling.top_k else body


def _nobody(part: Completion) -> None:
    """Take pieces of a completion that nobody wants."""
