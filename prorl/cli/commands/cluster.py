"""`prorl cluster`: nodes for a service, placed by Dask."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from prorl.cli.options import ConfigFile
from prorl.cli.output import note, say
from prorl.cli.runs import DEFAULT_ROOT
from prorl.cli.settings import job_settings
from prorl.client.client import connect
from prorl.config import ServiceConfig, parse
from prorl.config.file import load_file
from prorl.deploy.leavers import NodeDrainer, drain_and_wait
from prorl.deploy.running import signals

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
    config: ConfigFile = None,
    set_: Annotated[list[str] | None, Parameter(name="--set", negative="")] = None,
) -> int:
    """Keep nodes for the service of a root, placed by Dask, until Ctrl-C.

    Example: prorl cluster slurm --nodes 4 --most 16 --walltime 08:00:00 --queue preempt

    The service must be reachable from other hosts: `prorl serve --listen HOST:PORT`.

    Parameters
    ----------
    system
        `local` starts processes on this host; `slurm`, `pbs`, `lsf`, `sge` and `htcondor` submit
        jobs by dask-jobqueue.
    nodes
        Number of nodes; with --most, the minimum.
    most
        Maximum number of nodes: scale between --nodes and this by the rollouts that wait and run.
    root
        Root of the service; its ROOT/join/node.json must be readable where the nodes run.
    dry_run
        Print the script that a job would run, and submit nothing.
    cores
        CPU cores of a job.
    memory
        Memory of a job.
    walltime
        Time limit of a job.
    queue
        Queue or partition of jobs.
    option
        A line that is passed to the batch system unchanged, e.g. --option=--exclusive.

    set_
        Any setting of the nodes, as KEY=VALUE, e.g. service.run.slots=64.
    """
    from prorl.deploy import cluster as clusters
    from prorl.deploy.placer import placer

    settings = job_settings("cluster", config, {}, set_ or []).service
    checked = parse(ServiceConfig, settings, "service")
    client = connect(root)
    leavers = NodeDrainer(checked.drain_s, checked.sigterm_drain_s, partial(drain_and_wait, client))
    with placer(
        root, settings, "127.0.0.1" if system == "local" else _own_address(root)
    ) as node_placer:
        if system == "local":
            make = partial(clusters.local, node_placer, leavers)
        else:
            job: dict[str, Any] = {"cores": cores, "memory": memory, "walltime": walltime}
            job |= {"job_extra_directives": option or []} | ({"queue": queue} if queue else {})
            make = partial(clusters.jobs, system, node_placer, leavers, **job)
        if dry_run:
            return asyncio.run(_show(make))

        def scale(cluster: Any) -> None:
            if most is None:
                cluster.scale(nodes)
                return
            slots = checked.run.slots
            cluster.adapt(
                Adaptive=clusters.NodeAdaptive,
                minimum=nodes,
                maximum=most,
                interval=ADAPT_EVERY,
                count_nodes=lambda: clusters.required_nodes(client.status(), slots, nodes, most),
            )

        return asyncio.run(_keep(make, leavers, scale, adapts=most is not None))


def _own_address(root: Path) -> str:
    """Returns the address at which nodes of other hosts reach this one: the service runs here,
    too.
    """
    listener = parse(ServiceConfig, load_file(root / "service.json"), str(root)).listener
    if listener is None:
        return "127.0.0.1"  # and no join file: the placer says so
    return listener.advertised if listener.host in ("0.0.0.0", "::", "[::]") else listener.host


async def _show(make: Callable[[], Any]) -> int:
    async with make() as cluster:
        script = getattr(cluster, "job_script", None)
        say(script() if script else "local: processes of this host; there is no script")
    return 0


async def _keep(
    make: Callable[[], Any], leavers: NodeDrainer, scale: Callable[[Any], None], *, adapts: bool
) -> int:
    """Hold the cluster, which belongs to this loop, until somebody asks to stop."""
    from prorl.deploy.cluster import replace_lost

    async with signals() as stop:
        async with make() as cluster:
            scale(cluster)
            note(f"scheduler {cluster.scheduler_address}; nodes leave in order at Ctrl-C")
            again = partial(scale, cluster) if not adapts else lambda: None
            replacing = asyncio.ensure_future(replace_lost(cluster, again, note))
            stop_request = asyncio.ensure_future(stop.requested.wait())
            try:
                await asyncio.wait((stop_request, replacing), return_when=asyncio.FIRST_COMPLETED)
                leavers.ending = True
                if replacing.done():
                    replacing.result()
            finally:
                replacing.cancel()
                stop_request.cancel()
        await leavers.wait_ended()
    return 0
