"""What a token server says, in vLLM's shape.

One object, or a stream of events with a few tokens each.

Invariants: a stream's pieces laid end to end are the one object's tokens; a client that goes away
cancels the generation, streamed or not; an error before the first piece has a status of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import orjson
from aiohttp import web

from prorl.types import Completion, FinishReason, GenerateRequest, Json, PolicyVersion

if TYPE_CHECKING:
    from prorl.protocols import Backend, Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    model: str
    tokenizer: Tokenizer
    label: Callable[[PolicyVersion], str]
    """What the server calls its weights."""

    def whole(self, request: GenerateRequest, completion: Completion) -> dict[str, Json]:
        choice = self._choice(completion, completion.finish_reason)
        return self._head(request) | {"choices": [choice], "usage": usage(request, completion)}

    def piece(
        self, request: GenerateRequest, so_far: Completion, sent: int, finish: FinishReason | None
    ) -> dict[str, Json]:
        """One event of a stream: what came behind `sent`; `finish` in the last that has tokens."""
        choice = self._choice(rest_of(so_far, sent), finish)
        return self._head(request) | {"choices": [choice], "usage": usage(request, so_far)}

    def last(self, request: GenerateRequest, completion: Completion) -> dict[str, Json]:
        return self._head(request) | {"choices": [], "usage": usage(request, completion)}

    def _head(self, request: GenerateRequest) -> dict[str, Json]:
        return {
            "id": f"cmpl-{request.request_id}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": self.model,
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


def usage(request: GenerateRequest, completion: Completion) -> dict[str, Json]:
    prompt_tokens, sampled = len(request.prompt_ids_L), len(completion.token_ids_C)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": sampled,
        "total_tokens": prompt_tokens + sampled,
        "prompt_tokens_details": {"cached_tokens": completion.cached_tokens},
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
    http: web.Request, shape: Shape, backend: Backend, request: GenerateRequest
) -> tuple[web.StreamResponse, Completion]:
    """Answer with a stream. Raises BackendError as long as nothing was sent."""
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    parts: asyncio.Queue[Completion | None] = asyncio.Queue(request.sampling.max_tokens + 1)
    told = replace(request, on_part=parts.put_nowait)
    work = asyncio.ensure_future(backend.generate(told))
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
    return response, completion


async def _send(http: web.Request, response: web.StreamResponse, value: Json) -> None:
    if not response.prepared:
        await response.prepare(http)
    await response.write(
        b"data: " + orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"
    )
