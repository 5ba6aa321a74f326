"""`prorl demo`: a tiny policy learns to use tools, through the whole service, offline.

Everything is real: processes, Flight, sandboxes, tools, exact tokens, Parquet, DAPO's decisions in
SQL, a policy update from zero-copy batches, weights published back. The policy is a toy of 0.4
million parameters that ships with the package.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

import prorl
from prorl.backends.embedded import TOY
from prorl.cli.demo.learning import Learning
from prorl.cli.demo.recipe import DEMO_FILE, GUEST, Recipe, service_config
from prorl.cli.demo.report import present, report
from prorl.cli.options import Flag, JsonObject, of
from prorl.cli.output import note, say_json
from prorl.cli.progress import Progress
from prorl.cli.run_job import tidy
from prorl.cli.runs import DEFAULT_ROOT, latest_run, root_option
from prorl.config import parse
from prorl.config.file import load_file
from prorl.deploy.running import first, service, signals
from prorl.errors import ConfigError, ConflictError
from prorl.linux.procfs import cpu_s, descendants
from prorl.sandbox import kinds
from prorl.service.pool.servers import Servers, valid_url
from prorl.supervisor.service import Supervisor
from prorl.types import Json


def demo(
    *,
    seed: Annotated[int | None, of(Recipe, "seed")] = None,
    minutes: Annotated[float | None, of(Recipe, "minutes")] = None,
    policy: Annotated[str, of(Recipe, "policy")] = "",
    agent: Annotated[str | None, of(Recipe, "agent")] = None,
    control: Annotated[str, Parameter(show=False)] = "",
    resume: Flag = False,
    sandbox: str = "",
    name: str = "",
    root: Path = DEFAULT_ROOT,
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    json: JsonObject = False,
) -> int:
    """A tiny policy learns to use tools in five minutes on two cores.

    Held-out reward before, DAPO training, held-out reward after.

    Parameters
    ----------
    resume
        Go on with the demo that was interrupted last (or with --name).
    sandbox
        Kind of the tools' sandboxes. Default: pyns, the one that starts with the least work, where
        it works, else auto.
    name
        Of the demo. Default: demo-1, demo-2 ...
    root
        Folder for the control log and the runs.
    config
        YAML file with another recipe, as configs/demo.yaml.
    """
    if missing := [package for package in ("torch", "transformers") if not find_spec(package)]:
        raise ConfigError(
            f"{' and '.join(missing)} not installed",
            "the packages that train",
            "pip install 'prorl[torch]'; without a GPU install a CPU build of torch before it",
        )
    if agent == "openai" and not find_spec("openai"):
        raise ConfigError("openai not installed", "the SDK of this agent", "pip install openai")
    address = valid_url(policy) if policy else ""
    keys = {"seed": seed, "minutes": minutes, "policy": address, "control": control, "agent": agent}
    flags = {key: value for key, value in keys.items() if value not in (None, "")}
    name = name or (latest_run(root, DEMO_FILE) if resume else _free(root))
    recipe = _recipe(root / name, config, flags, resume)
    return asyncio.run(_demo(recipe, root.absolute(), name, sandbox, json))


def _recipe(directory: Path, config: Path | None, flags: dict[str, Json], resume: bool) -> Recipe:
    """The recipe: a resumed demo's own, else the file's or the default one; flags are on top."""
    if directory.exists() and not resume:
        raise ConflictError(
            f"run {directory.name!r} exists in {directory.parent}",
            "a new name",
            "or go on with it: --resume",
        )
    file = directory / DEMO_FILE if resume else config
    return parse(Recipe, {**(load_file(file) if file else {}), **flags}, str(file or "recipe"))


SHIPPED = Path(prorl.__file__).parent / "guests" / "openai_guest.py"


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        port: int = one.getsockname()[1]
        return port


@asynccontextmanager
async def _playing(running: Supervisor, log: Path) -> AsyncIterator[None]:
    """The agent loop of the OpenAI SDK beside the service, where the recipe wants one."""
    at = running.config.guests_at("run-0")
    if at is None:
        yield
        return
    with open(log, "ab") as said:
        agent = await asyncio.create_subprocess_exec(
            *(sys.executable, str(SHIPPED), at[2], GUEST),
            env={**os.environ, "PRORL_TOKEN": running.config.token},
            stdout=said,
            stderr=said,
        )
        try:
            yield
        finally:
            if agent.returncode is None:
                agent.kill()
            await agent.wait()


def _free(root: Path) -> str:
    number = 1
    while (root / f"demo-{number}").exists() or (root / f"demo-{number}-before").exists():
        number += 1
    return f"demo-{number}"


async def _demo(recipe: Recipe, root: Path, name: str, sandbox: str, json: bool) -> int:
    model = Path(recipe.model).absolute() if recipe.model else TOY
    started = time.monotonic()
    guests = 0 if recipe.agent == "native" else _free_port()
    config = service_config(root, model, sandbox or await _lightest(), recipe.policy, guests)
    if recipe.policy:
        await Servers(config, lambda name: True).check(recipe.policy, ours=True)
    progress = Progress(quiet=json)
    if not json:
        groups = f"{recipe.steps} steps of {recipe.groups_per_step} groups x {recipe.n}"
        what = "a toy policy learns arith and shop with real tools"
        note(f"prorl demo {name}: {what} · {groups} · at most {recipe.minutes:g} minutes")

    try:
        async with signals() as stop, service(config, stop) as running:
            assert isinstance(running, Supervisor)

            async def work() -> float:
                async with _playing(running, root / f"{name}-agent.log"):
                    await Learning(recipe, name, model, running, progress).run()
                return sum(map(cpu_s, (os.getpid(), *descendants(os.getpid()))))

            spent_s = await first(stop, running, work())
    finally:
        progress.close()
    if spent_s is None:
        again = f"prorl demo --resume{root_option(root)}"
        note(f"interrupted: what was done is kept in {root / name}; `{again}` continues")
        return 130
    tidy(root / name)
    found = report(root, name, config.run.slots)
    found |= {
        "recipe": recipe.model_dump(),
        "elapsed_s": time.monotonic() - started,
        "cpu_s": spent_s,
    }
    if json:
        say_json(found)
    else:
        present(found)
    return 0


async def _lightest() -> str:
    from prorl.sandbox.node.probe import choose, probe_one

    lightest = kinds.lightest()
    if (await probe_one(lightest)).works:
        return lightest
    try:
        return await choose()
    except ConfigError as error:
        anyway = "or, as the toy's programs do no harm: prorl demo --sandbox local"
        raise ConfigError(
            error.given, error.expected, f"`prorl doctor` names the fixes; {anyway}"
        ) from None
