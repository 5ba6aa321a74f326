"""`prorl eval`: how good a policy is: pass@k with an interval, read back from what was stored.

Nothing is trained. With --stored no policy is asked: what a run left is graded again.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from prorl import env_settings
from prorl.cli.job import JobPlan
from prorl.cli.options import (
    ConfigFile,
    JobRoot,
    JsonObject,
    Quiet,
    SandboxKind,
    Seed,
    Settings,
    Temperature,
)
from prorl.cli.output import answer, note, say, say_json, table
from prorl.cli.passk import evaluation
from prorl.cli.run_job import run_plan
from prorl.cli.runs import DEFAULT_ROOT, run_directory
from prorl.cli.settings import Job, JobOptions, absolute_env, chosen
from prorl.errors import UserError
from prorl.pluralize import pluralize
from prorl.types import Json

if TYPE_CHECKING:
    import pyarrow as pa

    from prorl.cli.passk import Passed


def evaluate(
    *,
    job: JobOptions = None,
    temperature: Temperature = None,
    seed: Seed = None,
    stored: str = "",
    sandbox: SandboxKind = "auto",
    eval_s: float | None = None,
    root: JobRoot = None,
    config: ConfigFile = None,
    set_: Settings = None,
    json: JsonObject = False,
    quiet: Quiet = False,
) -> int:
    """Measure how good a policy is: pass@k with Wilson's 95 % interval over tasks; nothing is
    trained.

    With --stored RUN no model is asked: its stored artifacts are graded again, by other tests
    (--tasks, by task id), another env (--env) or mended graders. Nothing stored changes; the new
    rewards are the rows of the table `scores` whose `score` is --name.

    Example: prorl eval --tasks 'arith:heldout?n=512,shop:heldout?n=512' --policy toy --greedy

    Example: prorl eval --stored my-run --name harder --tasks HumanEvalPlus.jsonl

    Parameters
    ----------
    stored
        Name of a run in the root, or path of a run directory.
    eval_s
        With --stored: seconds for one rollout; default: the run's own limit.
    """
    if stored:
        options = chosen(job)
        if alien := options.keys() - {"tasks", "env", "name"}:
            raise UserError(f"--{min(alien)} with --stored", "--name, --tasks, --env")
        others = {"temperature": temperature, "seed": seed, "config": config, "set": set_}
        if alien := {name for name, value in others.items() if value is not None}:
            raise UserError(f"--{min(alien)} with --stored", "--name, --tasks, --env")
        directory = run_directory(stored, root or DEFAULT_ROOT)
        return rescore(directory, Job(**options), sandbox, eval_s, json=json)
    if sandbox != "auto":
        raise UserError(
            "--sandbox without --stored",
            "the setting of the service",
            f"--set service.sandbox.kind={sandbox}",
        )
    if eval_s is not None:
        raise UserError(
            "--eval-s without --stored",
            "the setting of the run",
            f"--set run.limits.eval_s={eval_s:g}",
        )
    flags = chosen(job) | {"run": {} if seed is None else {"seed": seed}}
    warmth = [] if temperature is None else [f"run.sampling.temperature={temperature}"]
    plan = JobPlan.make(config, flags, [*(set_ or []), *warmth], root=root, command="eval")

    def present(directory: Path, *, json: bool, elapsed_s: float | None) -> int:
        return show_evaluation(directory, json=json)

    return asyncio.run(run_plan(plan, quiet=quiet, json=json, present=present))


def show_evaluation(directory: Path, *, json: bool) -> int:
    """Print pass@k; 1 when nothing counts."""
    sets = evaluation(directory)
    if json:
        rows = [passed.to_json() for passed in sets]
        place = {"run": directory.name, "directory": str(directory)}
        say_json({**place, "rows": rows})
    else:
        ks = sorted({k for passed in sets for k in passed.at})
        shares = (f"pass@{k} [95 % Wilson]" for k in ks)
        table(("set", "mode", "tasks", "n", "masked", *shares), _rows(sets, ks))
        say(f"read back by SQL from {directory}")
    return 0 if any(passed.tasks for passed in sets) else 1


def _rows(sets: Sequence[Passed], ks: Sequence[int]) -> Iterator[Sequence[object]]:
    for passed in sets:
        shares = [str(passed.at[k]) if k in passed.at else "" for k in ks]
        yield (passed.data_source, passed.mode, passed.tasks, passed.n, passed.masked, *shares)


async def _check_settings(settings: Mapping[str, Mapping[str, Json]]) -> None:
    from prorl.envs.users import check_settings_of

    for name, values in settings.items():
        await check_settings_of(name, values)


def rescore(directory: str, job: Job, sandbox: str, eval_s: float | None, *, json: bool) -> int:
    """Run EVAL on the stored artifacts of a run; 1 when nothing was scored."""
    import orjson
    import pyarrow.compute as pc

    from prorl.cli.commands.check import sandbox_settings
    from prorl.envs.users import env_by_name
    from prorl.sandbox.node.probe import choose
    from prorl.sandbox.spawn import spawned
    from prorl.service.core.manifest import code_sha256
    from prorl.stages.rescore import num_graded_in_place
    from prorl.stages.rescore import rescore as grade
    from prorl.storage.files.appended import add_scores, check_name
    from prorl.storage.read.catalog import StoredRun
    from prorl.tasks import read_tasks

    run, name = StoredRun(directory), job.name
    limits = run.manifest["config"].get("limits") or {}
    chosen_env = absolute_env(job.env)
    settings, env = env_settings.read(chosen_env), env_settings.env_of_all(chosen_env)
    env = "" if env == env_settings.AUTO else env
    check_name(run.directory, name)
    if env:
        env_by_name(env)
    asyncio.run(_check_settings(settings))
    others = {}
    if job.tasks:
        read = read_tasks(job.tasks, chosen_env)
        note(read.about)
        others = {task.task_id: task for task in read.tasks}

    async def graded() -> pa.Table:
        async with spawned(await choose(sandbox), **sandbox_settings()) as (host, _):
            return await grade(
                run,
                name,
                host,
                env_by_name,
                tasks=others,
                env=env,
                settings=settings,
                eval_s=eval_s or limits.get("eval_s", 120.0),
                concurrency=2 * (os.cpu_count() or 1),
                provenance=orjson.dumps(provenance).decode(),
            )

    provenance: dict[str, Json] = {
        "env": env,
        "env_settings": settings,
        "tasks": job.tasks,
        "commits": run.commits[-1].commit_seq if run.commits else 0,
        "code_sha256": code_sha256(),
        "created_at": time.time(),
    }
    if num_skipped := num_graded_in_place(run):
        skipped = pluralize(num_skipped, "rollout is left out: it", "rollouts are left out: they")
        note(
            f"{skipped} changed more than crossed to the tests (`run.limits.artifact_mb`), which"
            " therefore ran in the rollout's own sandbox"
        )
    rows = asyncio.run(graded())
    add_scores(run.directory, name, rows)
    scored = rows.column("reward").drop_null()
    mean = pc.mean(scored).as_py()
    figures = {
        "run": run.run_id,
        "score": name,
        "rollouts": rows.num_rows,
        "scored": len(scored),
        "mean_reward": mean,
    }
    reward = "-" if mean is None else f"mean {mean:.3f}"
    line = f"{run.run_id}: {len(scored):,} of {rows.num_rows:,} scored, {reward} · {name}"
    answer(figures, [line], json=json)
    return 0 if len(scored) or not rows.num_rows else 1
