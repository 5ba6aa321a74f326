"""vLLM over HTTP, token ids in and out:

`POST /v1/completions` with `return_token_ids` and `logprobs: 0`.

Invariants: a completion is returned only when every part of the reply makes sense
(`prorl.completion`), else BackendError says `backend_protocol`; trouble with the connection is
`backend_unavailable`; cancelling `generate` closes its connection, upon which vLLM aborts the
request. A request is sent again, once, only when the server closed the connection before answering
a single byte. Not promised: a weight version that vLLM does not state. `weight_versions` in a reply
(our own server) is taken as it is, else the newest version known when the request was sent: a
backend that does not have it is given nothing (`prorl/service/publish.py`). Bounded: requests in
flight, bytes of a reply. Protocol as measured with vLLM 0.20 - 0.32.
"""

from __future__ import annotations

import asyncio
import statistics
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import quote

import aiohttp
import numpy as np
import orjson

from prorl.completion import check_completion
from prorl.errors import BackendError, ConfigError, boundary
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
    from prorl.backends.catalogue import BackendContext
    from prorl.types import Float32, Int32

MAX_REPLY_BYTES = 64 << 20
_READ_BYTES = 1 << 16
_HOT, _COLD = 2.0, 0.01
"""The most and the least that vLLM takes."""
_PROBES, _ROUNDS = 8, 4
_CERTAIN, _MOVED = -0.3, 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Times and counts of one connection pool."""

    max_in_flight: int = 1024
    connect_s: float = 10.0
    read_s: float = 600.0
    """Longest silence; a completion is one reply, so this is its longest generation."""
    request_s: float = 1800.0
    """Longest request in all, against servers that drip bytes."""
    keepalive_s: float = 4.0
    """Under the server's own (vLLM: 5 s), so that it rarely closes a connection that is just being
    reused.
    """


def open_vllm(url: str, context: BackendContext) -> VllmBackend:
    """A model server by its address. Raises nothing: it is not asked yet."""
    return VllmBackend(
        url, context.renderer.vocab_size, model=context.model, api_key=context.api_key
    )


class VllmBackend:
    """Implements `prorl.protocols.Backend`.

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
        self.policy_version = PolicyVersion(0)
        self._vocab_size, self._model, self._api_key = vocab_size, model, api_key
        self._max_model_len = 0
        self._limits = limits or HttpLimits()
        self._slots = asyncio.Semaphore(self._limits.max_in_flight)
        self._session: aiohttp.ClientSession | None = None

    async def generate(self, request: GenerateRequest) -> Completion:
        """Sample one completion.

        Raises BackendError; MAX_TOKENS when the prompt leaves the model's context no room.
        """
        model = self._model or await self._discover()
        if self._max_model_len and len(request.prompt_ids_L) >= self._max_model_len:
            raise BackendError(
                FailureCode.MAX_TOKENS,
                f"{len(request.prompt_ids_L)} tokens fill a context of {self._max_model_len}",
            )
        body = orjson.dumps(_body(request, model), option=orjson.OPT_SERIALIZE_NUMPY)
        headers = {
            "Content-Type": "application/json",
            "x-session-id": quote(request.session, safe=""),
        }
        version, began = (
            max(self.policy_version, request.min_version, request.known_version),
            time.monotonic(),
        )
        async with self._slots:
            reply = await self._exchange("POST", "/v1/completions", body, headers)
        with boundary(
            BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.name} sent a malformed reply"
        ):
            completion = _completion(reply, version, time.monotonic() - began, self.name)
        return check_completion(completion, self._vocab_size, request.sampling.max_tokens)

    async def probe(self) -> None:
        """Refuse a server whose logprobs are not those of the distribution it samples from.

        Near temperature 0 the choice is certain, and at temperature 2 the same choice is less
        likely than that. Raw logprobs are the model's own at both: not near 0 where it is unsure,
        and equal where it is sure. Raises ConfigError, or BackendError when the server cannot be
        asked.
        """
        cold = await self._first_tokens(_COLD, seed=0)
        hot = [
            pair
            for seed in range(_ROUNDS)
            for pair in zip(cold, await self._first_tokens(_HOT, seed), strict=True)
        ]
        certain = statistics.median(logprob for _, logprob in cold)
        moved = [
            cold_logprob - hot_logprob
            for (one, cold_logprob), (other, hot_logprob) in hot
            if one == other
        ]
        if certain < _CERTAIN or (moved and statistics.median(moved) < _MOVED):
            raise ConfigError(
                f"{self.name}: logprobs do not follow the temperature (at {_COLD:g}:"
                f" {[round(logprob, 3) for _, logprob in cold]}; the same tokens at {_HOT:g} are"
                f" {[round(one, 3) for one in moved]} less likely)",
                f"about 0 at {_COLD:g}, and less at {_HOT:g}",
                "start vLLM with --logprobs-mode processed_logprobs",
            )

    async def _first_tokens(self, temperature: float, seed: int) -> list[tuple[int, float]]:
        """What it says after each of a few short prompts: (id, logprob)."""
        prompts = np.random.default_rng(1).integers(
            0, self._vocab_size, (_PROBES, 4), dtype=np.int32
        )
        answers = await asyncio.gather(
            *(self.generate(_probe(prompt, temperature, seed)) for prompt in prompts)
        )
        return [(int(answer.token_ids_C[0]), float(answer.logprobs_C[0])) for answer in answers]

    async def health(self) -> None:
        """Return when the server says that it is well. Raises BackendError."""
        await self._exchange("GET", "/health", None, {})

    async def close(self) -> None:
        """Close every connection; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _discover(self) -> str:
        reply = await self._exchange("GET", "/v1/models", None, {})
        with boundary(BackendError, FailureCode.BACKEND_PROTOCOL, f"{self.name}/v1/models"):
            model = orjson.loads(reply)["data"][0]
            self._model, self._max_model_len = (
                str(model["id"]),
                int(model.get("max_model_len") or 0),
            )
        return self._model

    async def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        """One request and its whole reply. Raises BackendError."""
        try:
            async with asyncio.timeout(self._limits.request_s):
                try:
                    return await self._send(method, path, body, headers)
                except aiohttp.ServerDisconnectedError:
                    return await self._send(method, path, body, headers)
        except (aiohttp.ClientError, TimeoutError, OSError) as cause:
            message = f"{self.name}{path}: {type(cause).__name__}: {cause}"
            raise BackendError(FailureCode.BACKEND_UNAVAILABLE, message) from cause

    async def _send(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
    ) -> bytes:
        session = self._open()
        async with session.request(
            method, self.name + path, data=body, headers=headers, allow_redirects=False
        ) as response:
            reply = bytearray()
            async for part in response.content.iter_chunked(_READ_BYTES):
                reply += part
                if len(reply) > MAX_REPLY_BYTES:
                    raise BackendError(
                        FailureCode.BACKEND_PROTOCOL,
                        f"{self.name} sent more than {MAX_REPLY_BYTES} bytes",
                    )
            if response.status != 200:
                busy = response.status in (408, 429) or response.status >= 500
                code = FailureCode.BACKEND_UNAVAILABLE if busy else FailureCode.BACKEND_PROTOCOL
                raise BackendError(
                    code,
                    f"{self.name}{path}: HTTP {response.status}:"
                    f" {reply[:500].decode('utf-8', 'replace')}",
                )
            return bytes(reply)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            limits = self._limits
            # No limit in the connector: waiting happens at our own semaphore, outside of every
            # timeout.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=limits.keepalive_s)
            timeout = aiohttp.ClientTimeout(
                total=None, sock_connect=limits.connect_s, sock_read=limits.read_s
            )
            headers = {"Authorization": f"Bearer {self._api_key}"} if self._api_key else {}
            self._session = aiohttp.ClientSession(
                connector=connector, timeout=timeout, headers=headers
            )
        return self._session


def _body(request: GenerateRequest, model: str) -> dict[str, Json]:
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
    return body | {"top_k": sampling.top_k} if sampling.top_k else body


def _completion(reply: bytes, version: PolicyVersion, llm_s: float, backend: str) -> Completion:
    """The completion that a reply holds. Raises whatever a malformed one leads to."""
    value: Json = orjson.loads(reply)
    (choice,) = value["choices"]
    ids = _array(choice["token_ids"], "i", "token_ids").astype(np.int32, casting="same_kind")
    logprobs = _array(
        (choice["logprobs"] or {"token_logprobs": []})["token_logprobs"], "fi", "token_logprobs"
    ).astype(np.float32)
    ends, versions = _versions(choice.get("weight_versions"), version, len(ids))
    details = (value.get("usage") or {}).get("prompt_tokens_details") or {}
    return Completion(
        token_ids_C=ids,
        logprobs_C=logprobs,
        finish_reason=FinishReason(choice["finish_reason"]),
        version_ends=ends,
        versions=versions,
        cached_tokens=int(details.get("cached_tokens") or 0),
        llm_s=llm_s,
        backend=backend,
    )


def _array(values: Json, kinds: str, name: str) -> Int32 | Float32:
    """A JSON list of numbers as an array; null, text or nesting is refused."""
    array = np.asarray(values if isinstance(values, list) else None)
    if array.ndim != 1 or (array.dtype.kind not in kinds and len(array)):
        raise ValueError(f"{name} is no list of numbers: {str(values)[:80]}")
    if len(array) and "f" not in kinds and (array.min() < -(2**31) or array.max() >= 2**31):
        raise ValueError(f"{name} holds an id beyond 32 bits")
    return array


def _versions(
    stated: Json, version: PolicyVersion, count: int
) -> tuple[tuple[int, ...], tuple[PolicyVersion, ...]]:
    if not stated:
        return ((count,), (version,)) if count else ((), ())
    labels = [str(part["version"]) for part in stated]
    # vLLM's own labels are free text ("default"); only ours are ids.
    versions = tuple(
        PolicyVersion(int(label)) if label.isdecimal() else version for label in labels
    )
    return tuple(int(part["end"]) for part in stated), versions


def _probe(prompt_ids_L: Int32, temperature: float, seed: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids_L=prompt_ids_L,
        sampling=SamplingParams(temperature=temperature, max_tokens=1),
        seed=seed,
        stop_token_ids=(),
        request_id=f"probe-{uuid.uuid4().hex}",
        session="probe",
    )
