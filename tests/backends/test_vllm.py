"""The HTTP client against servers that misbehave, and the server against clients that do.

Real sockets, scripted replies.
"""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import orjson
import pytest

from prorl.backends import open_backend
from prorl.backends.embedded import TOY
from prorl.backends.embedded.backend import EmbeddedBackend
from prorl.backends.server import TokenServer
from prorl.backends.vllm import VllmBackend
from prorl.backends.vllm_http import HttpLimits, ServerConnections
from prorl.backends.vllm_reply import MAX_EVENT_BYTES, EventParser
from prorl.envs import get_env
from prorl.errors import BackendError, ConfigError
from prorl.protocols import Backend
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import ByteTokenizer, HFTokenizer
from prorl.types import (
    BackendFault,
    Completion,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Json,
    PolicyVersion,
    RunWeights,
    SamplingParams,
)
from tests.backends.contradictory_replies import LIES
from tests.backends.misbehaving_server import Misbehaving, Mode

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.types import Float32

TOKENIZER = ByteTokenizer()
RENDERER = ChatMLRenderer(TOKENIZER)
REQUEST = GenerateRequest(
    prompt_ids_L=np.arange(4, dtype=np.int32),
    sampling=SamplingParams(max_tokens=8),
    seed=2**63 - 1,
    stop_token_ids=(258,),
    request_id="run/1/1/0",
    session="key 1",
)
CHOICE: Mapping[str, Json] = {
    "token_ids": [65, 258],
    "logprobs": {"token_logprobs": [-0.5, 0]},
    "finish_reason": "stop",
}


@asynccontextmanager
async def _raw_server(reply: bytes, *, wait: bool = False) -> AsyncIterator[str]:
    """A server that sends the same bytes to everybody, and then hangs up or waits."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(reply)
            await writer.drain()
            if wait:
                await reader.read()
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def _http(body: bytes, status: str = "200 OK", length: int | None = None) -> bytes:
    return b"HTTP/1.1 %s\r\nContent-Length: %d\r\n\r\n%s" % (
        status.encode(),
        len(body) if length is None else length,
        body,
    )


async def _code(
    reply: bytes, *, wait: bool = False, limits: HttpLimits | None = None
) -> FailureCode:
    async with _raw_server(reply, wait=wait) as url:
        backend = VllmBackend(url, TOKENIZER.vocab_size, model="m", limits=limits)
        try:
            with pytest.raises(BackendError) as caught:
                await backend.generate(REQUEST)
        finally:
            await backend.close()
    return caught.value.code


USAGE: Mapping[str, Json] = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
HEAD: Mapping[str, Json] = {"id": f"cmpl-{REQUEST.request_id}", "model": "m"}


def _choice(**changes: Json) -> bytes:
    return orjson.dumps({**HEAD, "choices": [{**CHOICE, **changes}], "usage": USAGE})


def _saved(array: NDArray[Any]) -> str:
    """Encodes an array as vLLM's `numpy2base64`."""
    with io.BytesIO() as buffer:
        np.save(buffer, array)
        return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize("variant", ["asked", "not asked", "texts", "scalars"])
async def test_routed_experts_are_decoded_only_where_they_were_requested(variant: str) -> None:
    """[tokens, layers, top_k] of all tokens but the last, as vLLM 0.32 saves them."""
    experts = np.arange(5 * 3 * 2, dtype=np.uint8).reshape(5, 3, 2)
    sent = {"texts": np.array([["a"]]), "scalars": np.zeros(5)}.get(variant, experts)
    request = replace(REQUEST, routing_from=-1 if variant == "not asked" else 0)
    async with _raw_server(_http(_choice(routed_experts=_saved(sent)))) as url:
        backend = VllmBackend(url, TOKENIZER.vocab_size, model="m")
        body = backend._body(request, "m", "")
        assert ("routed_experts_prompt_start" in body) == (variant != "not asked")
        assert ("stream" in body) == (variant == "not asked"), "its streams have none"
        try:
            if variant in ("texts", "scalars"):
                with pytest.raises(BackendError, match="routing of experts"):
                    await backend.generate(request)
                return
            routed_experts = (await backend.generate(request)).routed_experts
        finally:
            await backend.close()
    if variant == "not asked":
        assert routed_experts is None
    else:
        np.testing.assert_array_equal(routed_experts, experts.reshape(5, 6))


OFF: Mapping[str, Json] = {
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}


