"""The contract of every backend: the same body over scripted backends and the embedded one,
in-process, over HTTP as vLLM speaks it, and as SGLang does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import replace

import numpy as np
import pytest

from prorl.backends import open_backend
from prorl.backends.embedded import TOY
from prorl.backends.embedded.backend import EmbeddedBackend
from prorl.backends.server import TokenServer
from prorl.backends.sglang import SglangBackend
from prorl.backends.vllm import VllmBackend
from prorl.completion import check_completion
from prorl.envs import get_env
from prorl.errors import BackendError
from prorl.protocols import Backend
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import ByteTokenizer, HFTokenizer
from prorl.types import (
    Completion,
    FailureCode,
    FinishReason,
    GenerateRequest,
    Message,
    PolicyVersion,
    RunWeights,
    SamplingParams,
)
from tests.backends.sglang_server import SglangServer

TOKENIZER = ByteTokenizer()
RENDERER = ChatMLRenderer(TOKENIZER)

Open = Callable[[str], Awaitable[Backend]]

SAMPLERS = pytest.mark.parametrize("sampler", ["scripted:random", "embedded"])
"""Backends that sample from a distribution."""
VOCAB_SIZES = {"scripted:random": TOKENIZER.vocab_size, "embedded": HFTokenizer(TOY).vocab_size}


@pytest.fixture(params=["in-process", "http", "sglang", "sglang-incremental"])
async def open_(request: pytest.FixtureRequest) -> AsyncIterator[Open]:
    """Opens a scripted backend by URL, or the embedded one on the toy checkpoint, directly or
    behind a server.
    """
    async with AsyncExitStack() as stack:

        async def open_served(url: str) -> Backend:
            embedded = url == "embedded"
            backend: Backend = (
                EmbeddedBackend(TOY) if embedded else open_backend(url, RENDERER, get_env)
            )
            if request.param == "http":
                tokenizer = HFTokenizer(TOY) if embedded else TOKENIZER
                server = await stack.enter_async_context(
                    TokenServer(backend, tokenizer, model="toy")
                )
                stack.push_async_callback(backend.close)
                backend = VllmBackend(server.url, tokenizer.vocab_size)
            elif request.param != "in-process":
                tokenizer = HFTokenizer(TOY) if embedded else TOKENIZER
                stack.push_async_callback(backend.close)
                stand_in = await stack.enter_async_context(
                    SglangServer(backend, tokenizer, incremental="incremental" in request.param)
                )
                backend = SglangBackend(stand_in.url, tokenizer.vocab_size)
            stack.push_async_callback(backend.close)
            return backend

        yield open_served


def _request(
    text: str = "hello", seed: int = 7, temperature: float = 1.0, max_tokens: int = 64
) -> GenerateRequest:
    return GenerateRequest(
        prompt_ids_L=RENDERER.prompt([Message(role="user", content=text)], []),
        sampling=SamplingParams(temperature=temperature, max_tokens=max_tokens),
        seed=seed,
        stop_token_ids=RENDERER.stop_token_ids,
        request_id=f"run/1/1/{seed}",
        session="a key/with ünusual\r\nletters",
    )


def _same(completion: Completion, other: Completion) -> bool:
    return np.array_equal(completion.token_ids_C, other.token_ids_C) and np.array_equal(
        completion.logprobs_C, other.logprobs_C
    )


def _alike(completion: Completion, other: Completion) -> bool:
    """The same ids; logprobs as near as other neighbours and known prefixes leave them."""
    return np.array_equal(completion.token_ids_C, other.token_ids_C) and np.allclose(
        completion.logprobs_C, other.logprobs_C, rtol=0, atol=1e-4
    )


@SAMPLERS
async def test_ids_and_logprobs_are_valid_and_repeat_with_the_seed(
    open_: Open, sampler: str
) -> None:
    backend = await open_(sampler)
    first, again, other = [await backend.generate(_request(seed=seed)) for seed in (1, 1, 2)]
    check_completion(first, VOCAB_SIZES[sampler], 64)
    assert _alike(first, again)
    assert not _alike(first, other)
    assert first.versions == (0,)
    assert first.backend == backend.name


async def test_logprobs_are_the_same_numbers_on_both_sides_of_a_wire(open_: Open) -> None:
    """Float32 survives JSON text, to the last bit."""
    direct = await open_backend("scripted:random", RENDERER, get_env).generate(_request())
    assert _same(await (await open_("scripted:random")).generate(_request()), direct)


async def test_finish_reasons_length_and_stop_are_distinguished(open_: Open) -> None:
    backend = await open_("scripted:random")
    cut = await backend.generate(_request(max_tokens=2, seed=4))
    assert (len(cut.token_ids_C), cut.finish_reason) == (2, FinishReason.LENGTH)
    noop = await open_("scripted:noop")
    completion = await noop.generate(_request())
    assert completion.finish_reason is FinishReason.STOP
    assert int(completion.token_ids_C[-1]) in RENDERER.stop_token_ids
    assert RENDERER.parse(completion.token_ids_C).content == "I do not know."


@SAMPLERS
async def test_logprobs_follow_the_temperature(open_: Open, sampler: str) -> None:
    backend = await open_(sampler)
    hot = await backend.generate(_request(temperature=1000.0, max_tokens=8))
    np.testing.assert_allclose(hot.logprobs_C, -np.log(VOCAB_SIZES[sampler]), atol=0.1)
    cold = await backend.generate(_request(temperature=0.01, max_tokens=1))
    assert cold.logprobs_C[0] > -0.1


@SAMPLERS
async def test_many_at_once_keep_their_answers_apart(open_: Open, sampler: str) -> None:
    backend = await open_(sampler)
    expected = [await backend.generate(_request(seed=seed)) for seed in range(20)]
    got = await asyncio.gather(*(backend.generate(_request(seed=seed)) for seed in range(20)))
    assert all(_alike(completion, other) for completion, other in zip(expected, got, strict=True))


@pytest.mark.parametrize("fault", ["nan", "positive", "short", "foreign"])
async def test_impossible_replies_are_refused(open_: Open, fault: str) -> None:
    backend = await open_(f"scripted:faulty?base=noop&{fault}=1")
    with pytest.raises(BackendError) as caught:
        check_completion(await backend.generate(_request()), TOKENIZER.vocab_size, 64)
    assert caught.value.code is FailureCode.BACKEND_PROTOCOL


async def test_an_error_says_that_trying_again_may_help(open_: Open) -> None:
    backend = await open_("scripted:faulty?error=1")
    with pytest.raises(BackendError) as caught:
        await backend.generate(_request())
    assert caught.value.code is FailureCode.BACKEND_UNAVAILABLE


async def test_cancelling_ends_a_call_and_leaves_the_backend_usable(open_: Open) -> None:
    backend = await open_("scripted:faulty?base=noop&hang=0.5")
    finished = 0
    for seed in range(12):
        try:
            async with asyncio.timeout(0.3):
                await backend.generate(_request(seed=seed))
            finished += 1
        except TimeoutError:
            pass
    assert 0 < finished < 12


async def test_the_version_is_the_backends(open_: Open) -> None:
    backend = await open_("scripted:noop")
    if isinstance(backend, VllmBackend):
        async with TokenServer(backend, TOKENIZER, model="chained") as outer:
            backend = VllmBackend(outer.url, TOKENIZER.vocab_size)
            # The server states its own version, which wins over what a client believes.
            request = replace(
                _request(),
                newest_version=PolicyVersion(3),
                weights=RunWeights("tag", published=True),
            )
            assert (await backend.generate(request)).versions == (0,)
            await backend.close()
    else:
        backend.policy_version = PolicyVersion(3)  # type: ignore[attr-defined]
        assert (await backend.generate(_request())).versions == (3,)
