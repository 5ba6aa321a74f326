"""Clusters of nodes, placed by Dask: processes of this host, jobs of a batch system.

    async with local(placer, leavers) as cluster:
        cluster.scale(4)                                  # four nodes register with the service
        cluster.scale(3)                                  # one is drained, then ends
    await leavers.wait_ended()

Dask starts, sees and stops nodes (`prorl.deploy.placed`); it never schedules a rollout and holds no
truth. How many nodes there should be is asked of the service: `required_nodes`. A node whose
process or job has ended by itself is replaced: `replace_lost`.
"""

from __future__ import annotations

import asyncio
import math
import signal
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import dask
from dask_jobqueue import HTCondorCluster, LSFCluster, PBSCluster, SGECluster, SLURMCluster
from distributed import Scheduler, SpecCluster, Status
from distributed.deploy.adaptive import Adaptive
from distributed.deploy.spec import ProcessInterface

from prorl.deploy.leavers import NodeDrainer
from prorl.deploy.placer import Placer, security
from prorl.errors import ConfigError
from prorl.supervisor.child import exit_text
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

REMAINING_WALLTIME = '"$(squeue -h -j $SLURM_JOB_ID -o %L)"'
"""In a job's script: the walltime that is left. Relative, since clocks differ between hosts."""

STEP = "exec srun --ntasks=1 --kill-on-bad-exit=0 "
"""Before the command of a Slurm job, a space behind it: Slurm tells only steps at once that they
are pre-empted.
"""

LIVING = frozenset(
    {
        *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "PREEMPTED"),
        *("REQUEUE_HOLD", "REQUEUE_FED", "RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"),
        *("SPECIAL_EXIT", "RESV_DEL_HOLD"),
    }
)
"""States of a Slurm job that runs, or will."""

LOOK_S, YOUNG_S, LONGEST_S = 2.0, 60.0, 60.0
"""Between two looks for nodes that were lost; what has lived too briefly to be replaced at once."""

PATIENCE = "10 minutes"
"""The time for which Dask waits for a job that it does not see before it cancels it. A pre-empted
job is put back into the queue by the batch system and comes again under its name.
"""


def required_nodes(status: Mapping[str, Json], slots: int, least: int, most: int) -> int:
    """Returns how many nodes of `slots` RUN slots the open rollouts of a service need.

    >>> required_nodes({"runs": [{"counts": {"queued": 90, "running": 10}}]}, 32, 1, 8)
    4
    """
    open_states = ("queued", "leased", "running")
    num_open: int = sum(run["counts"].get(s, 0) for run in status["runs"] for s in open_states)
    return max(least, min(most, math.ceil(num_open / slots)))


class PrivateScheduler(Scheduler):  # type: ignore[misc]
    """Dask's, without a port for HTTP."""

    def start_http_server(self, *_: object, **__: object) -> None:
        """Start none: nothing of a placer is for looking at."""


