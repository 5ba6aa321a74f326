"""Backends: where tokens come from. All pass the same contract tests; `catalogue.py` has the table.

| URL | what |
|---|---|
| `scripted:oracle` | solves the task through the real tools, from `Env.reference` |
| `scripted:flaky?p=0.6` | the oracle, right with a seeded probability per task: groups differ |
| `scripted:noop` | a useless answer at once |
| `scripted:random` | a tiny seeded distribution: real sampling and logprobs without a model |
| `scripted:faulty?error=0.1&delay_s=0.05` | any of them with failures (`scripted.py`) |
| `embedded:DIR` | a checkpoint that the supervisor serves: arrives here as an address |
| `http://host:port` | vLLM, or anything that speaks its token subset |
| `sglang+http://host:port` | SGLang |
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from prorl.backends.catalogue import BackendContext, open_url
from prorl.errors import BackendError, ConfigError
from prorl.protocols import ProbedBackend
from prorl.types import FailureCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from prorl.protocols import Backend, Env, RemoteRenderer, Renderer


def open_backend(
    url: str,
    renderer: Renderer | RemoteRenderer,
    env: Callable[[str], Env],
    *,
    model: str = "",
    api_key: str = "",
) -> Backend:
    """`env` finds one by name, for scripts. Connects to nothing yet. Raises ConfigError."""
    return open_url(url, BackendContext(renderer, env, model, api_key))


async def open_probed(
    url: str,
    renderer: Renderer | RemoteRenderer,
    env: Callable[[str], Env],
    *,
    model: str = "",
    api_key: str = "",
) -> Backend:
    """Opens a backend as `open_backend` does, and probes it where it can be probed. Raises
    BackendError, too.
    """
    backend = open_backend(url, renderer, env, model=model, api_key=api_key)
    if isinstance(backend, ProbedBackend):
        try:
            await backend.probe()
        except ConfigError as error:
            await backend.close()
            raise BackendError(FailureCode.BACKEND_PROTOCOL, str(error)) from error
        except BaseException:
            await backend.close()
            raise
    return backend
