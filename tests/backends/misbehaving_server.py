"""A model server over real HTTP that serves well, or misbehaves as it is told, and writes down what
it saw and said.
"""

from __future__ import annotations

import asyncio
import random
import time
from enum import StrEnum
from typing import TYPE_CHECKING

import numpy as np
import orjson
from aiohttp import web

from prorl.testing import RENDERER
from prorl.types import Json, Message
from tests.backends.contradictory_replies import Lie
from tests.backends.wire_tap import Call

if TYPE_CHECKING:
    from prorl.types import Int32

PIECE = 4
"""Tokens of one event."""


class Mode(StrEnum):
    WELL = "well"
    ERROR = "500"
    BUSY = "429"
    EMPTY = "200 with an empty body"
    GARBAGE = "no JSON"
    NAN = "a logprob that is no number"
    HALF = "the connection breaks after a piece"
    SILENT = "connected, and not a byte"
    DRIP = "a byte now and then"
    STALLED = "a piece, and then nothing"
    LIES = "some replies contradict themselves"


class Misbehaving:
    """`async with Misbehaving() as server: server.url`. `mode` may change at any time."""

    def __init__(self, mode: Mode = Mode.WELL, *, say: str = "I do not know the answer.") -> None:
        self.mode, self.label, self.delay_s = mode, "0", 0.0
        self.calls: list[Call] = []
        self.bodies: list[Json] = []
        self.in_flight = 0
        """Of the calls, those that are being answered."""
        self.healthy = True
        self.retry_after, self.hang_share = "", 0.0
        self.answers_probes = False
        """In other modes, too."""
        self.lie: Lie = lambda events: events
        self.lies, self.lie_share = 0, 1.0
        """How many replies were lies, and of how many they are to be."""
        self._dice = random.Random(1)
        self._completion_ids = RENDERER.completion(Message(role="assistant", content=say))
        self._app = web.Application()
        self._app.router.add_get("/health", self._health)
        self._app.router.add_get("/v1/models", self._models)
        self._app.router.add_get("/weight_info", self._weight_info)
        self._app.router.add_post("/v1/completions", self._complete)
        self._runner = web.AppRunner(self._app, handler_cancellation=True, shutdown_timeout=0.1)
        self.port = 0
        self.url = ""

    async def __aenter__(self) -> Misbehaving:
        await self._runner.setup()
        await self._listen()
        return self

    async def _listen(self) -> None:
        self._site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await self._site.start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http://127.0.0.1:{self.port}"

    async def __aexit__(self, *exc: object) -> None:
        await self._runner.cleanup()

    async def _health(self, request: web.Request) -> web.Response:
        if self.mode is Mode.SILENT and not self.healthy:
            await asyncio.Event().wait()
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 1 << 20}]})

    async def _weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["max_tokens"] == 1:
            if self.mode is Mode.SILENT and not self.answers_probes:
                await asyncio.Event().wait()
            if self.mode not in (Mode.WELL, Mode.LIES) and not self.answers_probes:
                return web.Response(status=500, text="the engine is dead")
            logprobs = {"token_logprobs": [-0.001 if body["temperature"] < 1 else -1.0]}
            choice = {"token_ids": [65], "logprobs": logprobs, "finish_reason": "length"}
            return web.json_response(head(body) | {"choices": [choice], "usage": usage(body, 1)})
        self.bodies.append(body)
        call = Call(time.monotonic(), body["request_id"], body["prompt"])
        self.calls.append(call)
        self.in_flight += 1
        try:
            return await self._answer(request, body, call)
        finally:
            self.in_flight -= 1

    async def _answer(self, request: web.Request, body: Json, call: Call) -> web.StreamResponse:
        await asyncio.sleep(self.delay_s)
        if self._dice.random() < self.hang_share:
            await asyncio.Event().wait()
        match self.mode:
            case Mode.ERROR | Mode.BUSY:
                wait = {"Retry-After": self.retry_after} if self.retry_after else None
                status = int(self.mode.value)
                return web.Response(status=status, text="the engine is dead", headers=wait)
            case Mode.EMPTY:
                return web.Response(content_type="application/json")
            case Mode.GARBAGE:
                return web.Response(text="<html>", content_type="application/json")
            case Mode.SILENT:
                await asyncio.Event().wait()
        return await self._stream(request, body, call)

    async def _stream(self, request: web.Request, body: Json, call: Call) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.mode is Mode.DRIP:
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.02)
        ids = self._ids(call.prompt, body["max_tokens"])
        events, is_lie = self._events(ids.tolist(), body), False
        if self.mode is Mode.LIES and self._dice.random() < self.lie_share:
            events, is_lie = self.lie(events), True
            self.lies += 1
        for event in events:
            data = event.encode() if isinstance(event, str) else orjson.dumps(event)
            await response.write(b"data: " + data + b"\n\n")
            if isinstance(event, str) or not event["choices"]:
                continue
            if not is_lie:
                call.ids += event["choices"][0]["token_ids"] or []
                call.logprobs += event["choices"][0]["logprobs"]["token_logprobs"]
            if self.mode is Mode.STALLED:
                await asyncio.Event().wait()
            if self.mode is Mode.HALF:
                assert request.transport is not None
                await asyncio.sleep(0.01)
                request.transport.abort()
                return response
        call.is_whole = not is_lie
        await response.write(b"data: [DONE]\n\n")
        return response

    def _events(self, ids: list[int], body: Json) -> list[Json]:
        """Returns the events as vLLM sends them, the count alone as the last."""
        events = []
        for start in range(0, len(ids), PIECE):
            end = min(start + PIECE, len(ids))
            logprobs: list[Json] = (-0.01 * (1 + np.arange(start, end))).tolist()
            if self.mode is Mode.NAN:
                logprobs[0] = None
            choice = {
                "index": 0,
                "text": "",
                "token_ids": ids[start:end],
                "prompt_token_ids": None if start else body["prompt"],
                "logprobs": {"token_logprobs": logprobs},
                "finish_reason": self._reason(ids) if end == len(ids) else None,
                "stop_reason": None,
            }
            count = usage(body, end) if body["stream_options"]["continuous_usage_stats"] else None
            events.append(head(body) | {"choices": [choice], "usage": count})
        return [*events, head(body) | {"choices": [], "usage": usage(body, len(ids))}]

    def _reason(self, ids: list[int]) -> str:
        return "stop" if ids[-1] in RENDERER.stop_token_ids else "length"

    def _ids(self, prompt: list[int], max_tokens: int) -> Int32:
        """Returns the server's reply, or the rest of it where the prompt ends with its
        beginning.
        """
        num_matched = next(
            n
            for n in range(len(self._completion_ids) - 1, -1, -1)
            if prompt[len(prompt) - n :] == self._completion_ids[:n].tolist()
        )
        return self._completion_ids[num_matched:][:max_tokens]


def head(body: Json) -> dict[str, Json]:
    return {"id": f"cmpl-{body['request_id']}", "object": "text_completion", "model": "m"}


def usage(body: Json, sampled: int) -> dict[str, Json]:
    prompt = len(body["prompt"])
    return {
        "prompt_tokens": prompt,
        "completion_tokens": sampled,
        "total_tokens": prompt + sampled,
    }
