"""`prorl rescore`: grade a stored run again, without a policy."""

from __future__ import annotations

import asyncio
import os
import time

import pyarrow as pa
import pyarrow.compute as pc

from prorl.cli.options import JsonObject, RunsRoot, StoredName
from prorl.cli.output import answer, note
from prorl.cli.runs import run_directory
from prorl.envs import get_env
from prorl.sandbox.node.probe import choose
from prorl.sandbox.spawn import spawned
from prorl.service.provenance import code_sha256
from prorl.stages.rescore import rescore as grade
from prorl.storage.catalog import StoredRun
from prorl.storage.scores import add_scores, check_name
from prorl.tasks import read_tasks
from prorl.types import Json, Task


def rescore(
    run: StoredName,
    name: str,
    /,
    *,
    tasks: str | None = None,
    env: str = "",
    sandbox: str = "auto",
    eval_s: float = 120.0,
    root: RunsRoot = "prorl-runs",
    json: JsonObject = False,
) -> int:
    """Run EVAL on the stored artefacts of a run: other tests, another env, mended graders.

    No model is asked, nothing stored changes; the new rewards are the table `scores` in SQL.

    Example: prorl rescore my-run harder-tests --tasks HumanEvalPlus.jsonl

    Parameters
    ----------
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
    """
    stored = StoredRun(run_directory(run, root))
    check_name(stored.directory, name)
    if env:
        get_env(env)
    others = {} if tasks is None else _others(tasks, env)
    rows = asyncio.run(_grade(stored, name, others, env, sandbox, eval_s))
    path = add_scores(stored.directory, name, rows, _made_by(stored, name, env, tasks or ""))
    scored = rows.column("reward").drop_null()
    found = {
        "run": stored.run_id,
        "score": name,
        "rollouts": rows.num_rows,
        "scored": len(scored),
        "mean_reward": pc.mean(scored).as_py(),
        "file": path,
    }
    answer(found, [_line(found)], json=json)
    return 0 if len(scored) or not rows.num_rows else 1


def _others(path: str, env: str) -> dict[str, Task]:
    """The tasks of a file that stand in for those of the run, by id."""
    found = read_tasks(path, env or "auto")
    note(found.about)
    return {task.task_id: task for task in found.tasks}


def _made_by(stored: StoredRun, name: str, env: str, tasks: str) -> dict[str, Json]:
    """Where the scores come from, as it is stored beside them."""
    return {
        "score": name,
        "env": env,
        "tasks": tasks,
        "commits": stored.commits[-1].commit_seq if stored.commits else 0,
        "code_sha256": code_sha256(),
        "created_at": time.time(),
    }


def _line(found: dict[str, Json]) -> str:
    mean = found["mean_reward"]
    reward = "-" if mean is None else f"mean {mean:.3f}"
    scored = f"{found['scored']:,} of {found['rollouts']:,} scored"
    return f"{found['run']}: {scored}, {reward} · {found['file']}"


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
