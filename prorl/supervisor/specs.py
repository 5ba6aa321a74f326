"""The processes of a service and of a node: what each is, and in which order they stop."""

from __future__ import annotations

import os
from collections.abc import Callable

from prorl.config import ServiceConfig
from prorl.graph import GRAPH, REDELIVERED_EDGES
from prorl.supervisor.child import ChildSpec
from prorl.supervisor.models import model_specs
from prorl.supervisor.places import box_dir

SANDBOXD, STAGES = "prorl.sandbox.node.daemon", "prorl.stages"


def child_specs(config: ServiceConfig, config_file: str) -> tuple[ChildSpec, ...]:
    """The processes of a service; workers are named as their sockets are."""
    common = ("--config", config_file)
    specs = [
        ChildSpec(name="gateway", module="prorl.service", args=common, stop_rank=3),
        ChildSpec(name="sandboxd", module=SANDBOXD, args=sandboxd_args(config), stop_rank=4),
    ]
    for stage in GRAPH.names:
        rank = int(GRAPH.takes(stage) in REDELIVERED_EDGES)  # it ends what the others have begun
        for index in range(config.pool(stage).workers):
            worker = f"{stage}-{index}"
            args = (*common, "--stage", stage, "--worker", worker)
            specs.append(ChildSpec(name=worker, module=STAGES, args=args, stop_rank=rank))
    specs.append(ChildSpec(name="store", module="prorl.storage", args=common, stop_rank=2))
    return (*specs, *model_specs(config))


def node_specs(config: ServiceConfig, config_file: str) -> tuple[ChildSpec, ...]:
    """The processes of a node whose gateway and store are on another host."""
    own = child_specs(config, config_file)
    return tuple(spec for spec in own if spec.module in (SANDBOXD, STAGES))


def sandboxd_args(config: ServiceConfig) -> tuple[str, ...]:
    """sandboxd knows nothing of prorl's config: it is a program of its own."""
    options = {
        "--socket": config.sandbox_socket,
        "--root": box_dir(config.root),
        "--kind": config.sandbox.kind,
        "--node-id": config.node_id,
        "--parent-pid": os.getpid(),
        "--max-sandboxes": config.sandbox.max_sandboxes,
        "--warm": config.sandbox.warm,
        "--snapshot-bytes": config.sandbox.snapshot_bytes,
        "--image": config.sandbox.image,
        "--images": config.sandbox.images.absolute() if config.sandbox.images else "",
    }
    return tuple(str(word) for option in options.items() for word in option)


Specs = Callable[[ServiceConfig, str], tuple[ChildSpec, ...]]
"""Resolved config and its file -> the processes to start."""