async def _refusal_of(lie: str) -> str:
    """Returns the refusal of a reply that lies, and of its partial completion."""
    async with Misbehaving(Mode.LIES) as server:
        server.lie = LIES[lie]
        backend = VllmBackend(server.url, TOKENIZER.vocab_size)
        await backend.discover()
        parts: list[Completion] = []
        request = replace(
            REQUEST,
            sampling=SamplingParams(max_tokens=200),
            stop_token_ids=RENDERER.stop_token_ids,
            on_part=parts.append,
        )
        try:
            with pytest.raises(BackendError) as caught:
                await backend.generate(request)
        finally:
            await backend.close()
        assert caught.value.code is FailureCode.BACKEND_PROTOCOL, caught.value
        assert caught.value.trouble in (BackendFault.MALFORMED, None)
        assert len(parts) <= 1, "told while it came, and not once more at its end"
        return caught.value.message


@pytest.mark.parametrize("lie", LIES)
async def test_a_reply_that_contradicts_itself_is_refused(lie: str) -> None:
    assert await _refusal_of(lie)


def test_a_line_without_end_costs_no_more_than_its_length() -> None:
    """Joined once, where it ends; and it has to end."""
    events, piece = EventParser(), b"x" * 4096
    for _ in range(MAX_EVENT_BYTES // len(piece)):
        assert list(events.feed(piece)) == []
    assert len(events._rest) > 1, "kept in pieces"
    with pytest.raises(ValueError, match="a line of more than"):
        list(events.feed(piece))


async def test_a_packed_reply_is_not_unpacked() -> None:
    """A gigabyte of blanks is a megabyte."""
    body = gzip.compress(_choice() + b" " * (64 << 20))
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    assert await _code(head + body) is FailureCode.BACKEND_PROTOCOL


async def test_a_request_id_of_any_letters_comes_back() -> None:
    async with TokenServer(_Recorder(), TOKENIZER, model="toy") as server:
        backend = VllmBackend(server.url, TOKENIZER.vocab_size)
        await backend.generate(replace(REQUEST, request_id="läuf/1 2/1/0"))
        await backend.close()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"not json",
        b"[]",
        b"{}",
        b'{"choices": []}',
        b'{"choices": null}',
        _choice(token_ids=None),
        _choice(token_ids=[]),
        _choice(token_ids=[65, 2**40]),
        _choice(token_ids=[65, 265]),
        _choice(token_ids=[[65, 66]]),
        _choice(token_ids=list(range(9))),
        _choice(logprobs=None),
        (
            b'{"id": "cmpl-run/1/1/0", "choices": [{"token_ids": [65],'
            b' "logprobs": {"token_logprobs": [NaN]},'
            b' "finish_reason": "stop"}]}'
        ),
        (
            b'{"id": "cmpl-run/1/1/0", "choices": [{"token_ids": [65],'
            b' "logprobs": {"token_logprobs": [-1e999]},'
            b' "finish_reason": "stop"}]}'
        ),
        _choice(finish_reason="tired"),
        _choice(weight_versions=[{"version": "1", "start": 0, "end": 1}]),
        _choice(
            weight_versions=[
                {"version": "1", "start": 0, "end": 2},
                {"version": "2", "start": 2, "end": 2},
            ]
        ),
    ],
)
async def test_a_reply_that_makes_no_sense_is_a_protocol_error(body: bytes) -> None:
    assert await _code(_http(body)) is FailureCode.BACKEND_PROTOCOL


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (b"", FailureCode.BACKEND_UNAVAILABLE),
        (b"garbage\r\n\r\n", FailureCode.BACKEND_PROTOCOL),
        (_http(_choice(), length=10_000), FailureCode.BACKEND_UNAVAILABLE),
        (_http(b"busy", "503 Busy"), FailureCode.BACKEND_UNAVAILABLE),
        (_http(b"slow down", "429 Too Many"), FailureCode.BACKEND_UNAVAILABLE),
        (_http(b"too long", "400 Bad Request"), FailureCode.BACKEND_PROTOCOL),
        (_http(b"", "302 Found"), FailureCode.BACKEND_PROTOCOL),
    ],
)
async def test_http_statuses_and_connection_faults_are_distinguished(
    reply: bytes, code: FailureCode
) -> None:
    assert await _code(reply) is code


