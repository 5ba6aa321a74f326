"""What a model server must show before it serves: that it is the server that the run needs.

    when it is added       health, model, logprobs of the distribution that it samples from
    when a run begins      its vocabulary: the last id is taken, text gets the run's ids

What it lacks is said in one line, once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from prorl.backends.logprobs import check_logprobs, first_token
from prorl.errors import BackendError, ConfigError
from prorl.types import Json, Trouble

if TYPE_CHECKING:
    from prorl.backends.vllm import VllmBackend


async def check_server(backend: VllmBackend, model: str = "") -> None:
    """Refuse a server that cannot serve rollouts: health, model, logprobs.

    Raises ConfigError with what it lacks, also when it cannot be asked.
    """
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
        hint = "start it first, then add it again"
        raise ConfigError(f"{backend.name}: {error.message}", "a model server", hint) from error


class Vocabulary(NamedTuple):
    """What a server must share with a run's renderer, and the context that the run wants."""

    size: int
    text: str
    ids: Sequence[int]
    """Of `text`; empty = not known."""
    max_tokens: int = 0
    """Of a sequence, where the run says it; 0 = as many as the server takes."""


async def check_vocabulary(backend: VllmBackend, wanted: Vocabulary) -> dict[str, Json]:
    """Refuse a server of another model: by its last id, its context, and the ids of a text.

    What it says of its model.

    Text is compared where the server says which ids it gets. Raises ConfigError; BackendError when
    the server cannot be asked.
    """
    await _check_last_id(backend, wanted.size)
    model = await backend.discover()
    if wanted.max_tokens > backend.max_model_len > 0:
        raise ConfigError(
            f"{backend.name} has a context of {backend.max_model_len}",
            f"the run's limits.max_tokens = {wanted.max_tokens}",
            f"set limits.max_tokens to {backend.max_model_len}, or start vLLM with --max-model-len",
        )
    theirs = await backend.tokenize(wanted.text)
    if theirs is not None and wanted.ids and theirs != list(wanted.ids):
        given = f"{backend.name} encodes {wanted.text!r} as {theirs}"
        raise ConfigError(given, f"the run's {list(wanted.ids)}", _HINT)
    return {"model": model, **backend.served}


_HINT = "set `run.renderer.model` to the directory of the model that it serves"


async def _check_last_id(backend: VllmBackend, size: int) -> None:
    """Raises ConfigError where a vocabulary of that size is larger than the server's."""
    last = np.array([size - 1], dtype=np.int32)
    try:
        await first_token(backend, last)
    except BackendError as error:
        if error.trouble is not Trouble.DECLINED:
            raise
        raise ConfigError(
            f"{backend.name} does not take id {last[0]}: {error.message}",
            f"the run's vocabulary of {size}",
            _HINT,
        ) from error
