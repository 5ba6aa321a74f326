"""The Qwen3 decoder in numpy over rows of a key-value cache.

One call advances every row by a chunk of tokens of its own length.

Shapes: N packed tokens of all chunks, R rows, C longest chunk, S longest context, D hidden, V
vocabulary, H heads, K key-value heads, G = H/K, E head_dim, L layers. Products run packed over N;
only attention is per row, padded to (C, S) where chunks differ.

Why numpy: at this size the cost is calls, not arithmetic. It promises float32 results within 1e-4
of transformers' logprobs, whatever else is in the batch; it does not promise speed for models
beyond some ten million parameters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.backends.embedded.weights import LayerWeights, ModelShape, Weights
    from prorl.types import Float32

    Int = NDArray[np.intp]

MAX_CACHE_BYTES = 8 << 30
_HIDDEN = np.float32(-1e30)  # a score that softmax turns into exactly 0


class Chunk(NamedTuple):
    """The next tokens of one row of the cache."""

    row: int
    start: int
    """Tokens of this row that are in the cache already."""
    ids: Float32 | NDArray[np.int32]


class KVCache:
    """Keys and values of R rows of up to `length` tokens: float32 [L, 2, R, K, S, E]."""

    def __init__(self, shape: ModelShape, rows: int, length: int) -> None:
        size = (shape.layers, 2, rows, shape.kv_heads, length, shape.head_dim)
        if 4 * math.prod(size) > MAX_CACHE_BYTES:
            hint = "lower --max-num-seqs or --max-model-len, or serve this model with vLLM"
            raise ConfigError(
                f"a key-value cache of {4 * math.prod(size) >> 20} MiB",
                f"at most {MAX_CACHE_BYTES >> 20} MiB",
                hint,
            )
        self.rows, self.length = rows, length
        self.values: Float32 = np.zeros(size, dtype=np.float32)

    def read(self, row: int, length: int) -> Float32:
        """A copy of a row's first `length` tokens: [L, 2, K, length, E]."""
        return self.values[:, :, row, :, :length].copy()

    def write(self, row: int, saved: Float32) -> None:
        """Put a copy back at a row's start."""
        self.values[:, :, row, :, : saved.shape[3]] = saved

    def copy(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` tokens to another row."""
        self.values[:, :, target, :, :length] = self.values[:, :, source, :, :length]


class _Plan(NamedTuple):
    """Holds where the packed tokens of a step go, computed once for all layers."""

    row_N: Int
    position_N: Int
    cos_N: Float32
    sin_N: Float32
    single: Int | slice
    """Rows with one token, and their packed places."""
    single_place: Int
    single_mask: Float32
    multi: Int
    """Rows with more, and where each (row, step of its chunk) lies among the packed tokens; -1 is
    padding.
    """
    multi_place_RC: Int
    multi_mask: Float32
    context: int


class Model:
    """One version of the weights and what is derived from them."""

    def __init__(self, weights: Weights, length: int) -> None:
        self.weights = weights
        shape = weights.shape
        # In float32, as transformers and vLLM have it: exact angles would be further from theirs
        # than all other rounding is.
        frequency = 1 / np.float32(shape.rope_theta) ** (
            np.arange(0, shape.head_dim, 2, dtype=np.float32) / np.float32(shape.head_dim)
        )
        angle = np.arange(length, dtype=np.float32)[:, None] * frequency
        # Both halves of a head turn by the same angles; shape [length, 1, E] broadcasts over heads.
        self._cos = np.tile(np.cos(angle), 2)[:, None].astype(np.float32)
        self._sin = np.concatenate([-np.sin(angle), np.sin(angle)], axis=1)[:, None].astype(
            np.float32
        )

    def forward(self, chunks: list[Chunk], cache: KVCache) -> Float32:
        """Advance the rows; the logits after each chunk's last token: [len(chunks), V]."""
        plan = self._plan(chunks, cache.length)
        x_ND = self.weights.embedding[np.concatenate([chunk.ids for chunk in chunks])]
        # exp(-x) of a strongly negative gate is infinite, its SiLU 0: what is meant
        with np.errstate(over="ignore"):
            for layer, (keys, values) in zip(self.weights.layers, cache.values, strict=True):
                x_ND += self._attention(x_ND, layer, keys, values, plan) @ layer.out
                gate, up = np.split(self._norm(x_ND) @ layer.gate_up, 2, axis=1)
                x_ND += (gate / (1.0 + np.exp(-gate)) * up) @ layer.down
        last = np.cumsum([len(chunk.ids) for chunk in chunks]) - 1
        return self._norm(x_ND[last]) @ self.weights.head

    def _norm(self, x: Float32) -> Float32:
        """RMS norm over the last axis, without its weight."""
        square: Float32 = np.einsum("...d,...d->...", x, x)[..., None]
        normed: Float32 = x / np.sqrt(
            square / np.float32(x.shape[-1]) + np.float32(self.weights.shape.norm_epsilon)
        )
        return normed

    def _attention(
        self, x_ND: Float32, layer: LayerWeights, keys: Float32, values: Float32, plan: _Plan
    ) -> Float32:
        shape = self.weights.shape
        turned = shape.heads + shape.kv_heads
        qkv = (self._norm(x_ND) @ layer.qkv).reshape(
            len(x_ND), turned + shape.kv_heads, shape.head_dim
        )
        qk = self._rope(self._norm(qkv[:, :turned]) * layer.qk_norm, plan)
        keys[plan.row_N, :, plan.position_N] = qk[:, shape.heads :]
        values[plan.row_N, :, plan.position_N] = qkv[:, turned:]
        query = qk[:, : shape.heads].reshape(len(x_ND), shape.kv_heads, -1, shape.head_dim)
        out = np.empty_like(query)
        if len(plan.single_place):
            k, v = keys[plan.single, :, : plan.context], values[plan.single, :, : plan.context]
            out[plan.single_place] = (
                _softmax(query[plan.single_place] @ k.swapaxes(-1, -2) + plan.single_mask) @ v
            )
        if len(plan.multi):
            self._attend_chunks(query, keys, values, plan, out)
        return out.reshape(len(x_ND), -1)

    def _attend_chunks(
        self, query: Float32, keys: Float32, values: Float32, plan: _Plan, out: Float32
    ) -> None:
        """Rows whose chunks are longer: one product serves all queries of a row, [K, C*G, E]."""
        rows, length = plan.multi_place_RC.shape
        _, kv_heads, group, head_dim = query.shape
        padded = (
            query[plan.multi_place_RC]
            .transpose(0, 2, 1, 3, 4)
            .reshape(rows, kv_heads, length * group, head_dim)
        )
        k, v = keys[plan.multi, :, : plan.context], values[plan.multi, :, : plan.context]
        scores = (padded @ k.swapaxes(-1, -2)).reshape(
            rows, kv_heads, length, group, plan.context
        ) + plan.multi_mask
        mixed = _softmax(scores).reshape(rows, kv_heads, length * group, plan.context) @ v
        real = plan.multi_place_RC >= 0
        out[plan.multi_place_RC[real]] = mixed.reshape(
            rows, kv_heads, length, group, head_dim
        ).transpose(0, 2, 1, 3, 4)[real]

    def _rope(self, x: Float32, plan: _Plan) -> Float32:
        half = x.shape[-1] // 2
        turned: Float32 = np.concatenate([x[..., half:], x[..., :half]], axis=-1)
        turned *= plan.sin_N
        turned += x * plan.cos_N
        return turned

    def _plan(self, chunks: list[Chunk], length: int) -> _Plan:
        rows = np.array([chunk.row for chunk in chunks])
        starts = np.array([chunk.start for chunk in chunks])
        sizes = np.array([len(chunk.ids) for chunk in chunks])
        offsets = np.cumsum(sizes) - sizes
        step_N = np.arange(int(sizes.sum())) - np.repeat(offsets, sizes)
        position_N = np.repeat(starts, sizes) + step_N
        context = int((starts + sizes).max())
        single = np.flatnonzero(sizes == 1)
        multi = np.flatnonzero(sizes > 1)
        step_C = np.arange(int(sizes[multi].max())) if len(multi) else np.arange(0)
        place_RC = np.where(step_C < sizes[multi, None], offsets[multi, None] + step_C, -1)
        seen_RC = starts[multi, None] + np.minimum(step_C, sizes[multi, None] - 1)
        dense = len(single) == len(chunks) and bool((rows == np.arange(len(rows))).all())
        return _Plan(
            row_N=np.repeat(rows, sizes),
            position_N=position_N,
            cos_N=self._cos[position_N],
            sin_N=self._sin[position_N],
            # a slice is a view, an index copies the cache
            single=slice(0, len(rows)) if dense else rows[single],
            single_place=offsets[single],
            single_mask=_mask(starts[single], context)[:, None, None],
            multi=rows[multi],
            multi_place_RC=place_RC,
            multi_mask=_mask(seen_RC, context)[:, None, :, None],
            context=context,
        )


def _mask(last_seen: Int, context: int) -> Float32:
    """0 up to and including `last_seen`, `_HIDDEN` after it; one more axis of length `context`."""
    return np.where(np.arange(context) <= last_seen[..., None], np.float32(0), _HIDDEN)


def _softmax(scores: Float32) -> Float32:
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores
