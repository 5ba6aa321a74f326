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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np
import orjson

from prorl.backends.catalogue import address
from prorl.backends.labels import Labels
from prorl.backends.probe import check_logprobs
from prorl.backends.vllm_http import MAX_REPLY_BYTES, HttpLimits, ServerConnections
from prorl.backends.vllm_reply import MAX_EVENT_BYTES, EventParser, VllmReply
from prorl.completion import check_completion
from prorl.errors import BackendError, boundary
from prorl.types import BackendFault, Completion, FailureCode, GenerateRequest, Json
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.backends.catalogue import BackendContext

LABEL_S = wait_limit_s("server.label")
CUT_LABEL_S = wait_limit_s("server.label_cut")
PART_S = 0.2
"""A stream's tokens are handed on this often."""
_STREAMED: Mapping[str, Json] = {
    "stream": True,
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
}


def open_vllm(url: str, context: BackendContext) -> VllmBackend:
    return VllmBackend(
        url, context.renderer.vocab_size, model=context.model, api_key=context.api_key
    )


class VllmBackend:
    """Implements `prorl.protocols.ProbedBackend`.

    The connection pool opens with the first call and belongs to that call's event loop. A server
    that speaks another protocol by the same rules is a subclass (`sglang.py`): its paths, `_body`,
    and `_object`, which puts what it sends into vLLM's shape.
    """

    path, label_path, health_path = "/v1/completions", "/weight_info", "/health"

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
        self._names: frozenset[str] = frozenset()
        """The names that the model may have in replies; empty = not asked yet."""
        self.max_model_len = 0
        self.served: Mapping[str, Json] = {}
        """The facts that it states of its model besides the name, once it was asked."""
        self._limits = limits or HttpLimits()
        self._connections = ServerConnections(address(url), api_key, self._limits)
        self._labels = Labels(self._label)

    async def generate(self, request: GenerateRequest) -> Completion:
        """Raises BackendError; MAX_TOKENS when the prompt leaves the context no room."""
        model = self._model or await self.discover()
        if self.max_model_len and len(request.prompt_ids_L) >= self.max_model_len:
            raise BackendError(
                FailureCode.MAX_TOKENS,
                f"{len(request.prompt_ids_L)} tokens fill a context of {self.max_model_len}",
            )
        room = self.max_model_len - len(request.prompt_ids_L)
        if self.max_model_len and request.sampling.max_tokens > room:  # vLLM would refuse it
            request = replace(request, sampling=replace(request.sampling, max_tokens=room))
        before = await self._labels.before()
        wire_id = quote(request.request_id, safe="/")
        body = orjson.dumps(self._body(request, model, wire_id), option=orjson.OPT_SERIALIZE_NUMPY)
        reply = VllmReply(
            request,
            self.name,
            id=f"cmpl-{wire_id}",
            models=self._names,
            is_fitted=self.max_model_len > 0,
        )
        began = time.monotonic()
        # The header, too: where it is missing a proxy may make one up, which vLLM heeds more.
        headers = {"x-session-id": quote(request.session, safe=""), "x-request-id": wire_id}
        try:
            await self._receive(request, body, headers, reply)
        except (BackendError, asyncio.CancelledError) as error:
            is_lie = isinstance(error, BackendError) and error.trouble is BackendFault.MALFORMED
            if request.on_part is not None and reply.num_tokens and not is_lie:
                request.on_part(reply.part(await self._label_of_cut(reply, before)))
            raise
        label = before if reply.states_labels else await self._labels.proved(before)
        with self._malformed():
            completion = reply.completion(label, time.monotonic() - began)
        return check_completion(completion, self.vocab_size, request.sampling.max_tokens)

    async def _receive(
        self, request: GenerateRequest, body: bytes, headers: Mapping[str, str], reply: VllmReply
    ) -> None:
        """Fill `reply`, and tell what comes. Raises BackendError."""
        num_sent, sent_at = 0, 0.0
        events = EventParser(MAX_REPLY_BYTES if request.routing_from >= 0 else MAX_EVENT_BYTES)
        async with self._connections.stream("POST", self.path, body, headers) as (kind, parts):
            if kind != "text/event-stream":
                whole = b"".join([part async for part in parts])
                with self._malformed():
                    reply.take(self._object(orjson.loads(whole), request, reply.num_tokens))
                return
            async for part in parts:
                with self._malformed():
                    for value in events.feed(part):
                        reply.take(self._object(value, request, reply.num_tokens))
                now = time.monotonic()
                if request.on_part and reply.num_tokens > num_sent and now - sent_at >= PART_S:
                    num_sent, sent_at = reply.num_tokens, now
                    with self._malformed():
                        request.on_part(reply.part())
        if not events.is_done:
            raise BackendError(
                FailureCode.BACKEND_UNAVAILABLE,
                f"{self.name} ended a stream in the middle",
                BackendFault.REFUSED,
            )

    async def _label_of_cut(self, reply: VllmReply, before: str | None) -> str | None:
        """The label of the tokens of a call that was cut short; "" where none is sure in time."""
        if reply.states_labels:
            return before
        try:
            async with asyncio.timeout(CUT_LABEL_S):
                return await self._labels.proved(before)
        except TimeoutError:
            return ""

    @contextmanager
    def _malformed(self) -> Iterator[None]:
        problem = f"{self.name} sent a malformed reply"
        try:
            with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, problem):
                yield
        except BackendError as error:
            raise BackendError(error.code, error.message, BackendFault.MALFORMED) from error

    async def probe(self) -> None:
        """Probes the server as `check_logprobs` does."""
        await self.discover()
        await check_logprobs(self, self.vocab_size)

    def weights_changed(self) -> None:
        """The server serves others from here on: what it last said of them is over."""
        self._labels.expire()

    async def health(self) -> None:
        """Raises BackendError unless the server says that it is well."""
        await self._connections.exchange("GET", self.health_path)

    async def close(self) -> None:
        await self._connections.close()

    async def discover(self) -> str:
        """The model's name; its context length is known afterwards. Raises BackendError."""
        cards = await self._cards()
        name = self._model or next(iter(cards), "")
        if name not in cards:
            raise BackendError(
                FailureCode.BACKEND_PROTOCOL, f"{self.name} serves {list(cards)}, not {name!r}"
            )
        self.served = {key: cards[name].get(key) for key in ("root", "max_model_len")}
        root = cards[name].get("root")
        self._names = frozenset(
            other
            for other, card in cards.items()
            if other == name or (root is not None and card.get("root") == root)
        )
        with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.name}/v1/models"):
            self.max_model_len = max(0, int(cards[name].get("max_model_len") or 0))
        self._model = name
        return name

    async def models(self) -> list[str]:
        """Names of the models that it serves. Raises BackendError."""
        return list(await self._cards())

    async def _cards(self) -> dict[str, Mapping[str, Json]]:
        reply = await self._connections.exchange("GET", "/v1/models")
        with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.name}/v1/models"):
            return {str(card["id"]): card for card in orjson.loads(reply)["data"]}

    async def tokenize(self, text: str) -> list[int] | None:
        """The ids that the server gives a text; None when it does not say. Raises BackendError."""
        body = orjson.dumps({"model": self._model, "prompt": text, "add_special_tokens": False})
        try:
            reply = await self._connections.exchange("POST", "/tokenize", body)
        except BackendError as error:
            if error.trouble in (BackendFault.MALFORMED, BackendFault.DECLINED):
                return None
            raise
        with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.name}/tokenize"):
            return [int(token_id) for token_id in orjson.loads(reply)["tokens"]]

    async def names_weights(self) -> bool:
        """Returns whether it states a label of its weights: an older vLLM, or one outside of its
        developer mode, does not, and takes none. Raises BackendError.
        """
        return await self._label() is not None

    async def _label(self) -> str | None:
        try:
            reply = await self._connections.exchange("GET", self.label_path, limit_s=LABEL_S)
        except BackendError as error:
            if error.trouble in (BackendFault.MALFORMED, BackendFault.DECLINED):
                return None  # vLLM outside of its developer mode
            raise
        try:
            return str(orjson.loads(reply)["weight_version"])
        except (ValueError, TypeError, KeyError):
            return None

    def _object(self, value: Json, request: GenerateRequest, num_tokens: int) -> Json:
        """Returns the reply in vLLM's shape. May raise as `VllmReply` does."""
        return value

    def _body(self, request: GenerateRequest, model: str, wire_id: str) -> dict[str, Json]:
        sampling = request.sampling
        body: dict[str, Json] = {
            "model": model,
            "prompt": np.ascontiguousarray(request.prompt_ids_L),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            # Also what is off: what a request leaves out vLLM takes from the model's
            # generation_config.json (Qwen's: top_k 20, repetition_penalty 1.05).
            "top_k": sampling.top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": request.seed,
            "logprobs": 0,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,  # each id twice: a reply that mixes them up says so
            "skip_special_tokens": False,
            "stop_token_ids": request.stop_token_ids,
            "request_id": wire_id,
        }
        if sampling.priority:
            body["priority"] = sampling.priority
        if request.routing_from >= 0:
            # Its streams have no routing: whoever wants some waits for the whole.
            body["routed_experts_prompt_start"] = request.routing_from
        elif interval := self._limits.stream_interval:
            body |= {**_STREAMED, "stream_interval": interval}
        return body
