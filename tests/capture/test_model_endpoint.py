"""The model endpoint over real HTTP: what programs get, in each dialect, whatever they do."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import signal
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import aiohttp
import numpy as np
import orjson
import pytest

from prorl.agents.capture import connections, conversation_tree, model_endpoint
from prorl.agents.capture.canonical import IMAGE, RefusedError
from prorl.agents.capture.model_endpoint import ModelEndpoint
from prorl.agents.capture.reading import PROGRAM, read
from prorl.agents.capture.share import Account, Share
from prorl.agents.sampler import Sampler
from prorl.config.renderer import RendererSpec
from prorl.errors import BackendError
from prorl.helper.pool import close, pool
from prorl.linux import crashes
from prorl.protocols import Backend
from prorl.renderer.apart import LIGHT_BYTES, text_bytes
from prorl.renderer.chatml import ChatMLRenderer
from prorl.testing import RENDERER, Replies, Reply
from prorl.tokenizer import ByteTokenizer
from prorl.types import (
    Completion,
    FailureCode,
    GenerateRequest,
    Json,
    Message,
    SamplingParams,
    ToolCall,
    ToolSpec,
)
from tests.capture.scripted_attempt import attempt
from tests.waiting import until

if TYPE_CHECKING:
    from prorl.types import Int32

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
CALL = Message(
    role="assistant", content="I look.", tool_calls=(ToolCall("bash", {"command": "ls"}),)
)


class Open(NamedTuple):
    """A model endpoint that listens, and who calls it."""

    endpoint: ModelEndpoint
    sampler: Sampler
    url: str
    http: aiohttp.ClientSession

    async def chat(self, messages: list[Json], **fields: Json) -> Json:
        body = {"model": "m", "messages": messages, "tools": [TOOL]} | fields
        data = io.BytesIO(orjson.dumps(body))
        async with self.http.post(f"{self.url}/v1/chat/completions", data=data) as answer:
            return await answer.json()


@asynccontextmanager
async def opened(backend: Backend, buffer_bytes: int = 0, **limits: Json) -> AsyncIterator[Open]:
    context = attempt(backend, **limits)
    sampler = Sampler(context)
    endpoint = ModelEndpoint(context, sampler)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        if buffer_bytes:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with endpoint.listening(listener), aiohttp.ClientSession() as http:
            yield Open(endpoint, sampler, url, http)
    await endpoint.close()


async def test_a_loop_of_calls_is_a_single_sequence_of_exact_ids() -> None:
    backend = Replies(CALL, CALL, "done")
    messages: list[Json] = [{"role": "user", "content": "Fix it."}]
    async with opened(backend) as at:
        while True:
            choice = (await at.chat(messages))["choices"][0]
            messages.append(choice["message"])
            if choice["finish_reason"] == "stop":
                break
            call_id = choice["message"]["tool_calls"][0]["id"]
            messages.append({"role": "tool", "tool_call_id": call_id, "content": "a.py"})
    assert choice["message"]["content"] == "done"
    (sequence,) = at.sampler.record.sequences
    for prompt, completion in zip(backend.prompts, backend.completions, strict=True):
        end = len(prompt) + len(completion.token_ids_C)
        np.testing.assert_array_equal(sequence.token_ids_L[: len(prompt)], prompt)
        np.testing.assert_array_equal(
            sequence.token_ids_L[len(prompt) : end], completion.token_ids_C
        )
    assert at.endpoint.counts["continued_calls"] == 2


USER: Json = {"role": "user", "content": "Fix it."}
SOUND = {"type": "input_audio", "input_audio": {"data": ""}}


def tool(schema: Json) -> Json:
    return {"type": "function", "function": {"name": "f", "parameters": schema}}


def deep(depth: int) -> Json:
    return {"items": deep(depth - 1)} if depth else {}


def called(arguments: str) -> Json:
    call = {"id": "c", "function": {"name": "f", "arguments": arguments}}
    return {"role": "assistant", "tool_calls": [call]}


def used(arguments: Json) -> Json:
    block = {"type": "tool_use", "id": "c", "name": "f", "input": arguments}
    return {"role": "assistant", "content": [block]}


ROUTES = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
ROUTES |= {
    "gemini": "/v1beta/models/m:generateContent",
    "gemini_stream": "/v1beta/models/m:streamGenerateContent",
}


@pytest.mark.parametrize(
    ("route", "body", "status", "expected"),
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
        ("chat", {"messages": [{"role": "user", "content": [SOUND]}]}, 400, "type 'input_audio'"),
        ("chat", {"messages": [USER | {"role": []}]}, 400, "a message of role []"),
        ("chat", {"messages": [USER] * 4097}, 400, "4,097 messages; expected at most 4,096"),
        ("chat", {"messages": [USER], "tools": [tool({"anyOf": 5})]}, 400, "anyOf of a tool's"),
        (
            "chat",
            {"messages": [USER], "tools": [tool({"properties": {"a": 1}})]},
            400,
            "a is a int",
        ),
        ("chat", {"messages": [USER], "tools": [tool(deep(70))]}, 400, "schema deeper than 64"),
        ("chat", {"messages": [USER], "tools": [tool({})] * 1025}, 400, "1,025 tools"),
        ("chat", {"messages": [USER], "tools": [tool({"x": "y" * 600_000})]}, 400, "tools of 600,"),
        ("chat", {"messages": [called("[" + "1," * 250_000 + "1]")]}, 400, "calls with 250,001"),
        ("responses", {"input": [USER | {"role": {}}]}, 400, "a message of role {}"),
        ("responses", {"input": []}, 400, "input is empty"),
        ("responses", {"input": "x", "previous_response_id": "r"}, 400, "previous_response_id is"),
        ("responses", {"input": "x", "background": True}, 400, "background is given"),
        ("responses", {"input": [{"type": "item_reference"}]}, 400, "an item of type"),
        (
            "messages",
            {"messages": [USER, used(deep(64)), USER]},
            400,
            "a call's arguments deeper than 64",
        ),
        ("messages", {"messages": [USER], "mcp_servers": [1]}, 400, "mcp_servers is given"),
        ("messages", {"messages": [{"role": "user", "content": [SOUND]}]}, 400, "a block of type"),
        ("gemini", {"contents": []}, 400, "contents is empty"),
        ("gemini", {"contents": [{"parts": [{"executableCode": {}}]}]}, 400, "executableCode"),
        ("gemini", {"contents": [{"role": "x"}]}, 400, "a content of role 'x'"),
        ("gemini", {"contents": [], "generationConfig": {"candidateCount": 2}}, 400, "candidateC"),
    ],
)
async def test_what_cannot_be_expressed_is_refused_in_a_sentence(
    route: str, body: Json, status: int, expected: str
) -> None:
    async with opened(Replies()) as at:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        async with at.http.post(at.url + ROUTES[route], data=io.BytesIO(data)) as answer:
            assert answer.status == status
            assert expected in (await answer.json())["error"]["message"]
        assert not at.endpoint.ended.done()


PIXEL = "iVBORw0KGgo="
IMAGES: dict[str, Json] = {
    "chat": {
        "messages": [
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}
        ]
    },
    "responses": {
        "input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]
    },
    "messages": {
        "messages": [{"role": "user", "content": [{"type": "image", "source": {"data": PIXEL}}]}]
    },
    "gemini": {"contents": [{"parts": [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}]}]},
}


@pytest.mark.parametrize("route", IMAGES)
async def test_an_image_is_read_as_a_text_and_counted_once(route: str) -> None:
    backend = Replies("a cat", "sure")
    async with opened(backend) as at:
        async with at.http.post(at.url + ROUTES[route], json=IMAGES[route]) as answer:
            assert answer.status == 200
        if route == "chat":
            reply = {"role": "assistant", "content": "a cat"}
            messages = [*IMAGES[route]["messages"], reply, USER]
            await at.chat(messages, tools=[])
            assert at.endpoint.counts["continued_calls"] == 1
    assert RENDERER.tokenizer.decode(backend.prompts[0]).count(IMAGE) == 1
    assert at.sampler.record.endpoint_counts.image_placeholders == 1


async def test_requests_that_need_no_sampling_are_no_call() -> None:
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
        prompt: Json = {"contents": [{"parts": [{"text": USER["content"]}]}]}
        for request in (prompt, {"generateContentRequest": prompt}):
            url = f"{at.url}/v1beta/models/m:countTokens"
            async with at.http.post(url, json=request) as answer:
                assert (await answer.json())["totalTokens"] == counted
        async with at.http.post(f"{at.url}/v1/embeddings", json={}) as answer:
            assert answer.status == 404
    assert len(at.sampler.record.turns) == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_an_undelivered_reply_is_replayed(stream: bool) -> None:
    backend = GatedReplies("one", "two")
    async with opened(backend) as at:
        hasty = asyncio.create_task(at.chat([USER], stream=stream))
        await backend.requested.wait()
        hasty.cancel()
        await asyncio.gather(hasty, return_exceptions=True)
        again = asyncio.create_task(at.chat([USER]))
        await until(lambda: at.endpoint.counts["replayed"])
        backend.go.set()
        assert (await again)["choices"][0]["message"]["content"] == "one"
        assert (await at.chat([USER]))["choices"][0]["message"]["content"] == "two"
    assert len(at.sampler.record.turns) == 2


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_slow_reply_is_waited_for_with_keep_alives(
    route: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_endpoint, "KEEP_ALIVE_S", 0.05)
    backend = GatedReplies("slowly")
    body = {"input": "Fix it.", "messages": [USER], "max_tokens": 50, "stream": stream}
    body["contents"] = [{"parts": [{"text": "Fix it."}]}]
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
        assert at.endpoint.ended.result() is failure


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
        assert at.endpoint.ended.result().code is code


class GatedReplies(Replies):
    """Says nothing until it may."""

    def __init__(self, *replies: Reply) -> None:
        super().__init__(*replies)
        self.requested, self.go = asyncio.Event(), asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requested.set()
        await self.go.wait()
        return await super().generate(request)


async def test_half_of_a_surrogate_pair_is_read_as_a_replacement() -> None:
    body = rb'{"messages": [{"role": "user", "content": "cut \ud83d"}]}'
    async with opened(Replies("yes")) as at:
        async with at.http.post(at.url + ROUTES["chat"], data=body) as answer:
            assert answer.status == 200
        assert at.sampler.record.messages[0].content == "cut \ufffd"


class Light(ChatMLRenderer):
    """Renders on the loop only what is light."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Int32:
        assert text_bytes(messages) <= LIGHT_BYTES
        return super().prompt(messages, tools)

    def bridge(self, completion_ids: Int32, messages: Sequence[Message]) -> Int32:
        assert text_bytes(messages) <= LIGHT_BYTES
        return super().bridge(completion_ids, messages)


