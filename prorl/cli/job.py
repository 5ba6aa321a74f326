"""One task file as one run, checked: settings, tasks, envs, agent, model server.

Everything that can be wrong with the request is found here, before a process starts, so a mistake
leaves nothing behind. `run_job.py` carries a checked job out.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import orjson

from prorl import env_settings, plugins
from prorl.agents import check_agent
from prorl.agents.programs import carried, program_of
from prorl.cli.runs import first_free, latest_run
from prorl.cli.settings import Job, check_model, job_settings, run_settings, service_settings
from prorl.cli.usage import nearest
from prorl.config import JOB_FILE, Limits, RunConfig, ServiceConfig
from prorl.config.trackers import check_trackers
from prorl.envs.users import check_settings_of, env_by_name, open_env
from prorl.errors import ConfigError, ConflictError
from prorl.filters import FILTERS, PASS_RATE, is_named
from prorl.network_policy import ungranted_network
from prorl.protocols import Env
from prorl.service.core.candidates import check_group_size
from prorl.tasks import TaskSet, read_tasks, sources
from prorl.types import Json, Task
from prorl.waits import wait_limit_s

EVAL_START_S = wait_limit_s("eval.start")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobPlan:
    """A checked job: nothing in it can be refused later but by the machine."""

    job: Job
    service: ServiceConfig
    run: RunConfig
    tasks: tuple[Task, ...]
    about: tuple[str, ...]
    """Lines for each source of tasks: what it was read as, what was left out, what has no
    effect.
    """
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
        command: str = "run",
    ) -> Self:
        """Merge settings, read tasks, ask their envs, find the agent.

        Raises ConfigError, TaskError, ConflictError.
        """
        job = job_settings(command, config, flags, sets)
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
        check_group_size(job.num_samples, run.filter)
        check_agent(run.agent)
        check_trackers(run.track)
        if not (run.renderer.model or run.renderer.name):
            check_model(job.service, service, "add --set run.renderer.model=DIR")
        offer = Offer()
        task_sets = load(job, offer)
        run = run.model_copy(update=offer.settings())
        tasks = tuple(task for task_set in task_sets for task in task_set.tasks)
        return cls(
            job=job,
            service=service,
            run=with_task_limits(run, tasks),
            tasks=tasks,
            about=(
                *(
                    line
                    for each in task_sets
                    for line in (each.about, *each.bad_rows, *each.deviations)
                ),
                *ungranted_network(tasks, service.sandbox.network.most),
            ),
            resume=resume,
        )


def _run_of(job: Job) -> RunConfig:
    """The run's config, with what files of the user are named from here. Raises ConfigError."""
    agent = str(job.run.get("agent", "native"))
    own = {
        "filter": filter_text(str(job.run.get("filter", "none"))),
        "agent": carried(agent, Path.cwd())
        if program_of(agent)
        else plugins.absolute(agent, Path.cwd()),
    }
    skip = {"skip_invalid": True} if job.skip_invalid else {}
    settings = env_settings.read(job.env)
    env = {"env": settings} if settings else {}
    return run_settings({**job.run, **skip, **own, **env}, job.name)


def with_task_limits(run: RunConfig, tasks: Iterable[Task]) -> RunConfig:
    """The run with the longest limits that its Harbor tasks state, where it has none itself."""
    longest: dict[str, float] = {}
    for task in tasks:
        verifier_s = (task.data.get("verifier") or {}).get("timeout_s", 0.0)
        stated = {
            "run_s": task.data.get("agent_timeout_s") or 0.0,
            "eval_s": verifier_s and verifier_s + EVAL_START_S,
        }
        if "agent_timeout_s" in task.data:
            longest = {key: max(value, longest.get(key, 0.0)) for key, value in stated.items()}
    own = run.limits.model_dump(exclude_unset=True)
    limits = {**{key: min(value, 86400.0) for key, value in longest.items() if value}, **own}
    return run.model_copy(update={"limits": Limits(**limits)}) if longest else run


def _check_existing(plan: JobPlan) -> None:
    if plan.where == str(plan.directory) and not plan.directory.exists():
        return  # DuckDB and Parquet would be imported for this, while no process has started
    from prorl.storage.files.layout import RunDir
    from prorl.storage.files.runs import is_run

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
    """Returns the job as it was started, overlaid with the new settings."""
    name = job.name or latest_run(root, JOB_FILE)
    path = root / name / JOB_FILE
    if not path.exists():
        names = ", ".join(sorted(file.parent.name for file in root.glob(f"*/{JOB_FILE}"))) or "none"
        raise ConfigError(
            f"no run {name!r} to resume in {root}",
            f"one of: {names}",
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
    try:
        values = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError:
        values = None
    if not isinstance(values, dict):
        hint = "write it again, or give a new run the same tasks under another name"
        raise ConfigError(f"{path} is damaged", "a JSON object, as `prorl run` writes it", hint)
    return values


class Offer:
    """The messages and tools of a job's tasks: the run is refused where its model's template cannot
    show them.
    """

    def __init__(self) -> None:
        self._tools: dict[str, None] = {}
        self._has_system = False

    def add(self, env: Env, task: Task) -> None:
        self._tools.update(dict.fromkeys(tool.name for tool in env.tools(task)))
        self._has_system |= any(message.role == "system" for message in env.messages(task))

    def settings(self) -> dict[str, Json]:
        """Returns the settings of the run's config."""
        return {"tools": tuple(self._tools), "system_message": self._has_system}


def load(job: Job, offer: Offer | None = None) -> list[TaskSet]:
    """The tasks of a file, a folder or generated sets (with commas), each checked by its env.
    `offer` collects what they show to a model. Raises TaskError.
    """
    offer = offer or Offer()
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return _load(job, offer)
    with ThreadPoolExecutor(1) as thread:  # beside the caller's loop
        return thread.submit(_load, job, offer).result()


def _load(job: Job, offer: Offer) -> list[TaskSet]:
    find_env, settings = cache(env_by_name), env_settings.read(job.env)

    with asyncio.Runner() as runner:
        for name, values in settings.items():
            runner.run(check_settings_of(name, values))

        def check(task: Task) -> None:
            env = runner.run(open_env(find_env, task))
            env.check(task)
            offer.add(env, task)

        task_sets = [
            read_tasks(spec, job.env, job.limit, skip_invalid=job.skip_invalid, check=check)
            for spec in sources(job.tasks)
        ]
    envs = {task.env for task_set in task_sets for task in task_set.tasks}
    if unused := sorted(settings.keys() - envs):
        problem = f"settings of the env {unused[0]!r}, which no task of {job.tasks} has"
        raise ConfigError(problem, f"settings of {', '.join(sorted(envs))}")
    return task_sets


def free_name(root: Path, job: Job) -> str:
    """The first of `<tasks>-<policy>-1`, `-2` ... that no run of the root has."""
    policy = "model" if "/" in job.policy else re.split(r"[:?]", job.policy)[0]
    stem = (
        re.sub(r"[^A-Za-z0-9_.-]+", "-", re.split(r"[.:?]", Path(job.tasks).name)[0])
        .strip("-._")
        .lower()
        or "tasks"
    )
    return first_free(root, f"{stem}-{policy}")


def filter_text(value: str) -> str:
    """A filter's name, SQL itself, or the content of a file of SQL. Raises ConfigError."""
    if is_named(value) or " " in value.strip():
        return value
    try:
        return Path(value).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise ConfigError(
            f"filter {value!r}: {reason}",
            f"{', '.join(FILTERS)}, {PASS_RATE}, or a readable file of SQL",
            nearest(value, FILTERS),
        ) from None
