"""The checks that a model server must pass before it serves: it is the server that the run needs.

    when it is added       health, model, logprobs of the distribution that it samples from
    when a run begins      its vocabulary: the last id is taken, text gets the run's ids

What it lacks is said in one line, once.
"""

from __future__ import annotations

import asyncio
import math
import statistics
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from prorl.errors import BackendError, ConfigError
from prorl.protocols import Backend
from prorl.types import BackendFault, GenerateRequest, Json, SamplingParams

if TYPE_CHECKING:
    from prorl.types import Completion, Int32

_HOT, _COLD = 2.0, 0.01
"""The most and the least that vLLM takes."""
_PROBES, _ROUNDS = 8, 4
_CERTAIN, _MOVED, _SAME, _APART = -0.3, 0.05, 0.01, 3.0
_ALL = 1 << 20
"""More tokens than any vocabulary has."""
_HINT = "set `run.renderer.model` to the directory of the model that it serves"
_COMMON_IDS = 256
"""Ids below it are in every vocabulary."""


class ModelServer(Backend, Protocol):
    """A backend that is an HTTP server with a model of its own."""

    vocab_size: int
    max_model_len: int
    """The context of its model, once `discover` has asked; 0 = not known."""
    served: Mapping[str, Json]
    """The facts that it states of its model besides the name, once it was asked."""

    async def health(self) -> None:
        """Raises BackendError where it is not well."""

    async def models(self) -> Sequence[str]:
        """The names that it serves."""

    async def discover(self) -> str:
        """Ask for its model; the model's name."""

    async def tokenize(self, text: str) -> list[int] | None:
        """The ids of a text; None where it does not say."""

    async def names_weights(self) -> bool:
        """Returns whether it states a label of the weights that it serves."""


async def check_logprobs(backend: Backend, vocab_size: int) -> None:
    """Refuse a server whose logprobs are not those of the distribution that a run asks for.

    Near temperature 0 the choice is certain, and at temperature 2 the same choice is less likely
    than that. Raw logprobs are the model's own at both: not near 0 where it is unsure, and equal
    where it is sure. At temperature 2, where the distribution is as flat as it gets, a `top_k` of 0
    must mean what one beyond every vocabulary means: a server that puts its model's own in the
    place of 0 samples the likeliest tokens alone. With a `top_k` of 2 the two that come have
    probabilities that make 1, whatever they are: logprobs that are shifted or scaled do not. Raises
    ConfigError, or BackendError when the server cannot be asked.
    """
    cold = await _first_tokens(backend, vocab_size, _COLD, seed=0)
    hot = [await _first_tokens(backend, vocab_size, _HOT, seed) for seed in range(_ROUNDS)]
    moved = [fall for tokens in hot for fall in _falls(cold, tokens)]
    certain = statistics.median(logprob for _, logprob in cold)
    if certain < _CERTAIN or (moved and statistics.median(moved) < _MOVED):
        raise ConfigError(
            f"{backend.name}: logprobs do not follow the temperature (at {_COLD:g}:"
            f" {[round(logprob, 3) for _, logprob in cold]}; the same tokens at {_HOT:g} are"
            f" {[round(shift, 3) for shift in moved]} less likely)",
            f"about 0 at {_COLD:g}, and less at {_HOT:g}",
            "start vLLM with --logprobs-mode processed_logprobs",
        )
    whole = [
        await _first_tokens(backend, vocab_size, _HOT, seed, top_k=_ALL) for seed in range(_ROUNDS)
    ]
    falls = [fall for some, all_ in zip(hot, whole, strict=True) for fall in _falls(some, all_)]
    # Where it is flat the two have no token in common, but then they differ much on average.
    means = [
        statistics.mean(logprob for tokens in rounds for _, logprob in tokens)
        for rounds in (hot, whole)
    ]
    apart = means[0] - means[1]
    if (falls and statistics.median(falls) > _SAME) or apart > _APART:
        raise ConfigError(
            f"{backend.name}: with top_k 0 logprobs are {apart:.3f} above those with top_k {_ALL},"
            f" those of the same tokens {[round(shift, 3) for shift in falls]}",
            "the whole distribution for both",
            "start vLLM with --generation-config vllm",
        )

    two = [await _first_tokens(backend, vocab_size, _HOT, seed, top_k=2) for seed in range(_ROUNDS)]
    seen = [dict(tokens) for tokens in zip(*two, strict=True)]
    takes_it = all(len(tokens) <= 2 for tokens in seen)
    sums = [sum(map(math.exp, tokens.values())) for tokens in seen if len(tokens) == 2]
    if takes_it and sums and abs(statistics.median(sums) - 1) > _SAME:
        raise ConfigError(
            f"{backend.name}: with top_k 2 the two tokens that come have together the probabilities"
            f" {[round(shift, 3) for shift in sums]}",
            "1: logprobs of the distribution sampled from, neither shifted nor scaled",
            "start vLLM with --logprobs-mode processed_logprobs",
        )


