"""What a model server must show before it serves: that it is the server that the run needs.

    health, model, context length, vocabulary (its last id is taken, text gets the run's ids),
    logprobs of the distribution that it samples from

A server is asked once, when it is added; what it lacks is said in one line.
"""

from __future__ import annotations

import asyncio
import statistics
import uuid
from typing import TYPE_CHECKING

import numpy as np

from prorl.errors import BackendError, ConfigError
from prorl.types import Completion, FailureCode, GenerateRequest, SamplingParams

if TYPE_CHECKING:
    from prorl.backends.vllm import VllmBackend
    from prorl.protocols import Tokenizer
    from prorl.types import Int32

_HOT, _COLD = 2.0, 0.01
"""The most and the least that vLLM takes."""
_PROBES, _ROUNDS = 8, 4
_CERTAIN, _MOVED = -0.3, 0.05
_SAMPLE = "def f(x):\n    return 24 * x  # café"


async def check_logprobs(backend: VllmBackend) -> None:
    """Refuse a server whose logprobs are not those of the distribution it samples from.

    Near temperature 0 the choice is certain, and at temperature 2 the same choice is less likely
    than that. Raw logprobs are the model's own at both: not near 0 where it is unsure, and equal
    where it is sure. Raises ConfigError, or BackendError when the server cannot be asked.
    """
    cold = await _first_tokens(backend, _COLD, seed=0)
    hot = [
        pair
        for seed in range(_ROUNDS)
        for pair in zip(cold, await _first_tokens(backend, _HOT, seed), strict=True)
    ]
    certain = statistics.median(logprob for _, logprob in cold)
    moved = [
        cold_logprob - hot_logprob
        for (one, cold_logprob), (other, hot_logprob) in hot
        if one == other
    ]
    if certain < _CERTAIN or (moved and statistics.median(moved) < _MOVED):
        raise ConfigError(
            f"{backend.name}: logprobs do not follow the temperature (at {_COLD:g}:"
            f" {[round(logprob, 3) for _, logprob in cold]}; the same tokens at {_HOT:g} are"
            f" {[round(one, 3) for one in moved]} less likely)",
            f"about 0 at {_COLD:g}, and less at {_HOT:g}",
            "start vLLM with --logprobs-mode processed_logprobs",
        )


async def first_token(
    backend: VllmBackend, prompt_ids_L: Int32, temperature: float = 1.0, seed: int = 0
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
    backend: VllmBackend, temperature: float, seed: int
) -> list[tuple[int, float]]:
    """What it says after each of a few short prompts: (id, logprob)."""
    prompts = np.random.default_rng(1).integers(0, backend.vocab_size, (_PROBES, 4), dtype=np.int32)
    answers = await asyncio.gather(
        *(first_token(backend, prompt, temperature, seed) for prompt in prompts)
    )
    return [(int(answer.token_ids_C[0]), float(answer.logprobs_C[0])) for answer in answers]


async def check_server(backend: VllmBackend, tokenizer: Tokenizer, model: str = "") -> None:
    """Refuse a server that cannot serve rollouts of this tokenizer.

    Raises ConfigError with what it lacks, also when it cannot be asked.
    """
    try:
        await backend.health()
        await _check_model(backend, model)
        await _check_vocabulary(backend, tokenizer)
        await check_logprobs(backend)
    except BackendError as error:
        mend = "start it first, then add it again"
        raise ConfigError(f"{backend.name}: {error.message}", "a model server", mend) from error


async def _check_model(backend: VllmBackend, model: str) -> None:
    served = await backend.models()
    if model and model not in served:
        raise ConfigError(
            f"{backend.name} serves {', '.join(map(repr, served))}",
            f"the service's model {model!r}",
            "start vLLM with --served-model-name, or set `model`",
        )


async def _check_vocabulary(backend: VllmBackend, tokenizer: Tokenizer) -> None:
    """The last id is taken; text gets our ids where the server can say it."""
    last = np.array([tokenizer.vocab_size - 1], dtype=np.int32)
    mend = "set the service's `tokenizer` to the directory of the model that the server serves"
    try:
        await first_token(backend, last)
    except BackendError as error:
        if error.code is not FailureCode.BACKEND_PROTOCOL:
            raise
        raise ConfigError(
            f"{backend.name} refuses id {last[0]} or answers with one above it: {error.message}",
            f"a vocabulary of {tokenizer.vocab_size}",
            mend,
        ) from error
    theirs, ours = await backend.tokenize(_SAMPLE), tokenizer.encode(_SAMPLE).tolist()
    if theirs is not None and theirs != ours:
        raise ConfigError(
            f"{backend.name} encodes {_SAMPLE!r} as {theirs}", f"the tokenizer's {ours}", mend
        )
