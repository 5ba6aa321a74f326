"""The processes of a service and of a node: what each is, and in which order they stop.

`embedded:DIR` in a service's backends becomes an address and a model server of its own. The address
is chosen once, so that one which is restarted comes back under it (with its first weights; the
gateway gives it the newest); it listens on loopback and asks for the service's backend key.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Callable
from pathlib import Path

from prorl.backends.catalogue import checkpoint, child_module, scheme_of
from prorl.config import ServiceConfig
from prorl.config.layout import SERVICE, num_sandboxes, processes
from prorl.errors import ConfigError
from prorl.graph import GRAPH
from prorl.network_policy import UPSTREAM_VARIABLE
from prorl.supervisor.child import ChildSpec
from prorl.supervisor.root import box_dir
from prorl.waits import wait_limit_s

SANDBOXD, STAGES = "prorl.sandbox.node.daemon", "prorl.stages"


def child_specs(config: ServiceConfig, config_file: str) -> tuple[ChildSpec, ...]:
    """The processes of a service; workers are named as their sockets are."""
    common = ("--config", config_file)
    host = processes(config)
    specs = [
        ChildSpec(
            name=SERVICE,
            module="prorl.deploy.service",
            args=common,
            stop_rank=3,
            grace_s=wait_limit_s("supervisor.stop_service"),
            has_stages=SERVICE in host,
        ),
        ChildSpec(
            name="sandboxd",
            module=SANDBOXD,
            args=sandboxd_args(config),
            stop_rank=4,
            env={UPSTREAM_VARIABLE: config.sandbox.network.upstream},
        ),
    ]
    for worker, stages in host.items():
        if worker != SERVICE:
            # what ends that others have begun goes later
            rank = int(all(stage in GRAPH.separable for stage in stages))
            args = (*common, "--worker", worker)
            specs.append(
                ChildSpec(
                    name=worker,
                    module=STAGES,
                    args=args,
                    stop_rank=rank,
                    grace_s=wait_limit_s("supervisor.stop_worker"),
                    has_stages=True,
                )
            )
    if config.store.own_process:
        specs.append(ChildSpec(name="store", module="prorl.storage", args=common, stop_rank=2))
    return (*specs, *model_specs(config))


def node_specs(config: ServiceConfig, config_file: str) -> tuple[ChildSpec, ...]:
    """The processes of a node whose gateway and store are on another host."""
    own = child_specs(config, config_file)
    return tuple(spec for spec in own if spec.module in (SANDBOXD, STAGES))


def sandboxd_args(config: ServiceConfig) -> tuple[str, ...]:
    """sandboxd knows nothing of prorl's config: it is a program of its own."""
    sandbox = config.sandbox
    arguments = {
        "socket": str(config.sandbox_socket),
        "root": str(box_dir(config.root)),
        "kind": sandbox.kind,
        "node_id": config.node_id,
        "parent_pid": os.getpid(),
        "max_sandboxes": num_sandboxes(config),
        "warm": sandbox.warm,
        "snapshot_bytes": sandbox.snapshot_bytes,
        "mirrors": sandbox.mirrors if sandbox.pull else None,
        "build": sandbox.build.model_dump(exclude_defaults=True),
        "max_memory_bytes": sandbox.max_memory_mb << 20,
        "max_overlay_bytes": sandbox.max_storage_mb << 20,
        "max_cpus": sandbox.max_cpus,
        "network": sandbox.network.settings(own_urls(config)),
        "image": sandbox.image,
        "images": str(sandbox.images.absolute()) if sandbox.images else "",
    }
    return (json.dumps(arguments),)


def own_urls(config: ServiceConfig) -> list[str]:
    """Returns the addresses of the service itself and of its model servers: no sandbox reaches
    them.
    """
    listener = config.listener
    urls = [listener.url, listener.gateway, listener.store] if listener else []
    return [*urls, *config.backends, *config.models, config.gateway]


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


Specs = Callable[[ServiceConfig, str], tuple[ChildSpec, ...]]
"""Resolved config and its file -> the processes to start."""
