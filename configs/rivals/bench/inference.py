"""The package `openai`, asking for completions with ids: a rival of `prorl bench inference`."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

import numpy as np

from prorl.bench.inference import Call, prompt
from prorl.bench.inference_server import SAMPLED_TOKENS


@asynccontextmanager
async def openai_client(url: str, streamed: bool) -> AsyncIterator[Call]:
    openai: Any = import_module("openai")
    client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600.0)

    async def call(index: int) -> int:
        # In `prompt` the package would look at each id for keys to rename.
        ids: list[int] = prompt(index).tolist()
        wanted = {
            "model": "bench",
            "prompt": "",
            "max_tokens": SAMPLED_TOKENS,
            "logprobs": 0,
            "seed": index,
            "extra_body": {"return_token_ids": True, "stop_token_ids": [1], "prompt": ids},
        }
        if not streamed:
            whole = await client.completions.create(**wanted)
            return len(np.asarray(whole.choices[0].token_ids, np.int32))
        sampled: list[int] = []
        async for part in await client.completions.create(stream=True, **wanted):
            for choice in part.choices:
                sampled += choice.token_ids
        return len(np.asarray(sampled, np.int32))

    try:
        yield call
    finally:
        await client.close()
