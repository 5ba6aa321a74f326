"""The door over real HTTP: what programs get, in each dialect, whatever they do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
import numpy as np

from prorl.agents.context import AttemptContext
from prorl.agents.sampler import Sampler
from prorl.capture.door import Door
from prorl.envs import get_env
from prorl.limits import Deadline
from prorl.protocols import Backend
from prorl.testing import RENDERER, Replies, make_task
from prorl.types import AttemptKey, Json, Message, RolloutLimits, ToolCall

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
CALL = Message(
    role="assistant", content="I look.", tool_calls=(ToolCall("bash", {"command": "ls"}),)
)


class Open(NamedTuple):
    """A door that listens, and who calls it."""

    door: Door
    sampler: Sampler
    url: str
    http: aiohttp.ClientSession

    async def chat(self, messages: list[Json], **fields: Json) -> Json:
        body = {"model": "m", "messages": messages, "tools": [TOOL]} | fields
        async with self.http.post(f"{self.url}/v1/chat/completions", json=body) as answer:
            return await answer.json()


@asynccontextmanager
async def opened(backend: Backend, **limits: Json) -> AsyncIterator[Open]:
    task = make_task("math", "Half of 48?", answer="24")
    context = AttemptContext(
        task=task,
        env=get_env("math"),
        messages=(),
        tools=(),
        renderer=RENDERER,
        backend=backend,
        sandbox=None,
        deadline=Deadline(60.0),
        key=AttemptKey("run", 5, 2),
        session="key",
        limits=RolloutLimits(**limits),
    )
    sampler = Sampler(context)
    door = Door(context, sampler, keep_alive_s=0.05)
    server = await asyncio.get_running_loop().create_server(door.protocol, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with aiohttp.ClientSession() as http:
        yield Open(door, sampler, url, http)
    server.close()
    await door.close()


async def test_a_loop_of_calls_is_one_sequence_of_exact_ids() -> None:
    backend = Replies(CALL, CALL, "done")
    messages: list[Json] = [{"role": "user", "content": "Fix it."}]
    async with opened(backend) as at:
        while True:
            said = (await at.chat(messages))["choices"][0]
            messages.append(said["message"])
            if said["finish_reason"] == "stop":
                break
            call_id = said["message"]["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": "a.py"})
    assert said["message"]["content"] == "done"
    (sequence,) = at.sampler.record.sequences
    for prompt, completion in zip(backend.prompts, backend.said, strict=True):
        end = len(prompt) + len(completion.token_ids_C)
        np.testing.assert_array_equal(sequence.token_ids_L[: len(prompt)], prompt)
        np.testing.assert_array_equal(
            sequence.token_ids_L[len(prompt) : end], completion.token_ids_C
        )
    assert at.door.counts["bridged"] == 2