@asynccontextmanager
async def off_the_loop(backend: Backend, **limits: Json) -> AsyncIterator[Open]:
    spec = RendererSpec(model="bytes").to_json()
    renderer = Light(ByteTokenizer())
    async with opened(backend, renderer=renderer, renderer_spec=spec, **limits) as at:
        yield at
    close()


async def test_what_is_long_is_rendered_in_a_helper_to_the_same_ids() -> None:
    texts = ["a log: " + "x" * 100_000, "y" * 50_000]
    backend = Replies(CALL, "done")
    async with off_the_loop(backend) as at:
        messages: list[Json] = [{"role": "user", "content": texts[0]}]
        message = (await at.chat(messages))["choices"][0]["message"]
        call_id = message["tool_calls"][0]["id"]
        messages += [message, {"role": "tool", "tool_call_id": call_id, "content": texts[1]}]
        body = {"messages": [{"role": "user", "content": texts[0]}]}
        async with at.http.post(at.url + "/v1/messages/count_tokens", json=body) as answer:
            counted = (await answer.json())["input_tokens"]
        assert (await at.chat(messages))["choices"][0]["message"]["content"] == "done"
        assert at.endpoint.counts["continued_calls"] == 1
    tools = (ToolSpec("bash", "", {"type": "object"}),)
    first = RENDERER.prompt([Message(role="user", content=texts[0])], tools)
    np.testing.assert_array_equal(backend.prompts[0], first)
    result = Message(role="tool", name="bash", content=texts[1])
    bridge = RENDERER.bridge(backend.completions[0].token_ids_C, [result])
    np.testing.assert_array_equal(backend.prompts[1][-len(bridge) :], bridge)
    assert counted == len(RENDERER.prompt([Message(role="user", content=texts[0])], ()))


