"""Qwen3 checkpoints in the Hugging Face layout, read into numpy arrays that are ready to multiply.

Invariants: everything is float32 in memory, whatever the file holds (float32, float16, bfloat16); a
directory with a missing, misshapen or non-finite tensor is refused as a whole, before anything that
runs is touched. Matrices are stored input-major, and the weight of each RMS norm is folded into the
matrix behind it, so that a layer is four products.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from prorl.errors import ConfigError
from prorl.types import Json

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.types import Float32

_DTYPES = {"F32": np.float32, "F16": np.float16}
_BFLOAT16 = "BF16"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Holds what `config.json` says of a Qwen3 model."""

    vocab_size: int
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_length: int
    rope_theta: float
    norm_epsilon: float
    tied: bool


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerWeights:
    """D hidden, Q = heads x head_dim, K = kv_heads x head_dim, F inner."""

    qkv: Float32
    """[D, Q+2K], input norm folded in."""
    qk_norm: Float32
    """[heads + kv_heads, head_dim]; the query's part carries the attention scale."""
    out: Float32
    """[Q, D]."""
    gate_up: Float32
    """[D, 2F], post-attention norm folded in."""
    down: Float32
    """[F, D]."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Weights:
    shape: ModelShape
    embedding: Float32
    """[V, D]."""
    layers: tuple[LayerWeights, ...]
    head: Float32
    """[D, V], final norm folded in."""


def read_shape(directory: Path) -> ModelShape:
    """Raises ConfigError for anything but a plain Qwen3 decoder."""
    config = _read_config(directory / "config.json")
    rope = _rope(config)
    return ModelShape(
        vocab_size=config["vocab_size"],
        hidden=config["hidden_size"],
        inner=config["intermediate_size"],
        layers=config["num_hidden_layers"],
        heads=config["num_attention_heads"],
        kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"],
        max_length=config["max_position_embeddings"],
        rope_theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        norm_epsilon=float(config["rms_norm_eps"]),
        tied=bool(config.get("tie_word_embeddings", False)),
    )


_NEEDED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "max_position_embeddings", "rms_norm_eps"),
)


def _rope(config: Json) -> Json:
    return config.get("rope_parameters") or config.get("rope_scaling") or {}


def _read_config(path: Path) -> Json:
    try:
        config = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as cause:
        raise ConfigError(
            f"cannot read {path}: {cause}", "a Hugging Face checkpoint directory"
        ) from cause
    if not isinstance(config, dict):
        raise ConfigError(f"{path} holds no JSON object", "the config.json of a plain Qwen3")
    if config.get("model_type") != "qwen3":
        raise ConfigError(
            f"{path}: model_type {config.get('model_type')!r}",
            "`qwen3`",
            "serve other models with vLLM and name its URL as backend",
        )
    if missing := [name for name in _NEEDED if not isinstance(config.get(name), int | float)]:
        raise ConfigError(f"{path} has no number {', '.join(missing)}", "a plain Qwen3's settings")
    is_scaled = _rope(config).get("rope_type", "default") != "default"
    if is_scaled or config.get("use_sliding_window") or config.get("attention_bias"):
        problem = f"{path}: scaled rotary embedding, sliding window or attention bias"
        raise ConfigError(problem, "a plain Qwen3", "serve it with vLLM")
    return config


def load(directory: Path) -> Weights:
    """Read a checkpoint. Raises ConfigError naming the file and what is wrong."""
    shape = read_shape(directory)
    tensors = _Tensors(directory)
    d, v = shape.hidden, shape.vocab_size
    embedding = tensors.take("model.embed_tokens.weight", (v, d))
    head = embedding if shape.tied else tensors.take("lm_head.weight", (v, d))
    norm = tensors.take("model.norm.weight", (d,))
    layers = tuple(
        _layer(tensors, shape, f"model.layers.{index}.") for index in range(shape.layers)
    )
    return Weights(shape=shape, embedding=embedding, layers=layers, head=_input_major(head * norm))


def _layer(tensors: _Tensors, shape: ModelShape, prefix: str) -> LayerWeights:
    d, f = shape.hidden, shape.inner
    q, k = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

    def take(name: str, *size: int) -> Float32:
        return tensors.take(f"{prefix}{name}.weight", size)

    attention = [
        take("self_attn.q_proj", q, d),
        take("self_attn.k_proj", k, d),
        take("self_attn.v_proj", k, d),
    ]
    mlp = [take("mlp.gate_proj", f, d), take("mlp.up_proj", f, d)]
    query_norm = take("self_attn.q_norm", shape.head_dim)
    key_norm = take("self_attn.k_norm", shape.head_dim)
    return LayerWeights(
        qkv=_input_major(np.concatenate(attention) * take("input_layernorm", d)),
        qk_norm=_qk_norm(shape, query_norm, key_norm),
        out=_input_major(take("self_attn.o_proj", d, q)),
        gate_up=_input_major(np.concatenate(mlp) * take("post_attention_layernorm", d)),
        down=_input_major(take("mlp.down_proj", d, f)),
    )


def _qk_norm(shape: ModelShape, query_norm: Float32, key_norm: Float32) -> Float32:
    """A row for each head of queries, then of keys; attention's own scale is in the first."""
    scaled = query_norm * np.float32(shape.head_dim**-0.5)
    return np.stack([scaled] * shape.heads + [key_norm] * shape.kv_heads)


def _input_major(matrix: Float32) -> Float32:
    return np.ascontiguousarray(matrix.T, dtype=np.float32)


class _Tensors:
    def __init__(self, directory: Path) -> None:
        try:
            import safetensors
        except ImportError as cause:
            problem = "the embedded backend reads safetensors files"
            raise ConfigError(problem, "safetensors", "install prorl's extra `torch`") from cause
        files = sorted(directory.glob("*.safetensors"))
        if not files:
            raise ConfigError(
                f"no *.safetensors in {directory}", "a Hugging Face checkpoint directory"
            )
        self._directory = directory
        self._raw: dict[str, Mapping[str, Any]] = {}
        for file in files:
            try:
                deserialize: Any = safetensors.deserialize
                self._raw.update(deserialize(file.read_bytes()))
            except (OSError, safetensors.SafetensorError) as cause:
                raise ConfigError(
                    f"cannot read {file}: {cause}", "a whole safetensors file"
                ) from cause

    def take(self, name: str, size: tuple[int, ...]) -> Float32:
        raw = self._raw.get(name)
        if raw is None:
            raise ConfigError(
                f"{self._directory} has no tensor {name}", "all tensors of a Qwen3 model"
            )
        if tuple(raw["shape"]) != size:
            raise ConfigError(
                f"{self._directory}: {name} is {tuple(raw['shape'])}",
                f"{size}, as config.json says",
            )
        values = _float32(raw["dtype"], raw["data"]).reshape(size)
        if not np.isfinite(values).all():
            raise ConfigError(
                f"{self._directory}: {name} holds NaN or infinite values", "finite weights"
            )
        return values


def _float32(dtype: str, data: bytes) -> NDArray[np.float32]:
    if dtype == _BFLOAT16:  # the upper half of a float32
        return (np.frombuffer(data, dtype="<u2").astype(np.uint32) << 16).view(np.float32)
    if dtype not in _DTYPES:
        raise ConfigError(f"tensors of type {dtype}", f"one of {', '.join((*_DTYPES, _BFLOAT16))}")
    return np.frombuffer(data, dtype=_DTYPES[dtype]).astype(np.float32)
