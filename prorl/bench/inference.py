"""`prorl bench inference`: CPU of one model call on our side, beside the `openai` package.

500 rollouts at a time; then who chooses servers best, simulated (`balance.py`).

A server in a process of its own answers every call with the same 256 tokens, so that what is
measured is the client: `VllmBackend` as RUN uses it, streamed (16 tokens an event) and with one
reply per call, and `openai.AsyncOpenAI` asking for the same. Prompts are 2,000 ids. CPU is this
process's own. The bar is a quarter of the package's CPU per call, in each of both ways. Rounds are
interleaved.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from importlib.util import find_spec

import numpy as np

from prorl.backends.vllm import VllmBackend
from prorl.backends.vllm_http import HttpLimits
from prorl.bench import balance
from prorl.bench.children import NO_RIVALS, RIVALS, Answering
from prorl.bench.inference_server import INTERVAL, SAMPLED_TOKENS
from prorl.bench.report import Figure, Report, median
from prorl.types import GenerateRequest, SamplingParams

CONCURRENT, PROMPT_TOKENS = 500, 2000
BAR = 4.0

Call = Callable[[int], Awaitable[int]]
"""Makes one call; how many tokens came."""
Open = Callable[[str, bool], AbstractAsyncContextManager[Call]]
"""(url, streamed) -> a client."""


async def run(quick: bool) -> Report:
    rounds = 1 if quick else 3
    clients: dict[str, tuple[Open, int]] = {"ours": (_ours, 2 * CONCURRENT)}
    missing = NO_RIVALS
    if RIVALS:
        missing = "the package openai is not installed: pip install 'prorl[bench]'"
        if find_spec("openai"):
            from configs.rivals.bench.inference import openai_client

            clients["openai"] = (openai_client, CONCURRENT)
    rows: list[Figure] = []
    async with Answering("-m", "prorl.bench.inference_server") as server:
        url = str(server.ready["url"])
        for name, streamed in (("streamed", True), ("whole", False)):
            ms: dict[str, list[float]] = {}
            for _ in range(rounds):
                for client, (make, calls) in clients.items():
                    async with make(url, streamed) as call:
                        ms.setdefault(client, []).append(await _cpu_ms(call, calls))
            row = median(f"cpu_ms_per_call.{name}", ms["ours"], "ms")
            if "openai" in ms:
                theirs = statistics.median(ms["openai"])
                met = "met" if theirs >= BAR * row.value else "missed"
                raw = ", ".join(f"{one:.2f}" for one in ms["openai"])
                row = row.beside("openai", theirs, "openai.AsyncOpenAI().completions.create")
                rows.append(replace(row, note=f"bar {BAR:g}x: {met}; raw: {raw}"))
            else:
                rows.append(replace(row, rival="openai", note=missing))
    per_token = [
        Figure(
            what=f"cpu_us_per_token.{row.what.rpartition('.')[2]}",
            value=row.value * 1e3 / SAMPLED_TOKENS,
            unit="us",
            note=f"{SAMPLED_TOKENS} tokens a call",
        )
        for row in rows
    ]
    return Report(bench="inference", rows=(*rows, *per_token, *balance.rows(quick)))


async def _cpu_ms(call: Call, calls: int) -> float:
    """CPU of this process per call, `CONCURRENT` at a time; connections are opened before."""
    slots = asyncio.Semaphore(CONCURRENT)

    async def one(index: int) -> None:
        async with slots:
            count = await call(index)
            assert count == SAMPLED_TOKENS, f"{count} tokens"

    await asyncio.gather(*(one(index) for index in range(min(calls, CONCURRENT) // 5)))
    began = time.process_time()
    await asyncio.gather(*(one(index) for index in range(calls)))
    return (time.process_time() - began) * 1e3 / calls


def prompt(index: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.arange(index, index + PROMPT_TOKENS, dtype=np.int32) % 50_000


@asynccontextmanager
async def _ours(url: str, streamed: bool) -> AsyncIterator[Call]:
    limits = HttpLimits(stream_interval=INTERVAL if streamed else 0, connect_s=120.0)
    backend = VllmBackend(url, 1 << 17, model="bench", limits=limits)

    async def call(index: int) -> int:
        return len((await backend.generate(_request(index))).token_ids_C)

    try:
        yield call
    finally:
        await backend.close()


def _request(index: int) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids_L=prompt(index),
        sampling=SamplingParams(max_tokens=SAMPLED_TOKENS),
        seed=index,
        stop_token_ids=(1,),
        request_id=str(index),
        session=str(index),
        on_part=lambda part: None,
    )
