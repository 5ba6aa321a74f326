"""A model server as a process, for striking: `python -m tests.faults.model_server PORT TAP`.

Its policy calls a tool `TURNS - 1` times and then answers, a few tokens at a time; where the prompt
ends with a beginning of what it would say, it goes on from there. Every call is written to the file
TAP when it begins and as it goes: what the wire had, whatever becomes of the process.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import orjson
from aiohttp import web

from prorl.testing import RENDERER
from prorl.types import Json, Message, ToolCall
from tests.backends.misbehaving_server import head, usage

if TYPE_CHECKING:
    from prorl.types import Int32

TURNS = 6
PIECE = 4
PIECE_S = 0.03

_OUTPUT_ID = RENDERER.tokenizer.specials["<tool_response>"]


def says(turn: int) -> Int32:
    """The whole of a turn."""
    if turn < TURNS - 1:
        call = ToolCall("python", {"code": f"print('place {turn}')"})
        return RENDERER.completion(Message(role="assistant", content="", tool_calls=(call,)))
    return RENDERER.completion(Message(role="assistant", content="There it is."))


def goes_on(prompt: list[int]) -> Int32:
    """Returns the rest of the reply after a prompt."""
    whole = says(prompt.count(_OUTPUT_ID))
    num_matched = next(
        n for n in range(len(whole) - 1, -1, -1) if prompt[len(prompt) - n :] == whole[:n].tolist()
    )
    return whole[num_matched:]


def logprob_of(token_id: int) -> float:
    """Made up, and different for each."""
    return float(np.float32(-1e-3 * (1 + token_id)))


class Server:
    """One life."""

    def __init__(self, tap: Path) -> None:
        self._tap = tap.open("ab", buffering=0)
        self._label = "default"

    def _log(self, **what: Json) -> None:
        self._tap.write(orjson.dumps(what) + b"\n")

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        ids = goes_on(body["prompt"])[: body["max_tokens"]].tolist()
        self._log(call=body["request_id"], prompt=body["prompt"], at=time.monotonic())
        for start in range(0, len(ids), PIECE):
            await asyncio.sleep(PIECE_S)
            piece = ids[start : start + PIECE]
            logprobs = [logprob_of(token) for token in piece]
            choice = {
                "index": 0,
                "text": "",
                "token_ids": piece,
                "logprobs": {"token_logprobs": logprobs},
                "finish_reason": "stop" if start + PIECE >= len(ids) else None,
            }
            self._log(call=body["request_id"], ids=piece)
            event = head(body) | {"choices": [choice]}
            await response.write(b"data: " + orjson.dumps(event) + b"\n\n")
        last = head(body) | {"choices": [], "usage": usage(body, len(ids))}
        await response.write(b"data: " + orjson.dumps(last) + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 1 << 20}]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def weight_info(self, request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self._label})


async def probe(server: Server, request: web.Request) -> web.StreamResponse:
    """Model calls; what `check_logprobs` asks is answered as temperature demands."""
    body: Json = await request.json()
    if body["max_tokens"] > 1:
        try:
            return await server.complete(request)
        except ConnectionError:  # frozen for so long that nobody waits any more
            return web.Response()
    logprob = -0.001 if body["temperature"] < 1 else -1.0
    choice = {
        "token_ids": [65],
        "logprobs": {"token_logprobs": [logprob]},
        "finish_reason": "length",
    }
    return web.json_response(head(body) | {"choices": [choice], "usage": usage(body, 1)})


async def _main(port: int, tap: Path) -> None:
    server = Server(tap)
    app = web.Application()
    app.router.add_get("/health", server.health)
    app.router.add_get("/v1/models", server.models)
    app.router.add_get("/weight_info", server.weight_info)
    app.router.add_post("/v1/completions", lambda request: probe(server, request))
    runner = web.AppRunner(app, handler_cancellation=True, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, reuse_address=True).start()
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), Path(sys.argv[2])))
