"""The embedded backend as the service meets it: a process behind vLLM's token subset, new weights
while it serves.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from prorl.backends.embedded import TOY
from prorl.backends.embedded.backend import EmbeddedBackend
from prorl.backends.embedded.engine import EngineSettings
from prorl.backends.embedded.routes import control_routes
from prorl.backends.server import TokenServer
from prorl.backends.vllm import VllmBackend
from prorl.backends.weight_target import WeightTarget
from prorl.errors import BackendError
from prorl.types import FinishReason, RunWeights
from tests.backends.embedded.helpers import RENDERER, prompts, request
from tests.waiting import until


@asynccontextmanager
async def _process(
    *args: str, key: str = ""
) -> AsyncIterator[tuple[asyncio.subprocess.Process, dict[str, Any]]]:
    command = [sys.executable, "-m", "prorl.backends.embedded", "--model", str(TOY), *args]
    environment = {**os.environ, "VLLM_API_KEY": key}
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, env=environment
    )
    try:
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        yield process, json.loads(line.removeprefix(b"ready "))
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_a_process_serves_passes_the_probe_and_ends_on_sigterm() -> None:
    async with _process("--parent", str(os.getpid()), key="secret") as (process, ready):
        backend = VllmBackend(ready["url"], RENDERER.vocab_size, api_key="secret")
        await backend.probe()
        first, again = [await backend.generate(request(prompts(1)[0], 5)) for _ in range(2)]
        assert np.array_equal(first.token_ids_C, again.token_ids_C)
        assert again.cached_tokens > 0
        stranger = VllmBackend(ready["url"], RENDERER.vocab_size, model="toy")
        await stranger.health()
        with pytest.raises(BackendError, match="401"):
            await stranger.generate(request(prompts(1)[0]))
        await backend.close()
        await stranger.close()
        process.send_signal(signal.SIGTERM)
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_process_exits_when_its_parent_has_exited() -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "prorl.backends.embedded",
        "--model",
        str(TOY),
        "--parent",
        "1",
        stdout=asyncio.subprocess.PIPE,
    )
    assert await asyncio.wait_for(process.wait(), 60) == 1


@asynccontextmanager
async def _served(
    settings: EngineSettings | None = None,
) -> AsyncIterator[tuple[EmbeddedBackend, VllmBackend, aiohttp.ClientSession]]:
    """Server and client in this process; the session is a weight publisher's."""
    engine = EmbeddedBackend(TOY, settings=settings)
    server = TokenServer(
        engine,
        RENDERER.tokenizer,
        model="toy",
        routes=control_routes(engine),
        label=engine.label,
        max_model_len=engine.engine.length,
    )
    async with server:
        client = VllmBackend(server.url, RENDERER.vocab_size)
        async with aiohttp.ClientSession(server.url) as session:
            yield engine, client, session
        await client.close()
        await engine.close()


async def test_publishing_aborts_what_runs_and_the_continuation_has_the_next_version(
    tmp_path: Path,
) -> None:
    """In the gateway's own words (`prorl.backends.weight_target`)."""
    async with _served() as (engine, client, session):
        target = WeightTarget(session, client.name)
        whole = request(prompts(1)[0], 6, stops=(), max_tokens=300)
        running = asyncio.create_task(client.generate(whole))
        await until(lambda: engine.engine.sampled_tokens >= 20)
        await target.pause()
        partial = await running
        assert partial.finish_reason is FinishReason.ABORT
        assert 0 < len(partial.token_ids_C) < 300
        assert partial.versions == (0,)
        later_call = asyncio.create_task(
            client.generate(
                replace(
                    request(np.concatenate([whole.prompt_ids_L, partial.token_ids_C]), 6),
                    weights=RunWeights("run", published=True),
                )
            )
        )
        shutil.copytree(TOY, tmp_path / "next")
        await target.update(str(tmp_path / "next"), 5, "run:5:x")
        assert await target.label() == "run:5:x"
        assert not later_call.done()
        await target.resume()
        rest = await later_call
        assert rest.versions == (5,), "as the label reads for the run that published"
        assert rest.version_ends == (len(rest.token_ids_C),)


async def test_bad_updates_are_refused_and_serving_goes_on(tmp_path: Path) -> None:
    async with _served() as (engine, client, publisher):
        bodies: list[dict[str, object]] = [
            {},
            {"path": 3, "version": 1},
            {"path": str(tmp_path), "version": 1},
            {"path": str(TOY), "version": -1},
        ]
        for body in bodies:
            assert (await publisher.post("/update_weights", json=body)).status == 400
        assert (await publisher.post("/pause?mode=sideways")).status == 400
        assert (engine.paused, engine.version) == (False, 0)
        assert (await client.generate(request(prompts(1)[0]))).versions == (0,)


async def test_a_client_that_goes_away_leaves_the_batch() -> None:
    async with _served(EngineSettings(rows=2)) as (engine, client, _):
        leaving = [
            asyncio.create_task(
                client.generate(request(prompts(1)[0], seed, stops=(), max_tokens=400))
            )
            for seed in range(4)
        ]
        await until(lambda: engine.engine.sampled_tokens >= 10)
        for task in leaving:
            task.cancel()
        await asyncio.gather(*leaving, return_exceptions=True)
        await until(lambda: not engine.engine.busy)
        assert engine.engine.sampled_tokens < 4 * 400


async def test_an_error_inside_the_engine_fails_the_requests_and_not_the_server() -> None:
    engine = EmbeddedBackend(TOY)
    model, engine.engine._model = engine.engine._model, None  # type: ignore[assignment]
    with pytest.raises(BackendError, match="embedded engine"):
        await engine.generate(request(prompts(1)[0]))
    engine.engine._model = model
    assert len((await engine.generate(request(prompts(1)[0]))).token_ids_C) > 0
    await engine.close()


async def test_waiting_for_what_runs_before_a_pause_cuts_nothing_and_holds_what_comes() -> None:
    async with _served() as (engine, client, session):
        target = WeightTarget(session, client.name)
        running = asyncio.create_task(
            client.generate(request(prompts(1)[0], 6, stops=(), max_tokens=60))
        )
        await until(lambda: engine.engine.sampled_tokens >= 5)
        pausing = asyncio.create_task(target.pause("wait"))
        whole = await running
        await pausing
        assert (whole.finish_reason, len(whole.token_ids_C)) == (FinishReason.LENGTH, 60)
        later_call = asyncio.create_task(client.generate(request(prompts(1)[0], 7)))
        await target.update(str(TOY), 5, "run:5:x")
        assert not later_call.done()
        await target.resume()
        assert len((await later_call).token_ids_C)


async def test_two_runs_with_the_same_number_keep_their_labels() -> None:
    async with _served() as (engine, client, session):
        target = WeightTarget(session, client.name)
        ours = RunWeights("ours", published=True)
        await target.update(str(TOY), 7, "ours:7:x")
        running = asyncio.create_task(
            client.generate(
                replace(request(prompts(1)[0], 6, stops=(), max_tokens=80), weights=ours)
            )
        )
        await until(lambda: engine.engine.sampled_tokens >= 20)
        await target.pause("keep")
        await target.update(str(TOY), 7, "theirs:7:y")
        await target.resume()
        both = await running
        assert both.versions == (7, -1), "theirs is no version of ours"
