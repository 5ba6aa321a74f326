"""`prorl demo`: a tiny policy learns to use tools, through the whole service, offline.

Everything is real: processes, Flight, sandboxes, tools, exact tokens, Parquet, DAPO's decisions in
SQL, a policy update from zero-copy batches, weights published back. The policy is a toy of 0.5
million parameters that ships with the package. Three runs over one service:

    NAME-before --> NAME (trainer: stream -> update -> checkpoint -> commit -> publish) -->
    NAME-after

Each step says what is already there when it is done again: runs by name, groups by key, the trainer
by its checkpoint. So a demo that was interrupted anywhere goes on with the same code.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from prorl.backends.catalogue import valid_url
from prorl.backends.embedded import TOY
from prorl.cli.demo.recipe import (
    DEMO_FILE,
    GUEST,
    SETS,
    Recipe,
    eval_run,
    heldout_tasks,
    newest_checkpoint,
    service_config,
    train_run,
    train_tasks,
    trainer_command,
)
from prorl.cli.demo.report import AFTER, BEFORE, present, report
from prorl.cli.options import Flag, JsonObject, SandboxKind
from prorl.cli.output import note, say_json
from prorl.cli.progress import Run, follow
from prorl.cli.run_job import tidy
from prorl.cli.runs import DEFAULT_ROOT, first_free, latest_run, root_option
from prorl.config import parse
from prorl.config.file import load_file
from prorl.deploy.running import client_of, first, service, signals
from prorl.errors import ConfigError, ConflictError
from prorl.linux.procfs import cpu_s, descendants
from prorl.pluralize import pluralize
from prorl.sandbox import kinds
from prorl.service.pool.servers import Servers
from prorl.supervisor.child import ChildSpec
from prorl.supervisor.service import Supervisor
from prorl.supervisor.specs import free_url
from prorl.types import Json

AFTER_SHARE = 0.12
"""The share of the minutes that is kept for the second evaluation."""


def demo(
    *,
    recipe: Annotated[Recipe | None, Parameter(name="*")] = None,
    resume: Flag = False,
    sandbox: SandboxKind = kinds.AUTO,
    name: str = "",
    root: Path = DEFAULT_ROOT,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    json: JsonObject = False,
) -> int:
    """A tiny policy learns to use tools in two and a half minutes on two cores.

    Measures the held-out reward, trains with DAPO, and measures it again.

    Parameters
    ----------
    resume
        Go on with the demo that was interrupted last (or with --name).
    name
        Name of the demo. Default: demo-1, demo-2 ...
    root
        Folder for the control log and the runs.
    config
        YAML file with another recipe, as configs/demo.yaml.
    """
    if missing := [package for package in ("torch", "transformers") if not find_spec(package)]:
        raise ConfigError(
            f"{' and '.join(missing)} not installed",
            "the packages that train",
            "install prorl's extra `torch`; without a GPU install a CPU build of torch before it",
        )
    name = name or (latest_run(root, DEMO_FILE) if resume else first_free(root, "demo"))
    if (root / name).exists() and not resume:
        raise ConflictError(
            f"run {name!r} exists in {root}", "a new name", "or go on with it: --resume"
        )
    file = root / name / DEMO_FILE if resume else config
    values: dict[str, Json] = load_file(file) if file else {}
    values |= {} if recipe is None else recipe.model_dump(exclude_unset=True)
    whole = parse(Recipe, values, str(file or "recipe"))
    if whole.agent == "openai" and not find_spec("openai"):
        raise ConfigError("openai not installed", "the SDK of this agent", "pip install openai")
    if whole.trainer == "trl":
        if whole.control:
            raise ConfigError(f"--control {whole.control} by TRL", "--trainer own")
        if not find_spec("trl"):
            how = "pip install trl==1.16.0, or make demo TRAINER=trl"
            raise ConfigError("trl not installed", "the package of --trainer trl", how)
    return asyncio.run(_demo(whole, root.absolute(), name, sandbox, json))


async def _demo(recipe: Recipe, root: Path, name: str, sandbox: str, json: bool) -> int:
    model = Path(recipe.model).absolute() if recipe.model else TOY
    started, policy = time.monotonic(), valid_url(recipe.policy) if recipe.policy else ""
    guests = 0 if recipe.agent == "native" else int(free_url().rpartition(":")[2])
    config = service_config(root, model, sandbox, policy, guests)
    if policy:
        await Servers(config, lambda name: True).check(policy, ours=True)
    if not json:
        steps, groups = pluralize(recipe.steps, "step"), pluralize(recipe.groups_per_step, "group")
        goal = f"a toy policy learns {', '.join(SETS[recipe.agent])} with real tools"
        note(
            f"prorl demo {name}: {goal} · {steps} of {groups} x {recipe.n} · at most"
            f" {recipe.minutes:g} minutes"
        )
    async with signals() as stop, service(config, stop) as running:
        done = await first(stop, running, _learn(recipe, name, model, running, quiet=json))
        spent_s = sum(map(cpu_s, (os.getpid(), *descendants(os.getpid()))))
    if done is None:
        again = f"prorl demo --resume{root_option(root)}"
        note(f"interrupted: what was done is kept in {root / name}; `{again}` continues")
        return 130
    tidy(root / name)
    figures = report(root, name)
    figures |= {"recipe": recipe.model_dump(), "cpu_s": spent_s}
    figures["elapsed_s"] = time.monotonic() - started
    if json:
        say_json(figures)
    else:
        present(figures)
    return 0


async def _learn(
    recipe: Recipe, name: str, model: Path, running: Supervisor, *, quiet: bool
) -> bool:
    """The three runs; True at the end."""
    stop_at_s = time.monotonic() + recipe.minutes * 60 * (1 - AFTER_SHARE)
    client, root = client_of(running), running.config.root
    beside: list[asyncio.Future[None]] = []

    def start(child: str, module: str, *args: str, **env: str) -> asyncio.Future[None]:
        spec = ChildSpec(name=child, module=module, args=args, stop_rank=-1, env=env)
        beside.append(asyncio.ensure_future(running.run(spec)))
        return beside[-1]

    def watch(run: str, total: int, phase: str) -> Awaitable[None]:
        def more(answer: Run) -> tuple[str, ...]:
            return (phase, *(_figures(recipe, answer) if run == name else ()))

        return follow(client, running, run, total, quiet=quiet, more=more)

    async def evaluate(run: str, phase: str) -> None:
        tasks = heldout_tasks(recipe)
        submit = partial(client.submit, run)
        sets = len(SETS[recipe.agent])
        if greedy := tasks[: sets * recipe.greedy]:
            cold = replace(eval_run(recipe, run).sampling.params(), temperature=0.0)
            how = {"key": "greedy", "sampling": cold, "extra": {"mode": "greedy"}}
            await asyncio.to_thread(partial(submit, **how), greedy, 1)
        sampled = {"key": "sampled", "last": True, "extra": {"mode": "sampled"}}
        await asyncio.to_thread(partial(submit, **sampled), tasks[: sets * recipe.heldout], 1)
        await watch(run, sets * (recipe.heldout + recipe.greedy), phase)

    try:
        for config in (
            train_run(recipe, name),
            eval_run(recipe, name + BEFORE),
            eval_run(recipe, name + AFTER),
        ):
            await asyncio.to_thread(client.create_run, **config.model_dump(mode="json"))
        (root / name / DEMO_FILE).write_text(recipe.model_dump_json(indent=1))
        # It loads torch and the model meanwhile, then waits for the first groups.
        training = start("trainer", *trainer_command(recipe, root, name, model))
        if (at := running.config.guests_at("run-0")) is not None:
            token = running.config.token
            start("agent", "prorl.guests.openai_guest", at[2], GUEST, PRORL_TOKEN=token)
        await evaluate(name + BEFORE, "held-out, before")
        submit = partial(client.submit, name, key="tasks", last=True)
        await asyncio.to_thread(submit, train_tasks(recipe), recipe.n)
        total = recipe.steps * recipe.groups_per_step * recipe.n
        following = asyncio.ensure_future(watch(name, total, "training"))
        beside.append(following)
        done, _ = await asyncio.wait({training}, timeout=max(1.0, stop_at_s - time.monotonic()))
        if not done:  # it ends after the step in hand
            running.children["trainer"].signal(signal.SIGTERM)
        await training
        await asyncio.to_thread(client.cancel, name)
        await following
        if newest := newest_checkpoint(root, name):
            await asyncio.to_thread(client.publish, name + AFTER, 1, newest)
        await evaluate(name + AFTER, "held-out, after")
        return True
    finally:
        for work in beside:
            work.cancel()
        await asyncio.gather(*beside, return_exceptions=True)
        client.close()


def _figures(recipe: Recipe, run: Run) -> list[str]:
    """The trainer's step and DAPO's decisions, in words."""
    groups, version = run["groups"], run["version"]
    num_kept = groups["kept"] + groups["delivered"] + groups["committed"]
    dapo = f"DAPO kept {num_kept} dropped {groups['dropped'] + groups['stale']}"
    return [f"step {min(version, recipe.steps)}/{recipe.steps}", dapo, f"policy v{version}"]
