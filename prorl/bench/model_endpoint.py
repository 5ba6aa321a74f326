"""`prorl bench model_endpoint`: CPU of a program's model call besides sampling.

200 rollouts of 20 calls each (quick: 100 of 10) ask at once by Chat Completions, each call with all
that came before and a tool's answer of 1 KiB more. Counted is the CPU of the process that answers
(`python -m prorl.bench.model_endpoint ROLLOUTS CALLS`); clients are another. The policy says the
same each time and costs nothing, so that what is left is the model endpoint's: HTTP, the dialect,
placing, bridging, recording. Rows: `cpu_ms_per_call` (bar: at most 4) and `bridged_share`, of calls
that could go on from recorded ids (all but a rollout's first).
"""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import aiohttp

from prorl.agents.capture.model_endpoint import ModelEndpoint
from prorl.agents.context import AttemptContext
from prorl.agents.sampler import Sampler
from prorl.bench.children import Answering
from prorl.bench.report import Figure, Report, verdict
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.testing import RENDERER, Replies, make_task, sampled
from prorl.types import AttemptKey, Json, Message, RolloutLimits, SamplingParams, ToolCall

BAR_MS = 4.0
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
REPLY = Message(
    role="assistant", content="I look.", tool_calls=(ToolCall("bash", {"command": "ls -la src"}),)
)
SEEN = "-rw-r--r-- 1 root root 4096 Nov 24 16:00 module.py\n" * 20


async def run(quick: bool) -> Report:
    rollouts, calls = (100, 10) if quick else (200, 20)
    async with Answering("-m", "prorl.bench.model_endpoint", str(rollouts), str(calls)) as server:
        urls = [f"{url}/v1" for url in server.ready["urls"]]
        before = await server.ask()
        await knock(urls, ["none"] * rollouts, calls)
        after = await server.ask()
    total_s = after["cpu_s"] - before["cpu_s"]
    cost_ms = total_s / (rollouts * calls) * 1e3
    mine = Figure(
        name="cpu_ms_per_call",
        value=cost_ms,
        unit="ms",
        cpu_s=total_s,
        note=f"{rollouts} rollouts of {calls} calls at once; {verdict(cost_ms, BAR_MS)}",
    )
    share = (after["continued_calls"] - before["continued_calls"]) / (rollouts * calls)
    note = f"best possible: {1 - 1 / calls:.3f}"
    bridged = Figure(name="bridged_share", value=share, unit="", note=note)
    return Report(bench="model_endpoint", rows=(mine, bridged))


async def knock(urls: Sequence[str], keys: Sequence[str], calls: int) -> None:
    """Play a rollout against each URL, all at once. Raises AssertionError for a wrong answer."""
    timeout, connector = aiohttp.ClientTimeout(600), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as http:

        async def play(number: int, url: str, key: str) -> None:
            messages: list[Json] = [{"role": "user", "content": f"Mend task {number}. {SEEN}"}]
            heads = {"authorization": f"Bearer {key}"}
            for turn in range(calls):
                body = {"model": "policy", "messages": messages, "tools": [TOOL]}
                async with http.post(f"{url}/chat/completions", json=body, headers=heads) as answer:
                    assert answer.status == 200, await answer.text()
                    message = (await answer.json())["choices"][0]["message"]
                (call,) = message["tool_calls"]
                result = {"role": "tool", "tool_call_id": call["id"], "content": f"{turn} {SEEN}"}
                kept = ("role", "content", "tool_calls")
                messages += [{name: message[name] for name in kept}, result]

        await asyncio.gather(*(play(i, *at) for i, at in enumerate(zip(urls, keys, strict=True))))


def _context(number: int, calls: int) -> AttemptContext:
    reply = sampled(RENDERER.completion(REPLY))
    return AttemptContext(
        task=make_task("math", "?", answer="24"),
        env=get_env("math"),
        messages=(),
        tools=(),
        renderer=RENDERER,
        backend=Replies(*[reply] * calls),
        sandbox=None,
        deadline=Deadline(3600.0),
        key=AttemptKey("bench", number, 1),
        session=str(number),
        limits=RolloutLimits(max_tokens=1 << 20, max_turns=calls + 1),
        sampling=SamplingParams(max_tokens=4096),
    )


async def serve(rollouts: int, calls: int) -> None:
    """Open the model endpoints, say where; after each line of input how much CPU this process
    has had.
    """
    urls = list[str]()
    contexts = [_context(number, calls) for number in range(rollouts)]
    endpoints = [ModelEndpoint(context, Sampler(context)) for context in contexts]
    async with AsyncExitStack() as stack:
        for endpoint in endpoints:
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            await stack.enter_async_context(endpoint.listening(listener))
            urls.append(f"http://127.0.0.1:{listener.getsockname()[1]}")
        print("ready", json.dumps({"urls": urls}), flush=True)
        await _report(endpoints)


async def _report(endpoints: Sequence[ModelEndpoint]) -> None:
    while await asyncio.to_thread(sys.stdin.readline):
        spent = resource.getrusage(resource.RUSAGE_SELF)
        bridged = sum(endpoint.counts["continued_calls"] for endpoint in endpoints)
        figures = {"cpu_s": spent.ru_utime + spent.ru_stime, "continued_calls": bridged}
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1]), int(sys.argv[2])))
