"""A model server whose answer is ready before it is asked: `python -m prorl.bench.inference_server`
prints `ready {"url"}` and ends with its input.
"""

from __future__ import annotations

import asyncio
import json
import sys

import numpy as np
import orjson
from aiohttp import web

from prorl.types import Json

SAMPLED_TOKENS, INTERVAL = 256, 16


def _choice(ids: list[int], finish: str | None) -> Json:
    return {
        "index": 0,
        "text": "x" * len(ids),
        "token_ids": ids,
        "logprobs": {
            "token_logprobs": (-0.001 * (1 + np.array(ids) % 997)).tolist(),
            "tokens": ["x"] * len(ids),
            "top_logprobs": None,
            "text_offset": list(range(len(ids))),
        },
        "finish_reason": finish,
        "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
    }


_IDS = [int(one) for one in np.arange(SAMPLED_TOKENS) * 37 % 50_000 + 2]
WHOLE = orjson.dumps(_choice(_IDS, "length"))
PIECES = [
    orjson.dumps(
        _choice(_IDS[at : at + INTERVAL], None if at + INTERVAL < SAMPLED_TOKENS else "length")
    )
    for at in range(0, SAMPLED_TOKENS, INTERVAL)
]


async def complete(request: web.Request) -> web.StreamResponse:
    """Answer every request with the same tokens, in one piece or event by event."""
    body = orjson.loads(await request.read())
    head = orjson.dumps({"id": f"cmpl-{body['request_id']}", "model": "bench"})[:-1]
    prompt = len(body["prompt"])

    def reply(choices: bytes, sampled: int) -> bytes:
        counts = (prompt, sampled, prompt + sampled)
        usage = b'{"prompt_tokens":%d,"completion_tokens":%d,"total_tokens":%d}' % counts
        return head + b',"choices":[%s],"usage":%s}' % (choices, usage)

    if not body.get("stream"):
        return web.Response(body=reply(WHOLE, SAMPLED_TOKENS), content_type="application/json")
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for number, piece in enumerate(PIECES, 1):
        await response.write(b"data: " + reply(piece, number * INTERVAL) + b"\n\n")
        await asyncio.sleep(0)
    await response.write(b"data: " + reply(b"", SAMPLED_TOKENS) + b"\n\n")
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
    print("ready", json.dumps({"url": f"http://{host}:{port}"}), flush=True)
    await asyncio.to_thread(sys.stdin.read)  # until whoever started it ends


if __name__ == "__main__":
    asyncio.run(_main())
