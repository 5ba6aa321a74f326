"""LoRA adapters as policy versions on a real vLLM: what is published serves the next request, with
the logprobs of the merged weights.

`make test-vllm`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import aiohttp
import orjson
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from prorl.backends.catalogue import ADAPTER_FILE
from prorl.backends.embedded import TOY
from prorl.backends.vllm import VllmBackend
from prorl.backends.weight_target import WeightTarget
from prorl.types import RunWeights
from tests.backends.embedded.helpers import RENDERER, prompts, request
from tests.backends.real_servers import NEEDS_VLLM, furthest, serving, vllm

pytestmark = NEEDS_VLLM

RANK, ALPHA, NAME = 4, 8, "policy"
TARGETS = ("q_proj", "v_proj")
TOLERANCE = 1e-4


def adapter(folder: Path, scale: float) -> Path:
    """An adapter of the toy as PEFT writes it; with a `scale` of 0 it changes nothing."""
    folder.mkdir()
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(TOY),
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(TARGETS),
    }
    (folder / ADAPTER_FILE).write_bytes(orjson.dumps(config))
    draws, weights = torch.Generator().manual_seed(1), {}
    for name, weight in _targets(AutoModelForCausalLM.from_pretrained(TOY)).items():
        rows, columns = weight.shape
        a = torch.randn(RANK, columns, generator=draws) * 0.1
        b = torch.randn(rows, RANK, generator=draws) * scale
        key = f"base_model.model.{name.removesuffix('.weight')}"
        weights[f"{key}.lora_A.weight"], weights[f"{key}.lora_B.weight"] = a, b
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _targets(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    named = model.named_parameters()
    return {name: p.data for name, p in named if name.split(".")[-2] in TARGETS}


def merged(scale: float, folder: Path) -> torch.nn.Module:
    """The toy with an adapter in its weights."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(TOY, dtype=torch.float32)
    if scale:
        weights = load_file(folder / "adapter_model.safetensors")
        for name, weight in _targets(model).items():
            key = f"base_model.model.{name.removesuffix('.weight')}"
            product = weights[f"{key}.lora_B.weight"] @ weights[f"{key}.lora_A.weight"]
            weight += ALPHA / RANK * product
    return model


async def test_a_published_adapter_serves_the_next_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "True")
    folders = {scale: adapter(tmp_path / f"a{scale}", scale) for scale in (0.0, 0.5, 1.0)}
    server = vllm(tmp_path, max_lora_rank="8", lora_modules=f"{NAME}={folders[0.0]}")
    server.argv.append("--enable-lora")
    async with serving(server), aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.port}"
        target = WeightTarget(session, url, model=NAME)
        backend = VllmBackend(url, RENDERER.vocab_size, model=NAME)
        generate_request = replace(
            request(prompts(1)[0], 7, max_tokens=48), weights=RunWeights("run", published=True)
        )
        sampled_ids = []
        for version, scale in enumerate((0.5, 1.0, 0.5), start=1):
            await target.pause()
            await target.update(str(folders[scale]), version, f"run:{version}:x")
            await target.resume()
            backend.weights_changed()
            got = await backend.generate(generate_request)
            assert got.versions == (version,), "proved by the server's label"
            difference = furthest(merged(scale, folders[scale]), generate_request, got)
            print(f"version {version}: logprobs at most {difference:.1e} from the merged model's")
            assert difference < TOLERANCE
            sampled_ids.append(got.token_ids_C.tolist())
        assert sampled_ids[0] == sampled_ids[2] != sampled_ids[1]
        await backend.close()
