"""Clusters of nodes, placed by Dask: processes of this host, jobs of a batch system.

    async with local(join, settings) as cluster:
        cluster.scale(4)                                  # four nodes register with the service
    print(job_script("slurm", join, settings, options))   # what a batch system would be given

Dask starts, sees and stops nodes (`prorl.deploy.placed`); it never schedules a rollout and holds no
truth. How many nodes there should be is asked of the service: `wanted_nodes`.
"""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import dask
import orjson
from dask_jobqueue import HTCondorCluster, LSFCluster, PBSCluster, SGECluster, SLURMCluster
from distributed import Scheduler, SpecCluster
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.spec import ProcessInterface

from prorl.errors import ConfigError
from prorl.types import Json

MODULE = "prorl.deploy.placed"

JOBS: Mapping[str, Any] = {
    "slurm": SLURMCluster,
    "pbs": PBSCluster,
    "lsf": LSFCluster,
    "sge": SGECluster,
    "htcondor": HTCondorCluster,
}
"""The batch systems of dask-jobqueue."""

PATIENCE = "10 minutes"
"""How long Dask waits for a job that it does not see before it cancels it. A pre-empted job is put
back into the queue by the batch system and comes again under its name.
"""

LEAVE_S = 15.0
"""How long a node that was asked to leave may take: its processes promise five seconds."""


def wanted_nodes(status: Mapping[str, Json], slots: int, least: int, most: int) -> int:
    """How many nodes of `slots` RUN slots the open rollouts of a service need.

    >>> wanted_nodes({"runs": [{"counts": {"queued": 90, "running": 10}}]}, 32, 1, 8)
    4
    """
    open_states = ("queued", "leased", "running")
    num_open: int = sum(run["counts"].get(s, 0) for run in status["runs"] for s in open_states)
    return max(least, min(most, math.ceil(num_open / slots)))


class NodeProcess(ProcessInterface):  # type: ignore[misc]
    """A node as a process of this host."""

    def __init__(
        self, scheduler: str, name: str, join: Path, config: Path, **kwargs: object
    ) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._argv = [sys.executable, "-m", MODULE, scheduler, *arguments(join, config)]
        self._argv += ["--name", str(name)]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the process."""
        self.process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        await super().start()

    async def close(self) -> None:
        """Ask it to leave, wait, and end it when it does not."""
        if self.process is not None and self.process.returncode is None:
            self.process.terminate()
            try:
                await asyncio.wait_for(self.process.wait(), LEAVE_S)
            except TimeoutError:
                self.process.kill()
                await self.process.wait()
        await super().close()


def arguments(join: Path, config: Path) -> list[str]:
    """What a placed node is told besides its scheduler and name."""
    return ["--join", str(join.absolute()), "--config", str(config.absolute())]


def write_settings(folder: Path, settings: Mapping[str, Json]) -> Path:
    """The nodes' settings as a file that they read."""
    path = folder / "nodes.json"
    path.write_bytes(orjson.dumps(dict(settings)))
    return path


def local(join: Path, config: Path) -> SpecCluster:
    """Nodes as processes of this host; to be entered with `async with`."""
    options = {"host": "127.0.0.1", "dashboard": False, "dashboard_address": ":0"}
    return SpecCluster(
        workers={},
        scheduler={"cls": Scheduler, "options": options},
        worker={"cls": NodeProcess, "options": {"join": join, "config": config}},
        asynchronous=True,
        name="prorl",
    )


def jobs(system: str, join: Path, config: Path, **options: Any) -> Any:
    """Nodes as jobs of a batch system. `options` are those of dask-jobqueue's cluster.

    A job is a step (`srun`) of its own, since Slurm tells only steps at once that they are
    pre-empted.
    """
    if system not in JOBS:
        raise ConfigError(f"batch system {system!r}", f"one of {', '.join(JOBS)}")
    dask.config.set({"distributed.deploy.lost-worker-timeout": PATIENCE})
    step = "exec srun --ntasks=1 " if system == "slurm" else ""
    directives = ["--requeue", "--open-mode=append"] if system == "slurm" else []
    return JOBS[system](
        python=step + sys.executable,
        worker_command=MODULE,
        job_name="prorl-node",
        worker_extra_args=arguments(join, config),
        processes=1,
        job_extra_directives=[*directives, *options.pop("job_extra_directives", ())],
        asynchronous=True,
        **options,
    )


class NodeAdaptive(Adaptive):  # type: ignore[misc]
    """Scales by what the service has to do, not by Dask's tasks, of which there are none."""

    def __init__(self, cluster: Any, *, wanted: Callable[[], int], **kwargs: Any) -> None:
        self._wanted = wanted
        super().__init__(cluster, **kwargs)

    async def target(self) -> int:
        """Nodes that there should be now."""
        return await asyncio.to_thread(self._wanted)