@pytest.mark.parametrize("limits", [HttpLimits(read_s=0.2), HttpLimits(request_s=0.2)])
async def test_silence_ends_the_call(limits: HttpLimits, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prorl.backends.vllm.LABEL_S", 0.2)
    assert (
        await _code(_http(b"{", length=100), wait=True, limits=limits)
        is FailureCode.BACKEND_UNAVAILABLE
    )


async def test_versions_split_where_the_server_says() -> None:
    stated = [{"version": "4", "start": 0, "end": 1}, {"version": "5", "start": 1, "end": 2}]
    async with _raw_server(_http(_choice(weight_versions=stated))) as url:
        backend = VllmBackend(url, TOKENIZER.vocab_size, model="m")
        completion = await backend.generate(REQUEST)
        assert (completion.version_ends, completion.versions) == ((1, 2), (4, 5))
        await backend.close()


async def test_a_reply_without_versions_has_the_version_of_its_sending() -> None:
    async with _raw_server(_http(_choice())) as url:
        backend = VllmBackend(url, TOKENIZER.vocab_size, model="m")
        request = replace(REQUEST, newest_version=PolicyVersion(6))
        assert (await backend.generate(request)).versions == (6,), "the trainer's own word"
        request = replace(request, weights=RunWeights("tag", published=True))
        assert (await backend.generate(request)).versions == (-1,), "published, and nobody says so"
        await backend.close()


class _Recorder:
    """A backend that keeps its requests, and can be told to wait."""

    name = "recorder"

    def __init__(self) -> None:
        self.requests: list[GenerateRequest] = []
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()
        self.wait = False

    async def generate(self, request: GenerateRequest) -> Completion:
        self.requests.append(request)
        self.started.set()
        try:
            if self.wait:
                await asyncio.Event().wait()
        finally:
            if self.wait:
                self.cancelled.set()
        return await open_backend("scripted:noop", RENDERER, get_env).generate(request)

    async def close(self) -> None:
        pass


async def test_the_request_arrives_whole_and_hanging_up_cancels_it() -> None:
    recorder = _Recorder()
    async with TokenServer(recorder, TOKENIZER, model="toy") as server:
        backend = VllmBackend(server.url, TOKENIZER.vocab_size)
        await backend.generate(REQUEST)
        (got,) = recorder.requests
        np.testing.assert_array_equal(got.prompt_ids_L, REQUEST.prompt_ids_L)
        assert (got.sampling, got.seed, got.stop_token_ids) == (
            REQUEST.sampling,
            REQUEST.seed,
            REQUEST.stop_token_ids,
        )
        assert (got.request_id, got.session) == (REQUEST.request_id, "key%201")
        recorder.wait = True
        recorder.started.clear()
        call = asyncio.create_task(backend.generate(REQUEST))
        await recorder.started.wait()
        call.cancel()
        await asyncio.wait_for(recorder.cancelled.wait(), 60)
        await backend.close()


async def test_a_full_context_is_the_policys_budget() -> None:
    async with TokenServer(_Recorder(), TOKENIZER, model="toy", max_model_len=4) as server:
        backend = VllmBackend(server.url, TOKENIZER.vocab_size)
        with pytest.raises(BackendError) as caught:
            await backend.generate(REQUEST)
        assert caught.value.code is FailureCode.MAX_TOKENS
        await backend.close()


class _Filling(EmbeddedBackend):
    """Puts its model's own top_k in the place of 0, as engines do with what they take for unset."""

    async def generate(self, request: GenerateRequest) -> Completion:
        top_k = request.sampling.top_k or 8
        return await super().generate(
            replace(request, sampling=replace(request.sampling, top_k=top_k))
        )


class _Liar(EmbeddedBackend):
    """Says other logprobs than it samples by."""

    change: Callable[[Float32], Float32]

    async def generate(self, request: GenerateRequest) -> Completion:
        completion = await super().generate(request)
        changed = np.minimum(type(self).change(completion.logprobs_C), 0.0).astype(np.float32)
        return replace(completion, logprobs_C=changed)


def _liar(change: Callable[[Float32], Float32]) -> Callable[[], Backend]:
    return lambda: type("Liar", (_Liar,), {"change": staticmethod(change)})(TOY)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: EmbeddedBackend(TOY), ""),
        (lambda: _Filling(TOY), "--generation-config vllm"),
        (_liar(lambda logprobs: logprobs - 0.1), "neither shifted nor scaled"),
        (_liar(lambda logprobs: logprobs + 0.1), "neither shifted nor scaled"),
        (_liar(lambda logprobs: 0.8 * logprobs), "neither shifted nor scaled"),
        (_liar(lambda logprobs: 1.25 * logprobs), "neither shifted nor scaled"),
        (lambda: open_backend("scripted:random", RENDERER, get_env), ""),
        (lambda: open_backend("scripted:random?raw=1", RENDERER, get_env), "processed_logprobs"),
    ],
    ids=["ours", "fills top_k", "less", "more", "four fifths", "five fourths", "dice", "raw"],
)
async def test_probe_refuses_logprobs_of_another_distribution(
    make: Callable[[], Backend], says: str
) -> None:
    policy = make()
    tokenizer = HFTokenizer(TOY) if isinstance(policy, EmbeddedBackend) else TOKENIZER
    async with TokenServer(policy, tokenizer, model="toy") as server:
        backend = VllmBackend(server.url, tokenizer.vocab_size)
        with pytest.raises(ConfigError, match=says) if says else nullcontext():
            await backend.probe()
        await backend.close()
    await policy.close()


