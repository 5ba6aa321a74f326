"""`prorl run`: a service that lives as long as its one run."""

from __future__ import annotations

import asyncio

from prorl.cli.job import JobPlan
from prorl.cli.options import (
    AgentName,
    ConfigFile,
    Filter,
    Flag,
    JobRoot,
    JsonObject,
    Quiet,
    Seed,
    Settings,
)
from prorl.cli.run_job import run_plan
from prorl.cli.settings import JobOptions, chosen
from prorl.errors import UserError


def run(
    resume_name: str = "",
    /,
    *,
    job: JobOptions = None,
    agent: AgentName = None,
    filter_: Filter = None,
    seed: Seed = None,
    resume: Flag = False,
    dry_run: Flag = False,
    root: JobRoot = None,
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
    resume
        Go on with a run that was interrupted; settings are those it was started with.
    dry_run
        Start nothing: check tasks, filter, template, servers, images and memory, and print a table.
    """
    if resume_name and not resume:
        raise UserError(
            f"{resume_name!r} without an option",
            "--tasks FILE to run a task file, or --resume RUN to go on with a run",
        )
    flags = chosen(job)
    if resume_name:
        flags["name"] = resume_name
    keys = {"agent": agent, "filter": filter_, "seed": seed}
    flags["run"] = {key: value for key, value in keys.items() if value is not None}
    plan = JobPlan.make(config, flags, set_ or [], root=root, resume=resume)
    if dry_run:
        from prorl.cli.dry_run import dry_run as look

        return asyncio.run(look(plan))
    return asyncio.run(run_plan(plan, quiet=quiet, json=json))
