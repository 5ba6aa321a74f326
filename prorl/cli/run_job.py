"""A checked job is carried out: start a service, submit, follow to the end, sum up.

Submitting uses the idempotency key `tasks/<position>`: a resumed run submits again and adds nothing
that the log has.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import orjson

from prorl import plugins
from prorl.backends.catalogue import is_server
from prorl.cli.built import Built, build_images, folders_of, missing, recipes_of
from prorl.cli.job import JobPlan
from prorl.cli.output import note
from prorl.cli.progress import follow
from prorl.cli.runs import root_option
from prorl.cli.summary import present
from prorl.config import JOB_FILE, ServiceConfig
from prorl.deploy.running import client_of, first, service, signals
from prorl.deploy.tracking import RunTrackers, run_trackers
from prorl.linux.files import make_folder
from prorl.pluralize import pluralize
from prorl.sandbox.images.registry import default_root
from prorl.types import Json

if TYPE_CHECKING:
    from prorl.client.client import Client
    from prorl.supervisor.service import Supervisor


NOTICE_AFTER_S = 3.0
"""A run that takes longer to be made: people are told why."""

BUILDS_AT_A_TIME = 2
"""The limit of builds, as `prorl image build` has it: a build takes a core and the network in
turn.
"""

MANY_COMMITS = 8
"""From so many on a finished run is compacted: before, there is nothing to gain."""


def tidy(directory: str | Path) -> None:
    """Compact a run that is finished and whose service has ended."""
    from prorl.storage.files.layout import RunDir

    run = RunDir(directory)
    if len(run.commit_names()) >= MANY_COMMITS:
        from prorl.storage.keep.compact import collect, compact

        compact(run, everything=True)
        collect(run, grace_s=0)


async def run_plan(
    plan: JobPlan,
    *,
    quiet: bool = False,
    json: bool = False,
    present: Callable[..., int] = present,
) -> int:
    """Carry it out; the exit code, which is what `present` says of the run directory."""
    await ask_servers(plan.service)
    importing = asyncio.create_task(asyncio.to_thread(_import_late))
    async with signals() as stop:
        async with service(plan.service, stop) as running:
            await importing
            async with run_trackers(running, _silent if quiet or json else note) as trackers:
                following = _follow(plan, running, trackers, quiet or json)
                finished = await first(stop, running, following)
        if finished is None:
            again = f"prorl run --resume {plan.run.run_id}{root_option(plan.service.root)}"
            note(f"interrupted: what was done is kept in {plan.directory}; `{again}` continues")
            return 130
    tidy(plan.where)
    # a resumed run's rollouts took longer than this process did
    return present(plan.where, json=json, elapsed_s=None if plan.resume else finished)


def _import_late() -> None:
    """Imports, while the processes of the service start, what is needed once it listens and at the
    end.
    """
    for module in ("prorl.client.client", "prorl.storage.read.catalog", "prorl.storage.read.sql"):
        import_module(module)


async def ask_servers(config: ServiceConfig) -> None:
    """Ask each model server, before anything is started, whether it is what the service needs.

    That is: it is well, serves the model's name, and gives logprobs of what it samples from. Raises
    ConfigError.
    """
    if urls := list(filter(is_server, config.backends)):
        from prorl.service.pool.servers import Servers

        servers = Servers(config, lambda name: True)
        await asyncio.gather(*(servers.check(url, ours=True) for url in urls))


def _silent(line: str) -> None:
    """Takes lines of progress that nobody wants."""


async def _follow(plan: JobPlan, running: Supervisor, trackers: RunTrackers, quiet: bool) -> float:
    """Submit and wait for the end; returns the seconds that it took."""
    start = time.monotonic()
    client = client_of(running)
    client.on_note = lambda note: None  # `plan.about` says it once, for all tasks
    creating = asyncio.ensure_future(asyncio.to_thread(_create, client, plan))
    done, _ = await asyncio.wait({creating}, timeout=NOTICE_AFTER_S)
    if not done and plan.run.renderer.model:
        note(
            f"proving the chat template of {plan.run.renderer.model}: once, for as long as it takes"
        )
    await creating
    trackers.follow(plan.run.run_id, plan.run.track)
    for line in () if quiet else plan.about:
        note(line)
    unbuilt = set[Path]()
    submitting = asyncio.ensure_future(_submit_when_built(client, plan, quiet, unbuilt))
    following = asyncio.ensure_future(
        follow(
            client,
            running,
            plan.run.run_id,
            plan.num_rollouts,
            quiet=quiet,
            more=lambda run: [f"images to build {len(unbuilt):,}"] if unbuilt else (),
        )
    )
    try:
        await submitting
        await following
    finally:
        submitting.cancel()
        following.cancel()
        await asyncio.gather(submitting, following, return_exceptions=True)
        client.close()
    return time.monotonic() - start


def _create(client: Client, plan: JobPlan) -> None:
    from prorl.storage.files.durable import replace_local

    client.create_run(**plan.run.model_dump(mode="json", exclude_unset=True))
    make_folder(plan.directory)
    written = orjson.dumps(_absolute(plan), option=orjson.OPT_INDENT_2)
    replace_local(plan.directory / JOB_FILE, written)


def _absolute(plan: JobPlan) -> dict[str, Json]:
    """The job so that it means the same from another folder, and years later."""
    job, envs = plan.job, {task.env for task in plan.tasks}
    sources = [Path(job.tasks), *(path for path in map(code_of, envs) if path)]
    values = job.model_dump(mode="json", exclude_unset=True)
    tasks = str(Path(job.tasks).absolute()) if Path(job.tasks).exists() else job.tasks
    policy = (
        str(Path(job.policy).absolute())
        if (Path(job.policy) / "config.json").exists()
        else job.policy
    )
    return {**values, "name": job.name, "tasks": tasks, "policy": policy, "sha256": hashes(sources)}


def code_of(env: str) -> Path | None:
    """The file of a user's env: `file.py:attr`, `module:attr`, an entry point; None for ours."""
    place, _, attribute = env.rpartition(":")
    if place.endswith(".py"):
        return Path(place)
    points = plugins.registered("prorl.envs")
    module = place if attribute and place else points[env].module if env in points else ""
    spec = find_spec(module) if module else None
    return Path(spec.origin) if spec and spec.origin else None


