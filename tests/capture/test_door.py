"""The door over real HTTP: what programs get, in each dialect, whatever they do."""

from __future__ import annotations

import asyncio
import io
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NamedTuple

import aiohttp
import numpy as np
import orjson
import pytest

from prorl.agents.sampler import Sampler
from prorl.capture import door
from prorl.capture.door import Door
from prorl.errors import BackendError
from prorl.protocols import Backend
from prorl.testing import Replies, Reply
from prorl.types import Completion, FailureCode, GenerateRequest, Json, Message, ToolCall
from tests.capture.played import attempt
from tests.waiting import until

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
    context = attempt(backend, **limits)
    sampler = Sampler(context)
    door = Door(context, sampler)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with door.listening(listener), aiohttp.ClientSession() as http:
            yield Open(door, sampler, url, http)
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


USER: Json = {"role": "user", "content": "Fix it."}
BLOCK = {"type": "image_url", "image_url": {"url": "data:"}}
ROUTES = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


@pytest.mark.parametrize(
    ("route", "body", "status", "said"),
    [
        ("chat", b"\x00\xff{", 400, "the body is no JSON"),
        ("chat", b"[]", 400, "the body is a list; expected a JSON object"),
        ("chat", b"{}", 400, "messages is empty"),
        ("chat", b'{"messages": [{"role": "user", "content": "' + b"x" * (20 << 20), 400, "16 MiB"),
        ("chat", b'{"messages": ' + b"[" * 5000, 400, "the body is no JSON"),
        ("chat", {"messages": ["x"]}, 400, "a message is a str; expected a JSON object"),
        ("chat", {"messages": [USER], "n": 2}, 400, "n is given"),
        ("chat", {"messages": [USER], "logprobs": True}, 400, "logprobs is given"),
        ("chat", {"messages": [USER], "max_tokens": -1}, 400, "max_tokens is -1"),
        ("chat", {"messages": [USER], "tools": [{"type": "web"}]}, 400, "a tool of type 'web'"),
        ("chat", {"messages": [{"role": "user", "content": [BLOCK]}]}, 400, "type 'image_url'"),
        ("responses", {"input": []}, 400, "input is empty"),
        ("responses", {"input": "x", "previous_response_id": "r"}, 400, "previous_response_id is"),
        ("responses", {"input": "x", "background": True}, 400, "background is given"),
        ("responses", {"input": [{"type": "item_reference"}]}, 400, "an item of type"),
        ("messages", {"messages": [USER], "mcp_servers": [1]}, 400, "mcp_servers is given"),
        ("messages", {"messages": [{"role": "user", "content": [BLOCK]}]}, 400, "a block of type"),
    ],
)
async def test_what_cannot_be_expressed_is_refused_in_a_sentence(
    route: str, body: Json, status: int, said: str
) -> None:
    async with opened(Replies()) as at:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with at.http.post(at.url + ROUTES[route], data=io.BytesIO(data)) as answer:
            assert answer.status == status
            assert said in (await answer.json())["error"]["message"]
        assert not at.door.ended.done()


async def test_what_is_asked_beside_is_no_call() -> None:
    async with opened(Replies("yes")) as at:
        async with at.http.head(at.url) as answer:
            assert answer.status == 200
        async with at.http.get(f"{at.url}/v1/models") as answer:
            assert (await answer.json())["data"][0]["id"] == "policy"
        body = {"messages": [USER], "max_tokens": 5}
        async with at.http.post(f"{at.url}/v1/messages/count_tokens", json=body) as answer:
            counted = (await answer.json())["input_tokens"]
        async with at.http.post(f"{at.url}/v1/messages?beta=true", json=body) as answer:
            assert (await answer.json())["usage"]["input_tokens"] == counted
        async with at.http.post(f"{at.url}/v1/embeddings", json={}) as answer:
            assert answer.status == 404
    assert len(at.sampler.record.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_reply_that_nobody_heard_is_given_again(stream: bool) -> None:
    backend = Held("one", "two")
    async with opened(backend) as at:
        hasty = asyncio.create_task(at.chat([USER], stream=stream))
        await backend.asked.wait()
        hasty.cancel()
        await asyncio.gather(hasty, return_exceptions=True)
        again = asyncio.create_task(at.chat([USER]))
        await until(lambda: at.door.counts["replayed"])
        backend.go.set()
        assert (await again)["choices"][0]["message"]["content"] == "one"
        assert (await at.chat([USER]))["choices"][0]["message"]["content"] == "two"
    assert len(at.sampler.record.turns) == 2


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_slow_reply_is_waited_for_with_signs_of_life(
    route: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(door, "KEEP_ALIVE_S", 0.05)
    backend = Held("slowly")
    body = {"input": "Fix it.", "messages": [USER], "max_tokens": 50, "stream": stream}
    async with opened(backend) as at, at.http.post(at.url + ROUTES[route], json=body) as answer:
        first = await answer.content.readany()
        assert first.strip() in (b"", b": keep-alive", b'event: ping\ndata: {"type": "ping"}')
        backend.go.set()
        assert b"slowly" in await answer.read()


async def test_a_backend_that_fails_ends_the_attempt() -> None:
    failure = BackendError(FailureCode.BACKEND_UNAVAILABLE, "gone")
    async with opened(Replies(failure)) as at:
        for _ in range(2):
            async with at.http.post(at.url + ROUTES["chat"], json={"messages": [USER]}) as answer:
                assert answer.status == 503
                text = (await answer.json())["error"]["message"]
                assert text == "the rollout has ended: backend_unavailable: gone"
        assert at.door.ended.result() is failure


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        ({"max_tokens": 60}, FailureCode.MAX_TOKENS),
        ({"max_turns": 1}, FailureCode.MAX_TURNS),
        ({"max_tokens": 20}, FailureCode.BAD_TASK),
    ],
)
async def test_a_budget_ends_the_attempt(limits: Json, code: FailureCode) -> None:
    async with opened(Replies("one", "two"), **limits) as at:
        for task in ("x", "y" * 50):
            body = {"messages": [{"role": "user", "content": task}]}
            async with at.http.post(at.url + ROUTES["chat"], json=body):
                pass
        assert at.door.ended.result().code is code


class Held(Replies):
    """Says nothing until it may."""

    def __init__(self, *replies: Reply) -> None:
        super().__init__(*replies)
        self.asked, self.go = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.asked.set()
        await self.go.wait()
        return await super().generate(request)
