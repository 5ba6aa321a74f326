"""The gateway's own calls to model servers. A token from one that was out, everything from one that
is new.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, cast

import numpy as np

from prorl.backends.catalogue import BackendContext, is_server, open_url
from prorl.backends.probe import Vocabulary, check_server, check_vocabulary, first_token
from prorl.config import RunConfig, ServiceConfig
from prorl.envs.users import env_by_name
from prorl.errors import BackendError, ConfigError
from prorl.renderer import ChatMLRenderer
from prorl.renderer.load import SAMPLE
from prorl.tokenizer import load_tokenizer
from prorl.types import Json
from prorl.waits import wait_limit_s

if TYPE_CHECKING:
    from prorl.backends.vllm import VllmBackend

CHECK_S = wait_limit_s("server.check")
VOCABULARY_S = wait_limit_s("server.vocabulary")
ANY_VOCABULARY = 2**31 - 1
_RENDERER = ChatMLRenderer(load_tokenizer("bytes"))
"""The renderer with which a backend is opened that has no run yet."""

log = logging.getLogger("prorl.service")


class Servers:
    def __init__(self, config: ServiceConfig, is_ours: Callable[[str], bool]) -> None:
        self._config, self._is_ours = config, is_ours

    def key_of(self, name: str) -> str:
        """The bearer token, for servers that the operator named."""
        return self._config.backend_key if self._is_ours(name) else ""

    async def try_call(self, name: str) -> None:
        async with self._open(name, self.key_of(name)) as backend:
            await first_token(backend, np.zeros(1, dtype=np.int32))

    async def sample(self, name: str, prompt_ids: Sequence[int], seed: int) -> tuple[int, float]:
        """The next token after a prompt, and its logprob, at temperature 1. Raises BackendError."""
        async with self._open(name, self.key_of(name)) as backend:
            reply = await first_token(backend, np.array(prompt_ids, np.int32), seed=seed)
        return int(reply.token_ids_C[0]), float(reply.logprobs_C[0])

    async def check(self, name: str, *, ours: bool) -> None:
        """Everything that a backend must be, whoever uses it. Raises ConfigError with what it is
        not.
        """
        if not is_server(name):
            await open_url(name, BackendContext(_RENDERER, env_by_name)).close()
            return
        try:
            async with (
                asyncio.timeout(CHECK_S),
                self._open(name, self._config.backend_key if ours else "") as backend,
            ):
                await check_server(backend, self._config.model)
        except TimeoutError:
            raise ConfigError(
                f"{name} did not answer within {CHECK_S:g} s", "a model server", "is it frozen?"
            ) from None

    async def check_vocabulary(
        self, name: str, expected: Vocabulary, *, ours: bool = False
    ) -> dict[str, Json]:
        """A run's vocabulary is the server's; what that says of its model. Raises ConfigError; one
        that is away is not asked.
        """
        key = self._config.backend_key if ours else self.key_of(name)
        try:
            async with (
                asyncio.timeout(VOCABULARY_S),
                self._open(name, key) as backend,
            ):
                return await check_vocabulary(backend, expected)
        except (TimeoutError, BackendError) as error:
            log.warning("%s was not asked for its vocabulary: %s", name, error)
            return {}

    @asynccontextmanager
    async def _open(self, name: str, key: str) -> AsyncGenerator[VllmBackend]:
        """Open a backend for a few calls; ids are checked by runs, which know their vocabulary."""
        context = BackendContext(_RENDERER, env_by_name, self._config.model, key)
        backend = cast("VllmBackend", open_url(name, context))
        backend.vocab_size = ANY_VOCABULARY
        try:
            yield backend
        finally:
            await backend.close()


def vocabulary_of(config: RunConfig, renderer: Mapping[str, Json]) -> Vocabulary:
    """Returns what a server must share with a run; `renderer` is what its proof says."""
    limits = config.limits
    max_tokens = limits.max_tokens if "max_tokens" in limits.model_fields_set else 0
    return Vocabulary(
        *(renderer["vocab_size"], SAMPLE, renderer["sample_ids"], max_tokens),
        takes_weights=config.delivery == "stream",
    )