@pytest.mark.parametrize(
    ("route", "size", "status", "code"),
    [
        ("/v1/messages/count_tokens", 10_000, 400, None),
        ("/v1/chat/completions", 10_000, 503, FailureCode.BAD_TASK),
        ("/v1/chat/completions", 1 << 20, 400, None),
    ],
)
async def test_what_no_sequence_can_hold_is_refused_before_it_is_rendered(
    route: str, size: int, status: int, code: FailureCode | None
) -> None:
    async with opened(Replies(), renderer=Renders(), max_tokens=5000) as at:
        body = orjson.dumps({"messages": [{"role": "user", "content": "x" * size}]})
        async with at.http.post(at.url + route, data=io.BytesIO(body)) as answer:
            assert answer.status == status
            assert "of more than" in (text := await answer.text()) or "at most 5,000" in text
        assert (at.endpoint.ended.done() and at.endpoint.ended.result().code) == (code or False)


class Renders(ChatMLRenderer):
    """Renders nothing."""

    def __init__(self) -> None:
        super().__init__(ByteTokenizer())

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Int32:
        raise AssertionError


async def test_connections_that_say_nothing_keep_nobody_out() -> None:
    """The oldest idle connections are closed where there are more than one attempt may have."""
    async with opened(Replies("one")) as at, AsyncExitStack() as stack:
        host, port = at.url.removeprefix("http://").split(":")
        streams = []
        for _ in range(connections.MOST + 10):
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
            streams.append(reader)
        assert (await at.chat([USER]))["choices"][0]["message"]["content"] == "one"
        for reader in streams[:10]:
            assert await reader.read() == b""


