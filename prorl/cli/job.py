"""One task file as one run: check, start a service, submit, follow to the end, sum up.

Everything that can be wrong with the request is found before a process starts, so a mistake leaves
nothing behind. Submitting uses the idempotency key `tasks/<position>`: a resumed run submits again
and adds nothing that the log has.
"""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

import orjson

from prorl import plugins
from prorl.agents import check_agent
from prorl.backends.catalogue import is_server
from prorl.cli.output import note
from prorl.cli.progress import Show, follow
from prorl.cli.runs import latest_run, root_option
from prorl.cli.settings import Job, job_settings, run_settings, service_settings
from prorl.cli.summary import present
from prorl.config import RunConfig, ServiceConfig
from prorl.deploy.running import client_of, first, in_thread, service, signals
from prorl.envs import get_env
from prorl.errors import ConfigError, ConflictError
from prorl.filters import FILTERS
from prorl.linux.files import make_folder
from prorl.storage.durable import replace_local
from prorl.tasks import TaskSet, read_tasks
from prorl.tasks.generated import is_generated
from prorl.types import Json, Task

if TYPE_CHECKING:
    from prorl.client.client import Client
    from prorl.deploy.running import Running, Stop

JOB_FILE = "job.json"
MANY_COMMITS = 8
"""From so many on a finished run is compacted: before, there is nothing to gain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A checked job: nothing in it can be refused later but by the machine."""

    job: Job
    service: ServiceConfig
    run: RunConfig
    tasks: tuple[Task, ...]
    about: tuple[str, ...]
    """A line for each source of tasks: what it was read as, what was left out."""
    resume: bool

    @property
    def directory(self) -> Path:
        """Directory of the run's job on this host.

        What it stores lies there too unless the root is a URL.
        """
        return self.service.root / self.run.run_id

    @property
    def where(self) -> str:
        """Path or URL of the run directory."""
        return self.service.run_directory(self.run.run_id)

    @property
    def num_rollouts(self) -> int:
        """How many rollouts will be asked for."""
        return len(self.tasks) * (self.job.num_samples + self.job.greedy)

    @classmethod
    def make(
        cls,
        config: Path | None,
        flags: Mapping[str, Json],
        sets: Iterable[str],
        *,
        root: str | Path | None,
        resume: bool = False,
    ) -> Self:
        """Merge settings, read tasks, ask their envs, find the agent.

        Raises ConfigError, TaskError, ConflictError.
        """
        job = job_settings(config, flags, sets)
        if resume:
            job = _resumed(job, service_settings(job.service, root).root.absolute())
        if not job.tasks:
            raise ConfigError(
                "no task file",
                "--tasks FILE, or `tasks:` in the config file",
                "for example --tasks train.jsonl",
            )
        service = service_settings(job.service, root, job.policy)
        service = service.model_copy(update={"root": service.root.absolute(), "load_code": True})
        name = job.name or free_name(service.root, job)
        plan = cls._checked(job.model_copy(update={"name": name}), service, resume)
        _check_existing(plan)
        return plan

    @classmethod
    def _checked(cls, job: Job, service: ServiceConfig, resume: bool) -> Self:
        """The plan of a job that has a name: its agent is there, its server answers, its tasks."""
        run = _run_of(job)
        check_agent(run.agent)
        check_backend(service.backends)
        check_model(job, service, run)
        found = load(job)
        return cls(
            job=job,
            service=service,
            run=run,
            tasks=tuple(task for one in found for task in one.tasks),
            about=tuple(one.about for one in found),
            resume=resume,
        )


def _run_of(job: Job) -> RunConfig:
    """The run's config, with what files of the user are named from here. Raises ConfigError."""
    own = {
        "filter": filter_text(str(job.run.get("filter", "none"))),
        "agent": plugins.absolute(str(job.run.get("agent", "native")), Path.cwd()),
    }
    return run_settings({**job.run, **own}, job.name)


def _check_existing(plan: JobPlan) -> None:
    if plan.where == str(plan.directory) and not plan.directory.exists():
        return  # DuckDB and Parquet would be imported for this, while no process has started
    from prorl.storage.catalog import is_run
    from prorl.storage.layout import RunDir

    if not is_run(plan.where):
        return
    RunDir(plan.where).manifest()
    if not plan.resume:
        name = plan.run.run_id
        raise ConflictError(
            f"run {name!r} exists in {plan.service.root}",
            "a new name",
            f"`prorl run --resume {name}` goes on with it",
        )