def hashes(files: Iterable[Path]) -> dict[str, str]:
    """SHA-256 by path, of those that are files."""
    return {
        str(file.absolute()): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in files
        if file.is_file()
    }


async def _submit_when_built(
    client: Client, plan: JobPlan, quiet: bool, unbuilt: set[Path]
) -> None:
    """Submit the tasks whose images are there, then the others as their images are built. `unbuilt`
    has the folders of those images until then.

    A task whose image cannot be built is submitted, too: it fails with the reason, which the
    registry keeps for a while. A dataset of several epochs is submitted whole.
    """
    root, build = plan.service.sandbox.images or default_root(), plan.service.sandbox.build
    recipes = recipes_of(plan.tasks)
    lacking = await asyncio.to_thread(missing, recipes, root, build) if recipes else {}
    unbuilt.update(lacking)
    waiting = {i: lacking.keys() & set(folders_of(task)) for i, task in enumerate(plan.tasks)}
    ready: asyncio.Queue[int] = asyncio.Queue(len(plan.tasks))
    number = count(1)

    def ended(built: Built) -> None:
        unbuilt.discard(built.folder)
        if not quiet:
            note(f"image {next(number)} of {len(lacking)}: {built.about}")
        for i, folders in waiting.items():
            if built.folder in folders:
                folders.discard(built.folder)
                if not folders:
                    ready.put_nowait(i)

    if not lacking or plan.run.epochs:
        if lacking:
            await build_images(lacking, root, build, BUILDS_AT_A_TIME, ended)
        await asyncio.to_thread(_submit, client, plan)
        return
    if not quiet:
        note(f"to build: {len(lacking):,} of {pluralize(len(recipes), 'image')}")
    building = asyncio.ensure_future(build_images(lacking, root, build, BUILDS_AT_A_TIME, ended))
    try:
        for i in (i for i, folders in waiting.items() if not folders):
            await asyncio.to_thread(_submit, client, plan, i)
        for _ in range(sum(bool(folders) for folders in waiting.values()) + ready.qsize()):
            await asyncio.to_thread(_submit, client, plan, await ready.get())
        await building
    finally:
        building.cancel()
        await asyncio.gather(building, return_exceptions=True)
    await asyncio.to_thread(client.submit, plan.run.run_id, (), last=True)


def _submit(client: Client, plan: JobPlan, index: int | None = None) -> None:
    """Submit one task, or all of them and that no more will come."""
    run = plan.run.run_id
    tasks = plan.tasks if index is None else (plan.tasks[index],)
    if plan.job.greedy:
        cold = replace(plan.run.sampling.params(), temperature=0.0)
        mode = {"mode": "greedy"}
        client.submit(run, tasks, 1, key="greedy", first=index or 0, sampling=cold, extra=mode)
    client.submit(
        run, tasks, plan.job.num_samples, key="tasks", first=index or 0, last=index is None
    )