async def test_disabled_sampling_parameters_are_sent_explicitly() -> None:
    """The parameters that a request leaves out vLLM takes from the model's
    generation_config.json.
    """
    async with Misbehaving() as server:
        backend = VllmBackend(server.url, TOKENIZER.vocab_size)
        await backend.generate(
            replace(REQUEST, sampling=SamplingParams(max_tokens=99), stop_token_ids=())
        )
        await backend.close()
    (body,) = server.bodies
    assert {name: body.get(name) for name in OFF} == OFF
    assert "priority" not in body, "a server without priorities may refuse it"


async def test_a_priority_is_sent_to_the_server() -> None:
    async with Misbehaving() as server:
        backend = VllmBackend(server.url, TOKENIZER.vocab_size)
        sampling = SamplingParams(max_tokens=99, priority=-7)
        await backend.generate(replace(REQUEST, sampling=sampling, stop_token_ids=()))
        await backend.close()
    assert server.bodies[0]["priority"] == -7


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"prompt": "text"}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, 999]}, "from 0 to 264"),
        ({"prompt": [1], "n": 2}, "`$.n`"),
        ({"prompt": [1], "stream": True, "stream_interval": 0}, "stream_interval"),
        ({"prompt": [1], "temperature": -1}, "temperature"),
        ({"prompt": [1], "max_tokens": True}, "max_tokens"),
        ({"prompt": [1], "seed": "x"}, "seed"),
        ({"prompt": [1], "min_p": 0.1}, "min_p"),
        ({"prompt": [1], "repetition_penalty": 1.05}, "repetition_penalty"),
        ({"prompt": [1], "model": "other"}, "'other'"),
    ],
)
async def test_the_server_refuses_what_it_does_not_serve(body: Json, expected: str) -> None:
    async with (
        TokenServer(_Recorder(), TOKENIZER, model="toy") as server,
        aiohttp.ClientSession() as session,
    ):
        async with session.post(f"{server.url}/v1/completions", json=body) as response:
            assert response.status == 400
            assert expected in (await response.json())["error"]["message"]
        async with session.post(f"{server.url}/v1/completions", data=b"{") as response:
            assert response.status == 400


async def test_a_port_in_use_is_named() -> None:
    async with TokenServer(_Recorder(), TOKENIZER, model="toy") as server:
        port = int(server.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match="cannot listen"):
            async with TokenServer(_Recorder(), TOKENIZER, model="toy", port=port):
                pass


async def test_max_tokens_is_capped_by_the_room_in_the_context() -> None:
    policy = open_backend("scripted:random", RENDERER, get_env)
    async with TokenServer(policy, TOKENIZER, model="m", max_model_len=64) as server:
        backend = VllmBackend(server.url, TOKENIZER.vocab_size)
        await backend.probe()
        request = replace(
            REQUEST,
            prompt_ids_L=np.arange(60, dtype=np.int32),
            sampling=SamplingParams(max_tokens=500),
            stop_token_ids=(),
        )
        got = await backend.generate(request)
        assert (len(got.token_ids_C), got.finish_reason) == (4, FinishReason.LENGTH)
        await backend.close()


async def test_a_closed_client_opens_no_new_connection() -> None:
    async with asyncio.timeout(30):
        server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            connections = ServerConnections(f"http://127.0.0.1:{port}", "", HttpLimits())
            await connections.close()
            with pytest.raises(BackendError, match="were closed"):
                await connections.exchange("GET", "/health")
