"""Weights under fire: publications while model servers are added, killed and started anew. Each
stored logprob is that of a forward pass with the version that its span names.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from prorl.backends.embedded import TOY
from prorl.client.client import Client
from prorl.deploy.running import client_of, service, signals
from prorl.storage.read.catalog import StoredRun
from prorl.types import Task
from tests.integration.run_checks import check_complete, rows
from tests.integration.services import Listening, settings, struck

torch = pytest.importorskip("torch", reason="the extra `torch` is not installed")
transformers = pytest.importorskip("transformers", reason="the extra `torch` is not installed")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(1200)]

VERSIONS = 20
WAVE = 40
BOUND = 1e-3


def server() -> Listening:
    """The embedded backend as a process."""
    return Listening("prorl.backends.embedded", "--model", str(TOY), "--port", "{port}")


@asynccontextmanager
async def embedded(count: int) -> AsyncIterator[list[Listening]]:
    async with AsyncExitStack() as stack:
        made = [server() for _ in range(count)]
        for weights_server in made:
            stack.push_async_callback(weights_server.kill)
            await weights_server.start()
        yield made


def checkpoint(folder: Path, version: int) -> Path:
    """The toy's weights, each version with another idea of how sure it is."""
    path = folder / f"v{version}"
    shutil.copytree(TOY, path)
    tensors = load_file(TOY / "model.safetensors")
    scale = np.float32(1.0 + 0.1 * version)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * scale
    (path / "model.safetensors").chmod(0o644)
    save_file(tensors, path / "model.safetensors")
    return path


async def under_fire(client: Client, folder: Path, pool: list[Listening]) -> None:
    """Publish, while servers die, come back with what they were started with, and join late."""
    first, second, third = pool
    for version in range(1, VERSIONS + 1):
        path = await asyncio.to_thread(checkpoint, folder, version)
        reply = await asyncio.to_thread(client.publish, "r", version, path)
        assert reply["version"] == version
        match version % 5:
            case 1:
                await first.kill()
            case 2:
                await first.start()
            case 3 if version == 3:
                await asyncio.to_thread(client.add_backend, third.url)
            case 4:
                await second.kill()
                await second.start()
        await asyncio.sleep(0.3)


def says(first: int, count: int) -> list[Task]:
    numbers = range(first, first + count)
    return [Task(task_id=f"{i}", env="noop", prompt=f"Say {i}.") for i in numbers]


def worst_gap(
    stored: StoredRun, directories: Mapping[int, Path], wrong: int = 0
) -> tuple[float, int, int]:
    """Greatest difference to the forward pass of the version that the span names; how many spans
    train, and how many do not since nobody can say which weights they had. With `wrong`, as if
    every label were that much too low.
    """
    torch.set_num_threads(1)
    sql = "select token_ids, logprobs, span_end, span_kind, span_version from sequences"
    worst, trained, unknown = 0.0, 0, 0
    models: dict[int, Any] = {}
    for row in rows(stored, sql):
        ids, begin, place = torch.tensor(row["token_ids"]), 0, 0
        for end, kind, version in zip(
            row["span_end"], row["span_kind"], row["span_version"], strict=True
        ):
            stored_logprobs = row["logprobs"][place : place + (end - begin if kind else 0)]
            place += len(stored_logprobs)
            unknown += kind == 2
            if kind == 1:
                trained += 1
                version = max(0, version - wrong)
                if version not in models:
                    models[version] = transformers.AutoModelForCausalLM.from_pretrained(
                        directories[version], dtype=torch.float32
                    ).eval()
                with torch.no_grad():
                    logits = models[version](ids[None, :end]).logits[0, begin - 1 : end - 1]
                logprobs = torch.log_softmax(logits.double(), -1)
                expected = logprobs[torch.arange(end - begin), ids[begin:end]].numpy()
                worst = max(worst, float(np.abs(expected - stored_logprobs).max()))
            begin = end
    return worst, trained, unknown


async def test_every_logprob_is_of_the_version_that_its_span_names(
    tmp_path: Path, sandbox_kind: str
) -> None:
    root = tmp_path / "root"
    async with embedded(3) as pool:
        urls, more = (
            [server.url for server in pool[:2]],
            {"tokenizer": str(TOY), "run": {"slots": 16}},
        )
        config = settings(root, sandbox_kind, *urls, **more)
        async with signals() as stop, service(config, stop) as running:
            client = client_of(running)
            await asyncio.to_thread(
                client.create_run, run_id="r", sampling={"max_tokens": 96}, limits={}
            )
            firing = under_fire(client, tmp_path, pool)
            expected, _ = await struck(running, client, firing, says, WAVE)
    stored = check_complete(root / "r", expected)
    counts = rows(stored, "select status, max(attempt) as attempt from rollouts group by 1")
    assert counts == [{"status": "completed", "attempt": 1}]
    directories = {0: TOY} | {n: tmp_path / f"v{n}" for n in range(1, VERSIONS + 1)}
    worst, trained, unknown = await asyncio.to_thread(worst_gap, stored, directories)
    (seen,) = rows(stored, "select count(distinct max_version) as n from rollouts")
    print(f"{trained} spans of {seen['n']} versions, {unknown} unknown, worst {worst:.1e}")
    assert worst < BOUND
    assert (await asyncio.to_thread(worst_gap, stored, directories, 1))[0] > BOUND, "it would show"
    assert trained > expected / 2
