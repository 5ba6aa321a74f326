"""The gateway's own calls to model servers: a token from one that was out, everything from one that
is new.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from urllib.parse import urlsplit

import numpy as np

from prorl.backends.catalogue import (
    BackendContext,
    child_module,
    examples,
    is_known,
    is_server,
    open_url,
)
from prorl.backends.vllm import VllmBackend
from prorl.backends.vllm_probe import check_server, first_token
from prorl.config import ServiceConfig
from prorl.envs import get_env
from prorl.errors import ConfigError
from prorl.protocols import Tokenizer
from prorl.renderer import ChatMLRenderer
from prorl.tokenizer import load_tokenizer

CHECK_S = 30.0
"""For everything that a new server is asked."""


def valid_url(url: str) -> str:
    """A backend's URL as it is written everywhere. Raises ConfigError with what is wrong with it.

    >>> valid_url("http://localhost:8000/")
    'http://localhost:8000'
    """
    if not is_known(url) or child_module(url):
        raise ConfigError(f"backend {url[:200]!r}", examples())
    if not is_server(url):
        return url
    parts = urlsplit(url)
    try:
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except (UnicodeError, ValueError) as error:
        raise ConfigError(f"backend {url[:200]!r}: {error}", "http://HOST:PORT") from None
    extra = parts.query or parts.fragment or parts.username or parts.password
    if not host or port == 0 or extra or any(one.isspace() for one in url):
        raise ConfigError(f"backend {url[:200]!r}", "http://HOST:PORT, with nothing after it")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"backend {url[:200]!r}", "the address without /v1")
    return url.rstrip("/")


class Servers:
    """Calls servers with the run's vocabulary and, where they may have it, the key."""

    def __init__(self, config: ServiceConfig, is_ours: Callable[[str], bool]) -> None:
        self._config, self._is_ours = config, is_ours
        self._tokenizer: Tokenizer | None = None

    def key_of(self, name: str) -> str:
        """The bearer token, for servers that the operator named."""
        return self._config.backend_key if self._is_ours(name) else ""

    async def try_call(self, name: str) -> None:
        """One token, as a rollout would get it. Raises BackendError."""
        backend = await self._open(name, self.key_of(name))
        try:
            await first_token(backend, np.zeros(1, dtype=np.int32))
        finally:
            await backend.close()

    async def check(self, name: str, *, ours: bool) -> None:
        """Everything that a server must be. Raises ConfigError with what it is not."""
        if not is_server(name):
            renderer = ChatMLRenderer(await self._load())
            await open_url(name, BackendContext(renderer, get_env)).close()
            return
        backend = await self._open(name, self._config.backend_key if ours else "")
        try:
            async with asyncio.timeout(CHECK_S):
                await check_server(backend, await self._load(), self._config.model)
        except TimeoutError:
            raise ConfigError(
                f"{name} did not answer within {CHECK_S:g} s", "a model server", "is it frozen?"
            ) from None
        finally:
            await backend.close()

    async def _open(self, name: str, key: str) -> VllmBackend:
        tokenizer = await self._load()
        return VllmBackend(name, tokenizer.vocab_size, model=self._config.model, api_key=key)

    async def _load(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = await asyncio.to_thread(load_tokenizer, self._config.tokenizer)
        return self._tokenizer