def _resumed(job: Job, root: Path) -> Job:
    """The job as it was started, with what was given now on top."""
    name = job.name or latest_run(root, JOB_FILE)
    path = root / name / JOB_FILE
    if not path.exists():
        known = ", ".join(sorted(file.parent.name for file in root.glob(f"*/{JOB_FILE}"))) or "none"
        raise ConfigError(
            f"no run {name!r} to resume in {root}",
            f"one of: {known}",
            "name another with --name or --root",
        )
    before = _read(path)
    now = job.model_dump(mode="json", exclude_unset=True)
    sections = {
        section: {**before.get(section, {}), **now.get(section, {})}
        for section in ("service", "run")
    }
    return Job.model_validate({**before, **now, **sections, "name": name})


def _read(path: Path) -> dict[str, Json]:
    """A job file. Raises ConfigError for one that is damaged."""
    try:
        values = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        hint = "write it again, or give a new run the same tasks under another name"
        raise ConfigError(f"{path} is damaged", "a JSON object, as `prorl run` writes it", hint)
    return values


def load(job: Job) -> list[TaskSet]:
    """The tasks of a file, a folder or generated sets (with commas), each checked by its env.

    Raises TaskError.
    """
    specs = job.tasks.split(",")
    if not all(map(is_generated, specs)):
        specs = [job.tasks]
    find_env = cache(get_env)

    def check(task: Task) -> None:
        find_env(task.env).check(task)

    return [
        read_tasks(spec, job.env, job.limit, skip_bad=job.skip_bad, check=check) for spec in specs
    ]


def check_model(job: Job, service: ServiceConfig, run: RunConfig) -> None:
    """Refuse a model server whose model is not known: its vocabulary is never guessed.

    Raises ConfigError.
    """
    if not any(map(is_server, service.backends)) or "tokenizer" in job.service:
        return
    if service.tokenizer == "bytes" and not (run.renderer.model or run.renderer.name):
        raise ConfigError(
            f"--policy {job.policy} without its model's directory",
            "tokenizer.json and chat template of the model that it serves",
            "add --set run.renderer.model=DIR",
        )


def check_backend(backends: Iterable[str]) -> None:
    """Refuse a model server that does not listen. Raises ConfigError."""
    for url in filter(is_server, backends):
        parts = urlsplit(url)
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            socket.create_connection((parts.hostname or "", port), 5).close()
        except (OSError, ValueError) as error:
            hint = "start it, or use a scripted policy such as oracle"
            raise ConfigError(
                f"no model server answers at {url} ({error})", "http://HOST:PORT of vLLM", hint
            ) from None


def free_name(root: Path, job: Job) -> str:
    """The first of `<tasks>-<policy>-1`, `-2` ... that no run of the root has."""
    policy = "model" if "/" in job.policy else re.split(r"[:?]", job.policy)[0]
    stem = (
        re.sub(r"[^A-Za-z0-9_.-]+", "-", re.split(r"[.:?]", Path(job.tasks).name)[0])
        .strip("-._")
        .lower()
        or "tasks"
    )
    number = 1
    while (root / f"{stem}-{policy}-{number}").exists():
        number += 1
    return f"{stem}-{policy}-{number}"


def tidy(directory: str | Path) -> None:
    """Compact a run that is finished and whose service has ended."""
    from prorl.storage.collect import collect
    from prorl.storage.compact import compact
    from prorl.storage.layout import RunDir

    run = RunDir(directory)
    if len(run.commit_names()) >= MANY_COMMITS:
        compact(run, everything=True)
        collect(run, grace_s=0)


def filter_text(value: str) -> str:
    """A filter's name, SQL itself, or the content of a file of SQL. Raises ConfigError."""
    if value in FILTERS or " " in value.strip():
        return value
    try:
        return Path(value).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(
            f"filter {value!r}: {reason}", f"{', '.join(FILTERS)}, or a readable file of SQL"
        ) from None


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