@pytest.mark.parametrize(("sizes", "status"), [([10], b"400"), ([249_000] * 8, b"429")])
async def test_bodies_that_never_end_are_bounded_in_time_and_together(
    sizes: list[int], status: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_endpoint, "READ_S", 0.2 if len(sizes) == 1 else 600.0)
    async with opened(Replies(), max_tokens=5000) as at, AsyncExitStack() as stack:
        answers = list[asyncio.Task[bytes]]()
        for size in sizes:
            host, port = at.url.removeprefix("http://").split(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 250000"
            writer.write(head + b"\r\n\r\n" + b"x" * size)
            answers.append(asyncio.create_task(reader.readline()))
        done, pending = await asyncio.wait(answers, return_when=asyncio.FIRST_COMPLETED)
        assert all(status in task.result() for task in done)
        for task in pending:
            task.cancel()


@pytest.mark.parametrize(("num_headers", "status"), [(60, b"200"), (70, b"400")])
async def test_a_request_has_at_most_64_headers(num_headers: int, status: bytes) -> None:
    async with opened(Replies()) as at:
        host, port = at.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = b"".join(b"X-%d: x\r\n" % number for number in range(num_headers))
        writer.write(b"HEAD / HTTP/1.1\r\nHost: x\r\n" + head + b"\r\n")
        assert status in await reader.readline()
        writer.close()


async def test_a_reply_that_is_not_read_is_kept_and_its_connection_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_endpoint, "WRITE_S", 0.2)
    text, sampling = "x" * 400_000, SamplingParams(max_tokens=500_000)
    async with opened(Replies(text), buffer_bytes=4096, sampling=sampling) as at:
        host, port = at.url.removeprefix("http://").split(":")
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(deaf, (host, int(port)))
            body = orjson.dumps({"messages": [USER], "tools": [TOOL]})
            head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
            await loop.sock_sendall(deaf, head % len(body) + body)
            await until(lambda: at.sampler.record.turns, "sampled")
            await until(lambda: not at.endpoint._connections.connections, "closed")
        assert (await at.chat([USER]))["choices"][0]["message"]["content"] == text
        assert at.endpoint.counts["replayed"] == 1


