"""A checked job is carried out: start a service, submit, follow to the end, sum up.

Submitting uses the idempotency key `tasks/<position>`: a resumed run submits again and adds nothing
that the log has.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from prorl.cli.job import JOB_FILE, JobPlan
from prorl.cli.output import note
from prorl.cli.progress import Show, follow
from prorl.cli.runs import root_option
from prorl.cli.settings import Job
from prorl.cli.summary import present
from prorl.deploy.running import client_of, first, in_thread, service, signals
from prorl.linux.files import make_folder
from prorl.storage.durable import replace_local
from prorl.types import Json

if TYPE_CHECKING:
    from prorl.client.client import Client
    from prorl.deploy.running import Running, Stop


MANY_COMMITS = 8
"""From so many on a finished run is compacted: before, there is nothing to gain."""


def tidy(directory: str | Path) -> None:
    """Compact a run that is finished and whose service has ended."""
    from prorl.storage.collect import collect
    from prorl.storage.compact import compact
    from prorl.storage.layout import RunDir

    run = RunDir(directory)
    if len(run.commit_names()) >= MANY_COMMITS:
        compact(run, everything=True)
        collect(run, grace_s=0)


async def run_plan(
    plan: JobPlan,
    *,
    show: Show = Show.AUTO,
    json: bool = False,
    present: Callable[..., int] = present,
) -> int:
    """Carry it out; the exit code, which is what `present` says of the run directory."""
    async with signals() as stop:
        async with service(plan.service, stop) as running:
            finished = await first(stop, running, _follow(plan, running, stop, show))
        if finished is None:
            again = f"prorl run --resume {plan.run.run_id}{root_option(plan.service.root)}"
            note(f"interrupted: what was done is kept in {plan.directory}; `{again}` continues")
            return 130
    tidy(plan.where)
    return present(plan.where, json=json, elapsed_s=finished)


async def _follow(plan: JobPlan, running: Running, stop: Stop, show: Show) -> float:
    """Submit and wait for the end; seconds that it took."""
    start = time.monotonic()
    client = client_of(running)
    await in_thread(_create, client, plan)
    for line in plan.about if show is not Show.NOTHING else ():
        note(line)
    submitting = asyncio.ensure_future(in_thread(_submit, client, plan))
    following = asyncio.ensure_future(
        follow(client, running, plan.run.run_id, plan.num_rollouts, show)
    )
    try:
        await submitting
        await following
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        client.close()
    return time.monotonic() - start


def _create(client: Client, plan: JobPlan) -> None:
    client.create_run(**plan.run.model_dump(mode="json", exclude_unset=True))
    make_folder(plan.directory)
    written = orjson.dumps(_absolute(plan.job), option=orjson.OPT_INDENT_2)
    replace_local(plan.directory / JOB_FILE, written)


def _absolute(job: Job) -> dict[str, Json]:
    """The job so that it means the same from another folder."""
    values = job.model_dump(mode="json", exclude_unset=True)
    tasks = str(Path(job.tasks).absolute()) if Path(job.tasks).exists() else job.tasks
    policy = (
        str(Path(job.policy).absolute())
        if (Path(job.policy) / "config.json").exists()
        else job.policy
    )
    return {**values, "name": job.name, "tasks": tasks, "policy": policy}


def _submit(client: Client, plan: JobPlan) -> None:
    run = plan.run.run_id
    if plan.job.greedy:
        cold = replace(plan.run.sampling.params(), temperature=0.0)
        client.submit(run, plan.tasks, 1, key="greedy", sampling=cold, extra={"mode": "greedy"})
    client.submit(run, plan.tasks, plan.job.num_samples, key="tasks", last=True)
