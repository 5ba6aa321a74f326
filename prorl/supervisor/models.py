"""Embedded model servers as children of the service.

`embedded:DIR` in a service's backends becomes an address and a process that serves it.

Invariants: an address is chosen once, so that a server which is restarted comes back under it (with
its first weights; the gateway gives it the newest); it listens on loopback and asks for the
service's backend key.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from prorl.backends.catalogue import checkpoint, child_module, scheme_of
from prorl.config import ServiceConfig
from prorl.errors import ConfigError
from prorl.supervisor.child import ChildSpec


def settle_models(config: ServiceConfig) -> ServiceConfig:
    """Give each `embedded:DIR` backend an address, and the service a key for them.

    Raises ConfigError for what is no model.
    """
    models = {
        free_url(): f"{scheme_of(name)}:{_directory(checkpoint(name))}"
        for name in config.backends
        if child_module(name)
    }
    if not models:
        return config
    others = tuple(name for name in config.backends if not child_module(name))
    key = config.backend_key or secrets.token_urlsafe(32)
    return config.model_copy(
        update={"backends": (*models, *others), "models": models, "backend_key": key}
    )


def model_specs(config: ServiceConfig) -> tuple[ChildSpec, ...]:
    """A process for each settled model."""
    return tuple(
        ChildSpec(
            name=f"model-{index}",
            module=child_module(name),
            args=(
                "--model",
                checkpoint(name),
                "--port",
                url.rpartition(":")[2],
                "--parent",
                str(os.getpid()),
            ),
            stop_rank=4,
            env={"VLLM_API_KEY": config.backend_key},
        )
        for index, (url, name) in enumerate(config.models.items())
    )


def free_url() -> str:
    """A loopback address that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def _directory(path: str) -> Path:
    if not (Path(path) / "config.json").exists():
        raise ConfigError(
            f"model {path!r}", "a Hugging Face directory with config.json and safetensors"
        )
    return Path(path).absolute()
