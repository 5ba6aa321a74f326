"""`prorl rescore`: grade a stored run again, without a policy."""

from __future__ import annotations

import asyncio
import os
import time
from typing import Annotated

import pyarrow as pa
import pyarrow.compute as pc
from cyclopts import Parameter

from prorl.cli.output import note, say, say_json
from prorl.cli.runs import run_directory
from prorl.envs import get_env
from prorl.sandbox.node.probe import choose
from prorl.sandbox.spawn import spawned
from prorl.service.provenance import code_sha256
from prorl.stages.rescore import rescore as grade
from prorl.storage.catalog import StoredRun
from prorl.storage.scores import add_scores, check_name
from prorl.tasks import read_tasks
from prorl.types import Task


def rescore(
    run: str,
    name: str,
    /,
    *,
    tasks: str | None = None,
    env: str = "",
    sandbox: str = "auto",
    eval_s: float = 120.0,
    root: str = "prorl-runs",
    json: Annotated[bool, Parameter(negative="")] = False,
) -> int:
    """Run EVAL on the stored artefacts of a run: other tests, another env, mended graders. No model
    is asked, nothing that was stored changes; the new rewards are the table `scores` in SQL.

    Example: prorl rescore my-run harder-tests --tasks HumanEvalPlus.jsonl

    Parameters
    ----------
    run
        Name of a run in the root, or path of a run directory.
    name
        What the new rewards are called.
    tasks
        File of tasks that stand in for those of the run, by task id. Default: the run's own.
    env
        Env that grades, by name or place (file.py:Class). Default: each task's own.
    sandbox
        Kind of sandbox; auto = the strongest that works here.
    eval_s
        Seconds for one rollout.
    root
        Folder of the runs: a path, s3://BUCKET/PREFIX or gs://...
    json
        Print what came out as one JSON object.
    """
    stored = StoredRun(run_directory(run, root))
    check_name(stored.directory, name)
    if env:
        get_env(env)
    others: dict[str, Task] = {}
    if tasks is not None:
        found = read_tasks(tasks, env or "auto")
        note(found.about)
        others = {task.task_id: task for task in found.tasks}
    rows = asyncio.run(_grade(stored, name, others, env, sandbox, eval_s))
    made_by = {
        "score": name,
        "env": env,
        "tasks": tasks or "",
        "commits": stored.commits[-1].commit_seq if stored.commits else 0,
        "code_sha256": code_sha256(),
        "created_at": time.time(),
    }
    path = add_scores(stored.directory, name, rows, made_by)
    known = rows.filter(pc.is_valid(rows.column("reward")))
    answer = {
        "run": stored.run_id,
        "score": name,
        "rollouts": rows.num_rows,
        "scored": known.num_rows,
        "mean_reward": pc.mean(known.column("reward")).as_py(),
        "file": path,
    }
    if json:
        say_json(answer)
    else:
        mean = answer["mean_reward"]
        reward = "-" if mean is None else f"mean {mean:.3f}"
        say(f"{stored.run_id}: {known.num_rows:,} of {rows.num_rows:,} scored, {reward} · {path}")
    return 0 if known.num_rows or not rows.num_rows else 1


async def _grade(
    stored: StoredRun, name: str, tasks: dict[str, Task], env: str, sandbox: str, eval_s: float
) -> pa.Table:
    async with spawned(await choose(sandbox)) as (host, _):
        return await grade(
            stored,
            name,
            host,
            get_env,
            tasks=tasks,
            env=env,
            eval_s=eval_s,
            concurrency=2 * (os.cpu_count() or 1),
        )