async def test_the_record_keeps_a_bounded_text_of_what_an_agent_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conversation_tree, "MAX_MESSAGE_BYTES", 1000)
    async with opened(Replies("one", "two")) as at:
        for text in ("short", "é" * 600):  # in bytes, not in letters
            await at.chat([{"role": "user", "content": text}])
        texts = [message.content for message in at.sampler.record.messages]
    assert "short" in texts
    assert "[1,200 bytes are left out]" in texts


async def test_the_history_of_an_attempt_is_stored_once_not_with_each_call() -> None:
    """A conversation that grows by 40 kB a call is held once, not once a call."""
    replies = [Message(role="assistant", content="go on")] * 30
    backend = Replies(*replies)
    async with opened(backend) as at:
        messages: list[Json] = []
        tracemalloc.start()
        try:
            for number in range(30):
                messages.append({"role": "user", "content": f"{number}" + "x" * 40_000})
                messages.append((await at.chat(messages))["choices"][0]["message"])
                backend.prompts.clear()
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert at.endpoint.counts["continued_calls"] == 29
    assert kept < 25 << 20  # all ids, twice, and all texts once


async def test_who_took_most_of_the_loop_is_let_through_last() -> None:
    turns, order = Share(), list[str]()
    accounts = {"much": Account(), "some": Account(), "little": Account()}
    accounts["much"].take(9.0)
    accounts["some"].take(1.0)

    async def ask(name: str) -> None:
        await turns.admit(accounts[name])
        order.append(name)

    turns.pause(0.01)
    await asyncio.gather(*map(ask, ("much", "some", "much", "some", "little")))
    assert order == ["little", "some", "some", "much", "much"]


async def test_who_takes_much_gets_a_fifth_of_the_loop() -> None:
    turns, account, loop = Share(), Account(), asyncio.get_running_loop()
    account.take(9.0)
    began = loop.time()
    turns.pause(0.1)  # somebody took a tenth of a second
    await turns.admit(account)
    assert loop.time() - began >= 5 * 0.1


CHARGED = """
import asyncio, os, socket, sys
import aiohttp
from prorl.agents.sampler import Sampler
from prorl.agents.capture.model_endpoint import ModelEndpoint
from prorl.linux import crashes
from prorl.renderer.chatml import ChatMLRenderer
from prorl.testing import Replies
from prorl.tokenizer import ByteTokenizer
from tests.capture.scripted_attempt import attempt

class Crashes(ChatMLRenderer):
    def prompt(self, messages, tools):
        os.abort()

async def drive(url):
    context = attempt(Replies(), renderer=Crashes(ByteTokenizer()))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url.set_result(f"http://127.0.0.1:{listener.getsockname()[1]}/v1/chat/completions")
        async with ModelEndpoint(context, Sampler(context)).listening(listener):
            await asyncio.sleep(600)

async def main():
    crashes.start()
    url = asyncio.get_running_loop().create_future()
    driving = asyncio.create_task(crashes.attribute_steps("run/5/2", drive(url)))
    async with aiohttp.ClientSession() as http:
        await http.post(await url, json={"messages": [{"role": "user", "content": "x"}]})

asyncio.run(main())
"""


def test_a_request_that_ends_the_worker_is_charged_to_its_attempt() -> None:
    page = crashes.page()
    try:
        child = subprocess.run(
            [sys.executable, "-c", CHARGED],
            pass_fds=[page],
            env={**os.environ, crashes.VARIABLE: str(page)},
            cwd=Path(__file__).parents[2],
            stderr=subprocess.DEVNULL,
            timeout=60,
        )
        assert (child.returncode, crashes.read(page)) == (-signal.SIGABRT, "run/5/2")
    finally:
        os.close(page)


@pytest.mark.parametrize("size", [1, LIGHT_BYTES])
async def test_a_refusal_is_the_same_wherever_a_request_is_read_and_ends_no_helper(
    size: int,
) -> None:
    body = {"messages": [{"role": "user", "content": "x" * size}], "tools": [3]}
    for _ in range(3):
        with pytest.raises(RefusedError) as caught:
            await read("/chat/completions", orjson.dumps(body), 0.0)
        assert str(caught.value) == "a tool is a int; expected a JSON object"
    assert (await pool(PROGRAM)).starts == (size >= LIGHT_BYTES)