class NodeProcess(ProcessInterface):  # type: ignore[misc]
    """A node as a process of this host."""

    def __init__(
        self,
        scheduler: str,
        name: str,
        placer: Placer,
        leavers: NodeDrainer,
    ) -> None:
        super().__init__(scheduler=scheduler, name=name)
        self._leavers = leavers
        self._argv = [sys.executable, "-P", "-m", MODULE, scheduler, *placer.arguments]
        self.node = f"{placer.name}-{name}"
        self._argv += ["--name", self.node]
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        self.process = await asyncio.create_subprocess_exec(
            *self._argv, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        await super().start()

    async def lost(self) -> str:
        """Returns how the process ended by itself; empty while it has not."""
        code = self.process.returncode if self.process is not None else None
        return "" if code is None else exit_text(code)

    async def close(self) -> None:
        """Ask it to leave, and see it off in the background."""
        if self.process is not None and self.process.returncode is None:
            self._leavers.drain_in_background(self._leave(self.process))
        await super().close()

    async def _leave(self, process: asyncio.subprocess.Process) -> None:
        process.send_signal(signal.SIGTERM if self._leavers.ending else signal.SIGUSR1)
        try:
            await asyncio.wait_for(process.wait(), self._leavers.patience_s)
        except TimeoutError:
            process.kill()
            await process.wait()


class DrainedJob:
    """Mixed in before a `dask_jobqueue.Job`: the job is cancelled once its node has left."""

    leavers: NodeDrainer
    name: object
    status: Status
    job_id: str | None

    @property
    def node(self) -> str:
        """The name of its node in the service."""
        return str(self.name)

    async def lost(self) -> str:
        """Returns how the job ended by itself; empty here: only Slurm can be asked.

        Elsewhere Dask cancels a job that it has not seen for `PATIENCE`.
        """
        return ""

    async def close(self) -> None:
        """Drain the node and cancel the job, in the background."""
        if self.job_id is not None:
            self.leavers.drain_in_background(self._leave())
        self.status = Status.closed

    async def _leave(self) -> None:
        await self.leavers.drain(self.node)
        await super().close()  # type: ignore[misc]  # of the Job that it is mixed with


class DrainedSlurmJob(DrainedJob):
    """A job of Slurm: one that was pre-empted goes back into the queue and is not lost."""

    async def lost(self) -> str:
        """Returns the state that the job ended in; empty while it runs or waits."""
        if self.job_id is None:
            return ""
        squeue = await asyncio.create_subprocess_exec(
            *("squeue", "-h", "-j", self.job_id, "-o", "%T"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        out, err = await squeue.communicate()
        state = out.decode().strip()
        if squeue.returncode:  # a controller that is away says nothing about jobs
            return "is unknown to Slurm" if b"Invalid job id" in err else ""
        return "" if state in LIVING else f"ended: {state or 'it has left the queue'}"


def local(placer: Placer, leavers: NodeDrainer) -> SpecCluster:
    """Nodes as processes of this host; to be entered with `async with`."""
    return SpecCluster(
        workers={},
        scheduler={"cls": PrivateScheduler, "options": _scheduler(placer)},
        worker={"cls": NodeProcess, "options": {"placer": placer, "leavers": leavers}},
        asynchronous=True,
        security=security(placer.folder),
        name=placer.name,
    )


def jobs(system: str, placer: Placer, leavers: NodeDrainer, **options: Any) -> Any:
    """Nodes as jobs of a batch system. `options` are those of dask-jobqueue's cluster."""
    if system not in JOBS:
        raise ConfigError(f"batch system {system!r}", f"one of {', '.join(JOBS)}")
    dask.config.set({"distributed.deploy.lost-worker-timeout": PATIENCE})
    cluster, slurm = JOBS[system], system == "slurm"
    drained = DrainedSlurmJob if slurm else DrainedJob
    directives = ["--requeue", "--open-mode=append"] if slurm else []
    return cluster(
        job_cls=type("Job", (drained, cluster.job_cls), {"leavers": leavers}),
        python=f"{STEP if slurm else ''}{sys.executable} -P",
        worker_command=MODULE,
        job_name="prorl-node",
        worker_extra_args=[
            *placer.arguments,
            *(("--walltime", REMAINING_WALLTIME) if slurm else ()),
        ],
        processes=1,
        job_extra_directives=[*directives, *options.pop("job_extra_directives", ())],
        asynchronous=True,
        scheduler_cls=PrivateScheduler,
        scheduler_options={**_scheduler(placer), **options.pop("scheduler_options", {})},
        security=security(placer.folder),
        name=placer.name,
        **options,
    )


def _scheduler(placer: Placer) -> dict[str, Any]:
    """Returns options of a scheduler that only the holders of the placer's key can reach."""
    return {
        "host": placer.host,
        "port": 0,
        "protocol": "tls://",
        "security": security(placer.folder),
        "dashboard": False,
        "dashboard_address": None,
    }


async def replace_lost(
    cluster: Any, scale: Callable[[], None], tell: Callable[[str], None]
) -> None:
    """Place another node for each whose process or job has ended by itself, for ever.

    One that does not live for `YOUNG_S` is not replaced at once: its cause may be there still.
    """
    born: dict[object, float] = {}
    pause_s = 0.0
    while True:
        await asyncio.sleep(LOOK_S)
        now, ended_nodes = time.monotonic(), []
        for name, worker in list(cluster.workers.items()):
            lived_s = now - born.setdefault(name, now)
            if how := await worker.lost():
                pause_s = min(LONGEST_S, 2 * pause_s + LOOK_S) if lived_s < YOUNG_S else 0.0
                again = f"another one in {pause_s:g} s" if pause_s else "another one is placed"
                tell(f"node {worker.node} {how}; {again}")
                ended_nodes.append(name)
        for name in ended_nodes:
            cluster.workers.pop(name).status = Status.closed
            cluster.worker_spec.pop(name, None)
            born.pop(name)
        if ended_nodes:
            await asyncio.sleep(pause_s)
            scale()


class NodeAdaptive(Adaptive):  # type: ignore[misc]
    """Scales by what the service has to do, not by Dask's tasks, of which there are none."""

    def __init__(self, cluster: Any, *, count_nodes: Callable[[], int], **kwargs: Any) -> None:
        self._count_nodes = count_nodes
        super().__init__(cluster, **kwargs)

    async def target(self) -> int:
        return await asyncio.to_thread(self._count_nodes)
