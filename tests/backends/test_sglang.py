"""Tests how SGLang differs from vLLM, over its stand-in; `test_contract.py` has what is alike."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import aiohttp
import numpy as np
import pytest

from prorl.backends import open_backend
from prorl.backends.embedded import TOY
from prorl.backends.embedded.backend import EmbeddedBackend
from prorl.backends.sglang import SglangBackend
from prorl.backends.vllm_http import HttpLimits
from prorl.backends.weight_target import LOADING, WeightTarget
from prorl.envs import get_env
from prorl.errors import BackendError, ConfigError
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import ByteTokenizer, HFTokenizer
from prorl.types import Completion, RunWeights, SamplingParams
from tests.backends.embedded.helpers import prompts, request
from tests.backends.sglang_server import SglangServer
from tests.service.running_gateway import running_gateway

TOKENIZER = HFTokenizer(TOY)
(PROMPT,) = prompts(1)
LONG = replace(request(PROMPT, stops=(), max_tokens=200), weights=RunWeights("tag", published=True))


@asynccontextmanager
async def toy(
    *, incremental: bool = True, states: bool = True
) -> AsyncIterator[tuple[SglangServer, SglangBackend, WeightTarget]]:
    engine = EmbeddedBackend(TOY)
    async with (
        SglangServer(engine, TOKENIZER, incremental=incremental, states=states) as server,
        aiohttp.ClientSession() as session,
    ):
        limits = HttpLimits(stream_interval=4)
        backend = SglangBackend(server.url, TOKENIZER.vocab_size, limits=limits)
        yield server, backend, WeightTarget(session, server.url)
        await backend.close()
        await engine.close()


async def test_a_server_with_logprobs_of_the_model_alone_is_refused() -> None:
    renderer = ChatMLRenderer(ByteTokenizer())
    raw = open_backend("scripted:random?raw=1", renderer, get_env)
    async with SglangServer(raw, ByteTokenizer()) as server:
        backend = SglangBackend(server.url, renderer.vocab_size)
        with pytest.raises(ConfigError, match="logprobs do not follow the temperature"):
            await backend.probe()
        await backend.close()


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}])
async def test_logprobs_are_those_within_what_a_cut_leaves(cut: dict[str, float]) -> None:
    async with toy() as (server, backend, _):
        sampling = SamplingParams(max_tokens=12, **cut)  # type: ignore[arg-type]
        generate_request = replace(request(PROMPT), sampling=sampling)
        completion = await backend.generate(generate_request)
        expected = await EmbeddedBackend(TOY).generate(generate_request)
        assert np.array_equal(completion.token_ids_C, expected.token_ids_C)
        np.testing.assert_allclose(completion.logprobs_C, expected.logprobs_C, atol=1e-5)
        assert server.bodies[-1]["return_sampling_mask"]


@pytest.mark.parametrize("incremental", [True, False])
async def test_tokens_say_which_weights_sampled_them_across_an_update(incremental: bool) -> None:
    async with toy(incremental=incremental) as (_, backend, target):
        came = asyncio.Event()
        parts: list[Completion] = []

        def hear(part: Completion) -> None:
            parts.append(part)
            came.set()

        work = asyncio.create_task(backend.generate(replace(LONG, on_part=hear)))
        await came.wait()
        await target.pause("keep")
        await target.update(str(TOY), 1, "tag:1:x")
        assert await target.label() == "tag:1:x"
        await target.resume()
        completion = await work
        assert len(completion.token_ids_C) == 200
        assert completion.versions == (0, 1)
        assert 0 < completion.version_ends[0] < completion.version_ends[1] == 200
        assert np.array_equal(
            parts[0].token_ids_C, completion.token_ids_C[: len(parts[0].token_ids_C)]
        )
        assert backend._repeats is not incremental


async def test_what_an_aborting_pause_cuts_is_kept() -> None:
    async with toy() as (_, backend, target):
        came = asyncio.Event()
        generate_request = replace(LONG, on_part=lambda part: came.set())
        work = asyncio.create_task(backend.generate(generate_request))
        await came.wait()
        await target.pause()
        completion = await work
        assert completion.finish_reason == "abort"
        assert 0 < len(completion.token_ids_C) < 200
        assert completion.versions == (0,)
        await target.resume()


async def test_an_older_server_is_queried_for_its_label() -> None:
    async with toy(states=False) as (_, backend, target):
        assert (await backend.generate(LONG)).versions == (0,)
        backend.weights_changed()
        await target.rename("tag:4:x")
        request = replace(LONG, request_id="test/again")
        assert (await backend.generate(request)).versions == (4,)


async def test_weights_that_do_not_load_leave_no_version(tmp_path: Path) -> None:
    async with toy() as (_, _, target):
        await target.pause()
        with pytest.raises(BackendError, match="HTTP 400"):
            await target.update(str(tmp_path), 1, "tag:1:x")
        assert await target.label() == LOADING
        (tmp_path / "adapter_config.json").write_text("{}")
        with pytest.raises(BackendError, match="takes no adapter"):
            await target.update(str(tmp_path), 1, "tag:1:x")
        with pytest.raises(BackendError, match="SGLang cannot pause by 'wait'"):
            await target.pause("wait")


async def test_a_service_takes_it_into_the_pool_and_gives_it_weights(tmp_path: Path) -> None:
    async with (
        toy() as (server, backend, target),
        running_gateway(tmp_path, tokenizer=str(TOY)) as w,
    ):
        status, reply = await w.http("POST", "/v1/backends", {"name": server.url})
        assert (status, reply["state"]) == (201, "ready"), reply
        await w.run()
        body = {"version": 1, "path": str(TOY)}
        status, reply = await w.http("POST", "/v1/runs/r/versions", body)
        assert (status, reply["failed"]) == (201, {}), reply
        assert (await target.label()).split(":")[1] == "1"
        assert server.served == str(TOY)
        assert await backend.discover() == str(TOY), "it was renamed, and serves all the same"
