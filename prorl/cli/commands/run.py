"""`prorl run`: a service that lives as long as its one run."""

from __future__ import annotations

import asyncio
from typing import Annotated

from cyclopts import Parameter

from prorl.cli.job import JobPlan
from prorl.cli.options import ConfigFile, Flag, JobRoot, JsonObject, Quiet, Settings
from prorl.cli.progress import Show
from prorl.cli.run_job import run_plan
from prorl.errors import UserError


def run(
    resume_name: str = "",
    /,
    *,
    tasks: str | None = None,
    policy: str | None = None,
    n: Annotated[int | None, Parameter(name=["-n", "--n"])] = None,
    limit: int | None = None,
    env: str | None = None,
    skip_bad: Flag = False,
    root: JobRoot = None,
    name: str | None = None,
    filter_: Annotated[str | None, Parameter(name="--filter")] = None,
    seed: int | None = None,
    topology: str | None = None,
    resume: Flag = False,
    config: ConfigFile = None,
    set_: Settings = None,
    json: JsonObject = False,
    quiet: Quiet = False,
) -> int:
    """Run every task of a file through INIT, RUN and EVAL.

    Stores the trajectories and prints what came out, by SQL over the stored files.

    Example: prorl run --tasks HumanEval.jsonl.gz --policy oracle

    Example: prorl run --resume humaneval-oracle-1

    Parameters
    ----------
    resume_name
        With --resume: the run to go on with.
    tasks
        File or folder: JSON Lines, JSON, Parquet; GSM8K, HumanEval, SWE-bench, verl, NeMo Gym,
        questions and answers, or {"task_id", "env", "prompt", "data"} a row.
    policy
        oracle (default), noop, flaky, faulty, toy, a checkpoint's directory, or http://HOST:PORT of
        a model server.
    n
        Rollouts of each task. Default: 4 with flaky, else 1.
    limit
        Only the first tasks of the file.
    env
        Env of every task. Default: as the file's format says.
    skip_bad
        Leave out rows that cannot be read or used, and count them.
    name
        Name of the run. Default: made from task file and policy.
    filter_
        none (default), dapo, or a file with SQL.
    seed
        Of the run; the same seed repeats a run.
    topology
        processes (default) or inline: everything but sandboxes in one process.
    resume
        Go on with a run that was interrupted; settings are those it was started with.
    """
    if resume_name and not resume:
        raise UserError(
            f"{resume_name!r} without an option",
            "--tasks FILE to run a task file, or --resume RUN to go on with a run",
        )
    flags = {
        "tasks": tasks,
        "policy": policy,
        "n": n,
        "limit": limit,
        "env": env,
        "skip_bad": skip_bad or None,
        "name": resume_name or name,
        "run": _given(filter=filter_, seed=seed),
        "service": _given(topology=topology),
    }
    plan = JobPlan.make(config, flags, set_ or [], root=root, resume=resume)
    show = Show.NOTHING if quiet or json else Show.AUTO
    return asyncio.run(run_plan(plan, show=show, json=json))


def _given(**values: object) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}
