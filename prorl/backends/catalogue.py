"""The table of backends: one row for each URL scheme.

A backend is one file with an `Opener` and one row of `CATALOGUE`, which config, CLI, supervisor,
gateway and RUN all read. Yours is a server that speaks vLLM's token subset over HTTP, for no code
of users runs in a worker: `configs/servers/tokens.py` is a whole one.

A backend with a coroutine `probe()` (`prorl.protocols.ProbedBackend`) is probed once, before it
serves its first rollout. A backend that is not an HTTP server (`is_server`) gets neither health
checks nor weights: its failures show in the rollouts that it serves.

Imports nothing heavy, and no backend before one is opened.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from prorl.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from prorl.protocols import Backend, Env, RemoteRenderer, Renderer

ADAPTER_FILE = "adapter_config.json"


class BackendContext(NamedTuple):
    """Holds what a backend may use of the process that opens it."""

    renderer: Renderer | RemoteRenderer
    env: Callable[[str], Env]
    """An env by name, for scripted backends."""
    model: str = ""
    """Name of the model that a server is asked for; empty = the only one it has."""
    api_key: str = ""


class Opener(Protocol):
    """Connects to nothing yet. Raises ConfigError."""

    def __call__(self, url: str, context: BackendContext) -> Backend: ...


class Scheme(NamedTuple):
    example: str
    """An example, as errors and help name it."""
    opener: str = ""
    """`module:attribute` of an `Opener`."""
    is_server: bool = False
    """Speaks HTTP at its URL: `health`, and the calls of `prorl/backends/weight_target.py`."""
    health: str = "/health"
    """The path that it answers at once, also while it is paused, as long as it is well."""
    weights: str = ""
    """`module:attribute` of its `WeightDialect`; empty = the server is asked."""
    child_module: str = ""
    """Run by the supervisor with `--model DIR --port N --parent PID`, for URLs that name a
    checkpoint's directory; stages and gateway get that server's address instead.
    """
    policies: Mapping[str, str] = {}
    """The texts that may follow the scheme, and that `--policy` takes without it, each in words;
    empty = anything, only with it.
    """


_SGLANG: Any = {
    "opener": "prorl.backends.sglang:open_sglang",
    "is_server": True,
    "health": "/ping",  # its /health samples a token, which takes a second, and a pause stops it
    "weights": "prorl.backends.sglang:WEIGHTS",
}
CATALOGUE: Mapping[str, Scheme] = {
    "scripted": Scheme(
        example="scripted:oracle|flaky|noop|random|faulty",
        opener="prorl.backends.scripted:open_scripted",
        policies={
            "oracle": "the task's own solution",
            "flaky": "right on about half of all rollouts: on some tasks always, on some never",
            "noop": "one useless answer",
            "random": "random tokens",
            "faulty": "a server that breaks",
        },
    ),
    "embedded": Scheme(example="embedded:DIR", child_module="prorl.backends.embedded"),
    "http": Scheme(
        example="http://HOST:PORT", opener="prorl.backends.vllm:open_vllm", is_server=True
    ),
    "https": Scheme(
        example="https://HOST:PORT", opener="prorl.backends.vllm:open_vllm", is_server=True
    ),
    "sglang+http": Scheme(example="sglang+http://HOST:PORT", **_SGLANG),
    "sglang+https": Scheme(example="sglang+https://HOST:PORT", **_SGLANG),
}


def scheme_of(url: str) -> str:
    """The part of a backend's URL that names its row: all before the first colon; empty if none.

    >>> scheme_of("scripted:flaky?p=0.6"), scheme_of("toy")
    ('scripted', '')
    """
    scheme, colon, _ = url.partition(":")
    return scheme if colon else ""


def has_scheme(url: str) -> bool:
    """Returns whether some row has the URL's scheme."""
    return scheme_of(url) in CATALOGUE


def is_server(url: str) -> bool:
    """Returns whether the URL is that of a model server: has a health, takes weights.

    >>> is_server("http://localhost:8000"), is_server("scripted:oracle")
    (True, False)
    """
    scheme = CATALOGUE.get(scheme_of(url))
    return scheme is not None and scheme.is_server


def address(url: str) -> str:
    """Returns where a model server listens.

    >>> address("sglang+http://localhost:30000/"), address("http://localhost:8000")
    ('http://localhost:30000', 'http://localhost:8000')
    """
    scheme, _, rest = url.rstrip("/").partition(":")
    return f"{scheme.rpartition('+')[2]}:{rest}"


def health_url(url: str) -> str:
    return address(url) + CATALOGUE[scheme_of(url)].health


def child_module(url: str) -> str:
    """The module that serves the URL's checkpoint as a child of the service; empty if none does."""
    scheme = CATALOGUE.get(scheme_of(url))
    return scheme.child_module if scheme else ""


def checkpoint(url: str) -> str:
    """The directory that a URL with a `child_module` names; empty for any other.

    >>> checkpoint("embedded:/models/a"), checkpoint("http://localhost:8000")
    ('/models/a', '')
    """
    return url.partition(":")[2] if child_module(url) else ""


def embedded(directory: str) -> str:
    """The URL of a checkpoint that the service serves itself."""
    return f"embedded:{directory}"


def is_adapter(path: str) -> bool:
    """Returns whether a directory holds a LoRA adapter as PEFT writes it, not a checkpoint."""
    return bool(path) and os.path.exists(os.path.join(path, ADAPTER_FILE))


def examples() -> str:
    """Returns what a backend's URL may look like, for errors."""
    return ", ".join(scheme.example for scheme in CATALOGUE.values())


def valid_url(url: str) -> str:
    """A backend's URL as it is written everywhere. Raises ConfigError with what is wrong with it.

    >>> valid_url("http://localhost:8000/")
    'http://localhost:8000'
    """
    if not has_scheme(url) or child_module(url):
        raise ConfigError(f"backend {url[:200]!r}", examples())
    if not is_server(url):
        return url
    parts = urlsplit(url)
    try:
        host, port = (parts.hostname or "").encode("idna"), parts.port
    except (UnicodeError, ValueError) as error:
        raise ConfigError(f"backend {url[:200]!r}: {error}", "http://HOST:PORT") from None
    extra = parts.query or parts.fragment or parts.username or parts.password
    if not host or port == 0 or extra or any(char.isspace() for char in url):
        raise ConfigError(f"backend {url[:200]!r}", "http://HOST:PORT, with nothing after it")
    if parts.path.rstrip("/").endswith("/v1"):
        raise ConfigError(f"backend {url[:200]!r}", "the address without /v1")
    return url.rstrip("/")


def open_url(url: str, context: BackendContext) -> Backend:
    """The backend of a URL. Raises ConfigError."""
    if child_module(url):
        raise ConfigError(
            f"backend {url!r}", "the address of its server", "name it in the service's backends"
        )
    if not has_scheme(url):
        raise ConfigError(
            f"backend {url!r}",
            examples(),
            "start a server that speaks vLLM's token subset (docs/extending.md), and name its"
            " address",
        )
    opener: Opener = imported(CATALOGUE[scheme_of(url)].opener)
    return opener(url, context)


def imported(place: str) -> Any:
    """Returns what a row names as `module:attribute`."""
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
