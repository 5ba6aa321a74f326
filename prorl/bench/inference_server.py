"""A model server whose answer is ready before it is asked: `python -m prorl.bench.inference_server`
prints its address.
"""

from __future__ import annotations

import asyncio

import numpy as np
import orjson
from aiohttp import web

from prorl.types import Json

SAMPLED_TOKENS, INTERVAL = 256, 16


def _reply(ids: list[int], finish: str | None) -> bytes:
    logprobs: list[float] = (-0.001 * (1 + np.array(ids) % 997)).tolist()
    choice: Json = {
        "index": 0,
        "text": "x" * len(ids),
        "token_ids": ids,
        "logprobs": {
            "token_logprobs": logprobs,
            "tokens": ["x"] * len(ids),
            "top_logprobs": None,
            "text_offset": list(range(len(ids))),
        },
        "finish_reason": finish,
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
    }
    head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "bench"}
    return orjson.dumps(head | {"choices": [choice]})


_IDS = [int(one) for one in np.arange(SAMPLED_TOKENS) * 37 % 50_000 + 2]
WHOLE = _reply(_IDS, "length")
PIECES = [
    _reply(_IDS[start : start + INTERVAL], None if start + INTERVAL < SAMPLED_TOKENS else "length")
    for start in range(0, SAMPLED_TOKENS, INTERVAL)
]


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer every request alike, in one piece or event by event."""
    if b'"stream":true' not in await request.read():
        return web.Response(body=WHOLE, content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for piece in PIECES:
        await response.write(b"data: " + piece + b"\n\n")
        await asyncio.sleep(0)
    await response.write(b"data: [DONE]\n\n")
    return response


async def _main() -> None:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_post("/v1/completions", complete)
    models = {"data": [{"id": "bench", "max_model_len": 1 << 20}]}

    async def list_models(request: web.Request) -> web.Response:
        return web.json_response(models)

    async def label(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": "default"})

    app.router.add_get("/v1/models", list_models)
    app.router.add_get("/weight_info", label)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=2048).start()
    host, port = runner.addresses[0]
    print(f"http://{host}:{port}", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_main())
