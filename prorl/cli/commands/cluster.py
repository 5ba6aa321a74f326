"""`prorl cluster`: nodes for a service, placed by Dask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from prorl.cli.output import note, say
from prorl.cli.runs import DEFAULT_ROOT
from prorl.cli.settings import job_settings
from prorl.client.client import connect
from prorl.config import ServiceConfig, parse
from prorl.deploy.running import Stop, signals
from prorl.errors import ConfigError

ADAPT_EVERY = "5s"


def cluster(
    system: str,
    /,
    *,
    nodes: int = 1,
    most: int | None = None,
    root: Path = DEFAULT_ROOT,
    dry_run: bool = False,
    cores: int = 8,
    memory: str = "32GB",
    walltime: str = "04:00:00",
    queue: str = "",
    option: Annotated[list[str] | None, Parameter(name="--option", negative="")] = None,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
) -> int:
    """Nodes for the service of a root, placed by Dask, until Ctrl-C.

    Example: prorl cluster slurm --nodes 4 --most 16 --walltime 08:00:00 --queue preempt

    The service must be reachable from other hosts: `prorl serve --listen HOST:PORT`.

    Parameters
    ----------
    system
        `local`: processes of this host. `slurm`, `pbs`, `lsf`, `sge`, `htcondor`: jobs, by
        dask-jobqueue.
    nodes
        How many; with --most the least.
    most
        Scale between --nodes and this by the rollouts that wait and run.
    root
        Of the service; its ROOT/join/node.json must be readable where the nodes run.
    dry_run
        Print the script that a job would run, and submit nothing.
    cores
        Of a job.
    memory
        Of a job.
    walltime
        Of a job.
    queue
        Queue or partition of jobs.
    option
        A line for the batch system as it stands, e.g. --option=--exclusive.
    config
        YAML file for the nodes; see `prorl schema --config`.
    set_
        Any setting of the nodes, as KEY=VALUE, e.g. service.run.slots=64.
    """
    from prorl.deploy import cluster as clusters

    join = root / "join" / "node.json"
    if not join.exists():
        raise ConfigError(
            f"{join} does not exist", "a service for other hosts", "prorl serve --listen HOST:PORT"
        )
    settings = job_settings(config, {}, set_ or []).service
    checked = parse(ServiceConfig, settings, "service")
    path = clusters.write_settings(root, settings)
    job = {"cores": cores, "memory": memory, "walltime": walltime}
    if queue:
        job["queue"] = queue
    make = (
        partial(clusters.local, join, path)
        if system == "local"
        else partial(clusters.jobs, system, join, path, job_extra_directives=option or [], **job)
    )
    return asyncio.run(_keep(make, checked.run.slots, nodes, most, root, dry_run))


async def _keep(
    make: Callable[[], Any], slots: int, nodes: int, most: int | None, root: Path, dry_run: bool
) -> int:
    """Hold the cluster, which belongs to this loop, until somebody asks to stop."""
    async with signals() as stop, make() as cluster:
        if dry_run:
            script = getattr(cluster, "job_script", None)
            say(script() if script else "local: processes of this host; there is no script")
            return 0
        stop.arm(lambda: None)
        return await _scaled(cluster, stop, slots, nodes, most, root)


async def _scaled(
    cluster: Any, stop: Stop, slots: int, nodes: int, most: int | None, root: Path
) -> int:
    from prorl.deploy import cluster as clusters

    if most is None:
        cluster.scale(nodes)
    else:
        client = connect(root)
        cluster.adapt(
            Adaptive=clusters.NodeAdaptive,
            minimum=nodes,
            maximum=most,
            interval=ADAPT_EVERY,
            wanted=lambda: clusters.wanted_nodes(client.status(), slots, nodes, most),
        )
    note(f"scheduler {cluster.scheduler_address}; nodes leave in order at Ctrl-C")
    await stop.asked.wait()
    return 0
