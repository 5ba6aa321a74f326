"""Every model whose template docs/models.md names, tiny and random: packed, its logprobs are those
of its own passes one sequence at a time, or it is refused in one line. Prints the table.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from prorl.errors import ConfigError
from prorl.trainer.pack import load_model, pack, token_logprobs
from tests.trainer.test_pack import unpacked_logprobs
from tests.trainer.tiny_model import batch_of

MAX_ERROR = 1e-4
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1}
MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2},
    "llama": {},
    "mistral": {},
    "gemma3_text": {"head_dim": 8},
    "phi3": {},
    "olmo2": {},
    "smollm3": {},
    "granite": {"logits_scaling": 3.0},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128},
}
REFUSED: dict[str, dict[str, Any]] = {
    "gpt_oss": {"head_dim": 8, **MOE},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8},
    "llama4_text": {"head_dim": 8, "intermediate_size_mlp": 48, "attention_chunk_size": 8, **MOE},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_expand": 2, **_MAMBA, **MOE},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}
FAST = {"qwen3", "granite", "gpt_oss"}
"""A plain one, one that scales its logits, and one that packing changes."""
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
EXPERTS = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
}
LATENT = {
    **EXPERTS,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
DELTA = {
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 1}
MADE: dict[str, dict[str, Any]] = {
    **ARCHITECTURES,
    **REFUSED,
    "deepseek_v3": LATENT,
    "glm4_moe": {"head_dim": 8, **EXPERTS},
    "glm4_moe_lite": LATENT,
    "gemma4_text": {
        "head_dim": 8,
        "global_head_dim": 8,
        "vocab_size_per_layer_input": 64,
        "hidden_size_per_layer_input": 8,
    },
    "minimax_m2": {"head_dim": 8, "rotary_dim": 8, **MOE},
    "ministral3": {"head_dim": 8},
    "nemotron_h": {"head_dim": 8, "layers_block_type": ["mamba", "attention"], **MAMBA},
    "qwen3_5_text": DELTA,
}
OF_TEMPLATE = {
    "deepseek": "deepseek_v3",
    "kimi": "deepseek_v3",
    "devstral": "mistral",
    "mistral": "mistral",
    "ministral-3": "ministral3",
    "gemma-3": "gemma3_text",
    "gemma-4": "gemma4_text",
    "glm-4.7-flash": "glm4_moe_lite",
    "glm": "glm4_moe",
    "gpt-oss": "gpt_oss",
    "granite-3": "granite",
    "granite-4": "granitemoehybrid",
    "hermes": "llama",
    "llama": "llama",
    "minimax": "minimax_m2",
    "nemotron": "nemotron_h",
    "phi": "phi3",
    "qwen2.5": "qwen2",
    "qwen3.": "qwen3_5_text",
    "qwen3-coder": "qwen3_moe",
    "qwen3": "qwen3",
    "smollm3": "smollm3",
}
UNPACKED = {
    "gpt_oss",
    "granitemoehybrid",
    "nemotron_h",
    "qwen3_5_text",
    "gemma2",
    "lfm2",
    "llama4_text",
}


def test_every_template_has_an_architecture() -> None:
    table = PAGE.read_text().partition("## Families")[2].partition("### Why not")[0]
    templates = re.findall(r"^\| ([a-z][^|]*?) \|", table, re.MULTILINE)[1:]
    assert len(templates) > 20
    missing = [template for template in templates if not template.startswith(tuple(OF_TEMPLATE))]
    assert not missing
    assert set(OF_TEMPLATE.values()) <= set(MADE)


def saved(name: str, extra: dict[str, Any], where: Path) -> Path:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    auto: Any = AutoModelForCausalLM
    model: Any = auto.from_config(AutoConfig.for_model(name, **{**SMALL, **extra}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(where)
    return where


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in MADE]
)
@pytest.mark.filterwarnings("ignore")
def test_it_is_packed_rightly_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    model_dir = saved(name, MADE[name], tmp_path)
    if name in UNPACKED:
        with pytest.raises(ConfigError) as refused:
            load_model(model_dir)
        (line,) = str(refused.value).splitlines()
        print(f"| {name} | refused | {line.partition(': ')[2]} |")
        return
    model = load_model(model_dir)
    batch = batch_of(2)
    packed = token_logprobs(model, pack(batch)).logprobs_C
    alone = unpacked_logprobs(model_dir, batch, torch.float32).float()
    worst = float((packed - alone).abs().max())
    print(f"| {name} | packed | {worst:.1e} |")
    assert worst <= MAX_ERROR
