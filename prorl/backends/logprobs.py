"""Shows by asking whether a server's logprobs are those of the distribution it samples from."""

from __future__ import annotations

import asyncio
import statistics
import uuid
from typing import TYPE_CHECKING

import numpy as np

from prorl.errors import ConfigError
from prorl.types import GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from prorl.protocols import Backend
    from prorl.types import Completion, Int32

_HOT, _COLD = 2.0, 0.01
"""The most and the least that vLLM takes."""
_PROBES, _ROUNDS = 8, 4
_CERTAIN, _MOVED = -0.3, 0.05
_COMMON_IDS = 256
"""Ids below it are in every vocabulary."""


async def check_logprobs(backend: Backend, vocab_size: int) -> None:
    """Refuse a server whose logprobs are not those of the distribution it samples from.

    `vocab_size` is that of the run: prompts are made of ids below it.

    Near temperature 0 the choice is certain, and at temperature 2 the same choice is less likely
    than that. Raw logprobs are the model's own at both: not near 0 where it is unsure, and equal
    where it is sure. Raises ConfigError, or BackendError when the server cannot be asked.
    """
    cold = await _first_tokens(backend, vocab_size, _COLD, seed=0)
    moved = await _less_likely(backend, vocab_size, cold)
    certain = statistics.median(logprob for _, logprob in cold)
    if certain < _CERTAIN or (moved and statistics.median(moved) < _MOVED):
        raise ConfigError(
            f"{backend.name}: logprobs do not follow the temperature (at {_COLD:g}:"
            f" {[round(logprob, 3) for _, logprob in cold]}; the same tokens at {_HOT:g} are"
            f" {[round(one, 3) for one in moved]} less likely)",
            f"about 0 at {_COLD:g}, and less at {_HOT:g}",
            "start vLLM with --logprobs-mode processed_logprobs",
        )


async def _less_likely(
    backend: Backend, vocab_size: int, cold: list[tuple[int, float]]
) -> list[float]:
    """How much lower the logprobs of the same tokens are when they are sampled at `_HOT`."""
    moved: list[float] = []
    for seed in range(_ROUNDS):
        hot = await _first_tokens(backend, vocab_size, _HOT, seed)
        for (one, cold_logprob), (other, hot_logprob) in zip(cold, hot, strict=True):
            if one == other:
                moved.append(cold_logprob - hot_logprob)
    return moved


async def first_token(
    backend: Backend, prompt_ids_L: Int32, temperature: float = 1.0, seed: int = 0
) -> Completion:
    """One token after a prompt, as a rollout would ask for it. Raises BackendError."""
    return await backend.generate(
        GenerateRequest(
            prompt_ids_L=prompt_ids_L,
            sampling=SamplingParams(temperature=temperature, max_tokens=1),
            seed=seed,
            stop_token_ids=(),
            request_id=f"probe-{uuid.uuid4().hex}",
            session="probe",
        )
    )


async def _first_tokens(
    backend: Backend, vocab_size: int, temperature: float, seed: int
) -> list[tuple[int, float]]:
    """What it says after each of a few short prompts: (id, logprob)."""
    known = min(vocab_size, _COMMON_IDS)
    prompts = np.random.default_rng(1).integers(0, known, (_PROBES, 4), dtype=np.int32)
    answers = await asyncio.gather(
        *(first_token(backend, prompt, temperature, seed) for prompt in prompts)
    )
    return [(int(answer.token_ids_C[0]), float(answer.logprobs_C[0])) for answer in answers]
