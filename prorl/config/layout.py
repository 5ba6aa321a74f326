"""Decides which process of a host runs which stages.

    workers: 0               service                      gateway, store, INIT -> RUN -> EVAL
    workers: 2               service, worker-0, worker-1  gateway, store; a chain in each worker
    eval.own_processes: 1    service, eval-0              a stage beside the chains

A chain never spans processes: what leaves one of its stages goes to the next one in the same loop,
by an edge that hands over record batches without the socket. INIT and RUN are always one chain,
since a row that leaves INIT is not sent again; a stage whose rows are kept upstream until the store
has them may have processes of its own on the same host. Everything is known from the configuration,
so nobody must be told where the stages of its host are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from prorl.config import ServiceConfig
from prorl.graph import GRAPH
from prorl.pluralize import pluralize

SERVICE = "service"

SINGLE_LOOP_CORES = 4
"""Up to so many cores a second process for the stages costs more than it brings: one loop does
about 40 rollouts a second with tools, and model servers or tools want the other cores.
"""

MOST_SANDBOXES = 4096


def settle(config: ServiceConfig, cores: int | None = None) -> ServiceConfig:
    """The configuration with `workers: auto` decided: by cores, a whole number or `nodes`."""
    if config.workers != "auto":
        return config
    cores = cores or len(os.sched_getaffinity(0))
    return config.model_copy(update={"workers": int(cores > SINGLE_LOOP_CORES)})


def processes(config: ServiceConfig) -> Mapping[str, tuple[str, ...]]:
    """The stages of each process of this host that has any, by its name."""
    workers = settle(config).workers
    if not isinstance(workers, int):
        return {}
    own = [stage for stage in GRAPH.names if config.pool(stage).own_processes]
    chain = tuple(stage for stage in GRAPH.names if stage not in own)
    count = max(workers, int(bool(config.gateway)))
    chains = [f"worker-{index}" for index in range(count)] or [SERVICE]
    apart = {
        f"{stage}-{index}": (stage,)
        for stage in own
        for index in range(config.pool(stage).own_processes)
    }
    return dict.fromkeys(chains, chain) | apart


def worker_of(process: str, stage: str) -> str:
    """The name of a stage in a process: `run-1` of `worker-1`."""
    _, _, index = process.rpartition("-")
    return f"{stage}-{index if index.isdecimal() else 0}"


def upstreams(config: ServiceConfig, process: str, stage: str) -> tuple[str, ...]:
    """The locations that a stage of a process dials for its rows."""
    above = GRAPH.upstream(stage)
    if not above:
        return (config.gateway_flight,)
    host = processes(config)
    chained = above in host[process]
    names = [process] if chained else [name for name, stages in host.items() if above in stages]
    return tuple(map(config.worker_flight, names))


def num_sandboxes(config: ServiceConfig) -> int:
    """Returns how many sandboxes this host may have at a time, unless the configuration says it.

    RUN needs three a slot: its own, EVAL's, which is made ready meanwhile, and EVAL's of a finished
    row that waits to be scored; the other stages one. What a chain has left that died needs no room
    beside it: its next incarnation ends that before it begins anything.
    """
    if config.sandbox.max_sandboxes is not None:
        return config.sandbox.max_sandboxes
    hosted = [stage for stages in processes(config).values() for stage in stages]
    needed = sum(config.pool(stage).slots * (3 if stage == "run" else 1) for stage in hosted)
    return max(1, min(MOST_SANDBOXES, needed + config.sandbox.warm))


def about(config: ServiceConfig) -> str:
    """The layout in words, and which bound decides how many rollouts run at a time."""
    host = processes(config)
    runs = [name for name, stages in host.items() if "run" in stages]
    if not runs:
        return "stages on nodes only: none in this service"
    where = f"{len(runs)} chains of stages in processes of their own"
    if runs == [SERVICE]:
        where = "gateway, stages and store in one process"
    elif len(runs) == 1:
        where = "one chain of stages in a process of its own"
    slots, most = len(runs) * config.run.slots, num_sandboxes(config)
    bound = f"run.slots: {pluralize(slots, 'rollout')} at a time"
    if most < slots:
        of = pluralize(slots, "slot")
        bound = f"sandbox.max_sandboxes: {most} at a time of {of}, where each needs one"
    return f"{where}; {bound}"
