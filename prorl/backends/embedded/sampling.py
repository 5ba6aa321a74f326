"""Draws tokens from logits, one row per request, independent of what else is in the batch.

The draw for the token at position p of a sequence uses the number that a counter-based generator
(Philox, Salmon et al. 2011) gives for (seed, p): the same request samples the same tokens alone, in
a batch, or continued after an abort. Probabilities are float64, so that float32 noise of another
batch (1e-6) changes a token about once in a million draws.

Logprobs are those of the distribution sampled from: log-softmax at the temperature, after top-k and
top-p. At temperature 0 the most likely token is taken and its logprob is that of temperature 1, as
vLLM reports it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from prorl.types import Float32, Int32, SamplingParams

    Float64 = NDArray[np.float64]

_PER_COUNTER = 4  # Philox gives four 64-bit numbers a counter


class Draws(NamedTuple):
    ids: Int32
    logprobs: Float32


def uniforms(seed: int, position: int, count: int) -> Float64:
    """Numbers in [0, 1) for the tokens at `position`, `position + 1` ...

    The same however they are asked for.

    >>> bool((uniforms(7, 0, 10)[3:] == uniforms(7, 3, 7)).all())
    True
    """
    generator = np.random.Philox(key=seed & ((1 << 64) - 1))
    generator.advance(position // _PER_COUNTER)
    skip = position % _PER_COUNTER
    return np.random.Generator(generator).random(skip + count)[skip:]


def draw(logits_RV: Float32, uniform_R: Float64, params: list[SamplingParams]) -> Draws:
    """A token for each row of logits."""
    temperature_R = np.array([param.temperature for param in params])
    greedy_R = temperature_R == 0
    scaled_RV = logits_RV.astype(np.float64) / np.where(greedy_R, 1.0, temperature_R)[:, None]
    for row, param in enumerate(params):
        if param.top_k or param.top_p < 1.0:
            # Minus infinity for every token outside the k likeliest and outside top_p. The latter
            # is the smallest set of that probability.
            scaled_V = scaled_RV[row]
            order = np.argsort(-scaled_V, kind="stable")
            weights = np.exp(scaled_V[order] - scaled_V[order[0]])
            if param.top_k:
                weights[param.top_k :] = 0.0
            before = weights.cumsum() - weights
            nucleus = order[(before < param.top_p * weights.sum()) & (weights > 0)]
            restricted = np.full_like(scaled_V, -np.inf)
            restricted[nucleus] = scaled_V[nucleus]
            scaled_RV[row] = restricted
    scaled_RV -= scaled_RV.max(axis=1, keepdims=True)
    cumulative_RV = np.exp(scaled_RV).cumsum(axis=1)
    total_R = cumulative_RV[:, -1]
    # The first token whose cumulative weight exceeds the draw; rounding can leave none, then it is
    # the last with any weight.
    ids_R = (cumulative_RV <= (uniform_R * total_R)[:, None]).sum(axis=1)
    ids_R = np.minimum(ids_R, (cumulative_RV < total_R[:, None]).sum(axis=1))
    ids_R[greedy_R] = scaled_RV[greedy_R].argmax(axis=1)
    logprobs_R = scaled_RV[np.arange(len(ids_R)), ids_R] - np.log(total_R)
    return Draws(ids_R.astype(np.int32), np.minimum(logprobs_R, 0.0).astype(np.float32))