def _falls(before: list[tuple[int, float]], after: list[tuple[int, float]]) -> list[float]:
    """Returns how much less likely the tokens became that are the same."""
    return [
        was - is_
        for (token_id, was), (other, is_) in zip(before, after, strict=True)
        if token_id == other
    ]


async def first_token(
    backend: Backend,
    prompt_ids_L: Int32,
    temperature: float = 1.0,
    seed: int = 0,
    top_k: int = 0,
) -> Completion:
    """One token after a prompt, as a rollout would ask for it. Raises BackendError."""
    return await backend.generate(
        GenerateRequest(
            prompt_ids_L=prompt_ids_L,
            sampling=SamplingParams(temperature=temperature, top_k=top_k, max_tokens=1),
            seed=seed,
            stop_token_ids=(),
            request_id=f"probe-{uuid.uuid4().hex}",
            session="probe",
        )
    )


async def _first_tokens(
    backend: Backend, vocab_size: int, temperature: float, seed: int, top_k: int = 0
) -> list[tuple[int, float]]:
    """Returns what it says after each of a few short prompts: (id, logprob)."""
    num_ids = min(vocab_size, _COMMON_IDS)
    prompts = np.random.default_rng(1).integers(0, num_ids, (_PROBES, 4), dtype=np.int32)
    answers = await asyncio.gather(
        *(first_token(backend, prompt, temperature, seed, top_k) for prompt in prompts)
    )
    return [(int(answer.token_ids_C[0]), float(answer.logprobs_C[0])) for answer in answers]


async def check_server(backend: ModelServer, model: str = "") -> None:
    """Raises ConfigError with what it lacks, also when it cannot be asked."""
    try:
        await backend.health()
        served = await backend.models()
        if model and model not in served:
            raise ConfigError(
                f"{backend.name} serves {', '.join(map(repr, served))}",
                f"the service's model {model!r}",
                "start vLLM with --served-model-name, or set `model`",
            )
        await check_logprobs(backend, backend.vocab_size)
    except BackendError as error:
        if "Cannot connect" in error.message:
            problem = f"nothing listens at {backend.name}"
            hint = "start the model server, then try again"
        else:
            problem = error.message.removeprefix(f"{backend.name}: ")
            problem = f"{backend.name}: {problem.removeprefix(f'{backend.name} ')}"
            hint = "the address must end with the port, and vLLM or SGLang must be ready there"
        raise ConfigError(problem, "a model server", hint) from error


class Vocabulary(NamedTuple):
    """Holds what a server must share with a run's renderer, and the context that the run wants."""

    size: int
    text: str
    ids: Sequence[int]
    """The ids of `text`; empty = not known."""
    max_tokens: int = 0
    """The limit of a sequence, where the run says it; 0 = as many as the server takes."""
    takes_weights: bool = False
    """True if the run's trainer publishes weights, so that the server must name those it serves."""


async def check_vocabulary(backend: ModelServer, expected: Vocabulary) -> dict[str, Json]:
    """Returns what a server says of its model. Raises ConfigError where it is not the run's.

    Text is compared where the server says which ids it gets. BackendError: it cannot be asked.
    """
    last = np.array([expected.size - 1], dtype=np.int32)
    try:
        await first_token(backend, last)
    except BackendError as error:
        if error.trouble is not BackendFault.DECLINED:
            raise
        problem = f"{backend.name} does not take id {last[0]}: {error.message}"
        raise ConfigError(problem, f"the run's vocabulary of {expected.size}", _HINT) from error
    model = await backend.discover()
    if expected.max_tokens > backend.max_model_len > 0:
        raise ConfigError(
            f"{backend.name} has a context of {backend.max_model_len}",
            f"the run's limits.max_tokens = {expected.max_tokens}",
            f"set limits.max_tokens to {backend.max_model_len}, or start vLLM with --max-model-len",
        )
    if expected.takes_weights and not await backend.names_weights():
        raise ConfigError(
            f"{backend.name} takes no weights of a trainer: it does not say which it serves"
            " (`/weight_info`)",
            "vLLM 0.27 or later with VLLM_SERVER_DEV_MODE=1, or SGLang",
            "start it so, or sample with delivery `store`, to which nothing is published",
        )
    theirs = await backend.tokenize(expected.text)
    if theirs is not None and expected.ids and theirs != list(expected.ids):
        problem = f"{backend.name} encodes {expected.text!r} as {theirs}"
        raise ConfigError(problem, f"the run's {list(expected.ids)}", _HINT)
    return {"model": model, **backend.served}
