"""Clusters of nodes, placed by Dask: processes of this host, jobs of a batch system.

    async with local(join, settings, leavers) as cluster:
        cluster.scale(4)                                  # four nodes register with the service
        cluster.scale(3)                                  # one is drained, then ends
    await leavers.gone()

Dask starts, sees and stops nodes (`prorl.deploy.placed`); it never schedules a rollout and holds no
truth. How many nodes there should be is asked of the service: `wanted_nodes`.
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
import orjson
from dask_jobqueue import HTCondorCluster, LSFCluster, PBSCluster, SGECluster, SLURMCluster
from distributed import Scheduler, SpecCluster, Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.spec import ProcessInterface

from prorl.deploy.leavers import Leavers
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

LEFT_OF_SLURM = '"$(squeue -h -j $SLURM_JOB_ID -o %L)"'
"""In a job's script: the walltime that is left. Relative, since clocks differ between hosts."""

PATIENCE = "10 minutes"
"""How long Dask waits for a job that it does not see before it cancels it. A pre-empted job is put
back into the queue by the batch system and comes again under its name.
"""


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
        self,
        scheduler: str,
        name: str,
        join: Path,
        config: Path,
        leavers: Leavers,
        before: Sequence[str] = (),
    ) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._leavers = leavers
        self._argv = [*before, sys.executable, "-m", MODULE, scheduler, *arguments(join, config)]
        self._argv += ["--name", str(name)]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start the node's process."""
        self.process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        await super().start()

    async def close(self) -> None:
        """Ask it to leave, and see it off in the background."""
        if self.process is not None and self.process.returncode is None:
            self._leavers.see_off(self._leave(self.process))
        await super().close()

    async def _leave(self, process: asyncio.subprocess.Process) -> None:
        process.send_signal(signal.SIGTERM if self._leavers.ending else signal.SIGUSR1)
        try:
            await asyncio.wait_for(process.wait(), self._leavers.patience_s)
        except TimeoutError:
            process.kill()
            await process.wait()


class DrainedJob:
    """Before a `dask_jobqueue.Job`: a job is cancelled once its node has left."""

    leavers: Leavers
    name: object
    status: Status
    job_id: str | None

    async def close(self) -> None:
        """Drain the node and cancel the job, in the background."""
        if self.job_id is not None:
            self.leavers.see_off(self._leave())
        self.status = Status.closed

    async def _leave(self) -> None:
        await self.leavers.drain(str(self.name))
        await super().close()  # type: ignore[misc]  # of the Job that it is mixed with


def arguments(join: Path, config: Path) -> list[str]:
    """What a placed node is told besides its scheduler and name."""
    return ["--join", str(join.absolute()), "--config", str(config.absolute())]


def write_settings(folder: Path, settings: Mapping[str, Json]) -> Path:
    """The nodes' settings as a file that they read."""
    path = folder / "nodes.json"
    path.write_bytes(orjson.dumps(dict(settings)))
    return path


LOCAL_SCHEDULER = {"dashboard": False, "dashboard_address": ":0"}


def local(
    join: Path,
    config: Path,
    leavers: Leavers,
    *,
    host: str = "127.0.0.1",
    before: Sequence[str] = (),
) -> SpecCluster:
    """Nodes as processes of this host; to be entered with `async with`.

    `host`: address of the scheduler; `before`: words that go before the command of a node
    (`nsenter ...`).
    """
    node = {"join": join, "config": config, "leavers": leavers, "before": before}
    return SpecCluster(
        workers={},
        scheduler={"cls": Scheduler, "options": LOCAL_SCHEDULER | {"host": host}},
        worker={"cls": NodeProcess, "options": node},
        asynchronous=True,
        name="prorl",
    )


def jobs(system: str, join: Path, config: Path, leavers: Leavers, **options: Any) -> Any:
    """Nodes as jobs of a batch system. `options` are those of dask-jobqueue's cluster.

    A job is a step (`srun`) of its own, since Slurm tells only steps at once that they are
    pre-empted.
    """
    if system not in JOBS:
        raise ConfigError(f"batch system {system!r}", f"one of {', '.join(JOBS)}")
    dask.config.set({"distributed.deploy.lost-worker-timeout": PATIENCE})
    own, cluster = OF_SLURM if system == "slurm" else OF_OTHERS, JOBS[system]
    # Any free port: two clusters of one host must not want the same one for Dask's dashboard.
    scheduler = {"dashboard_address": ":0", **options.pop("scheduler_options", {})}
    return cluster(
        job_cls=type("Job", (DrainedJob, cluster.job_cls), {"leavers": leavers}),
        python=own.step + sys.executable,
        worker_command=MODULE,
        job_name="prorl-node",
        worker_extra_args=[*arguments(join, config), *own.arguments],
        processes=1,
        job_extra_directives=[*own.directives, *options.pop("job_extra_directives", ())],
        asynchronous=True,
        scheduler_options=scheduler,
        **options,
    )


class OwnWays(NamedTuple):
    """What a job of one batch system has that others do not."""

    step: str = ""
    """Words before the command, with a space behind them."""
    directives: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    """Of the node."""


OF_OTHERS = OwnWays()
OF_SLURM = OwnWays(
    "exec srun --ntasks=1 --kill-on-bad-exit=0 ",
    ("--requeue", "--open-mode=append"),
    ("--left", LEFT_OF_SLURM),
)


class NodeAdaptive(Adaptive):  # type: ignore[misc]
    """Scales by what the service has to do, not by Dask's tasks, of which there are none."""

    def __init__(self, cluster: Any, *, wanted: Callable[[], int], **kwargs: Any) -> None:
        self._wanted = wanted
        super().__init__(cluster, **kwargs)

    async def target(self) -> int:
        """Nodes that there should be now."""
        return await asyncio.to_thread(self._wanted)
