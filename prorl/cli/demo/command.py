"""`prorl demo`: a tiny policy learns to use tools, through the whole service, offline.

Everything is real: processes, Flight, sandboxes, tools, exact tokens, Parquet, DAPO's decisions in
SQL, a policy update from zero-copy batches, weights published back. The policy is a toy of 0.4
million parameters that ships with the package.
"""

from __future__ import annotations

import asyncio
import time
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from prorl.backends.embedded import TOY
from prorl.cli.demo.display import display
from prorl.cli.demo.learning import Learning
from prorl.cli.demo.picture import draw
from prorl.cli.demo.recipe import DEMO_FILE, Recipe, service_config
from prorl.cli.demo.report import report
from prorl.cli.demo.story import cpu_seconds
from prorl.cli.demo.words import present
from prorl.cli.output import note, say_json
from prorl.cli.progress import Show
from prorl.cli.run_job import tidy
from prorl.cli.runs import latest_run, root_option
from prorl.config import ServiceConfig, parse
from prorl.config_file import load_file
from prorl.deploy.running import first, service, signals
from prorl.errors import ConfigError, ConflictError
from prorl.sandbox import kinds
from prorl.service.servers import Servers, valid_url
from prorl.supervisor.service import Supervisor

if TYPE_CHECKING:
    from prorl.cli.demo.display import StoryDisplay
    from prorl.types import Json

Flag = Annotated[bool, Parameter(negative="")]


def demo(
    *,
    seed: int | None = None,
    minutes: float | None = None,
    policy: str = "",
    resume: Flag = False,
    root: Path = Path("prorl-runs"),
    name: str = "",
    control: Annotated[str, Parameter(show=False)] = "",
    sandbox: str = "",
    config: Annotated[Path | None, Parameter(name=["--config", "-c"])] = None,
    json: Flag = False,
) -> int:
    """A tiny policy learns to use tools in five minutes on two cores.

    Held-out reward before, DAPO training, held-out reward after.

    Parameters
    ----------
    seed
        Of tasks, sampling and training. Default 0.
    minutes
        Wall time to stay within; training ends early for it. Default 5.
    policy
        Address of a model server that serves the toy and takes weights, as http://127.0.0.1:8000;
        `make demo POLICY=vllm` starts one. Default: the service's own.
    resume
        Go on with the demo that was interrupted last (or with --name).
    root
        Folder for the control log and the runs.
    name
        Of the demo. Default: demo-1, demo-2 ...
    control
        `shuffled-rewards`: must not learn.
    sandbox
        Kind of the tools' sandboxes. Default: pyns, the one that starts with the least work, where
        it works, else auto.
    config
        YAML file with another recipe, as configs/demo.yaml.
    json
        Print all figures as one JSON object.
    """
    _need_torch()
    given = {
        key: value
        for key, value in {
            "seed": seed,
            "minutes": minutes,
            "policy": (policy and valid_url(policy)) or None,
            "control": control or None,
        }.items()
        if value is not None
    }
    name = name or (latest_run(root, DEMO_FILE) if resume else _free(root))
    recipe = _recipe(root / name, config, given, resume)
    return asyncio.run(_demo(recipe, root.absolute(), name, sandbox, json))


def _need_torch() -> None:
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed",
            "the packages that train",
            "pip install 'prorl[torch]'; without a GPU install a CPU build of torch before it",
        )


def _recipe(directory: Path, config: Path | None, given: dict[str, Json], resume: bool) -> Recipe:
    """The recipe: a resumed demo's own, else the file's or the default one.

    What is given now is on top of either.
    """
    file = directory / DEMO_FILE
    if resume:
        return parse(Recipe, {**load_file(file), **given}, str(file))
    if directory.exists():
        raise ConflictError(
            f"run {directory.name!r} exists in {directory.parent}",
            "a new name",
            "or go on with it: --resume",
        )
    return parse(
        Recipe, {**(load_file(config) if config else {}), **given}, str(config or "recipe")
    )


def _free(root: Path) -> str:
    number = 1
    while (root / f"demo-{number}").exists() or (root / f"demo-{number}-before").exists():
        number += 1
    return f"demo-{number}"


async def _demo(recipe: Recipe, root: Path, name: str, sandbox: str, json: bool) -> int:
    model = Path(recipe.model).absolute() if recipe.model else TOY
    started = time.monotonic()
    service = service_config(root, model, sandbox or await _lightest(), recipe.policy)
    if recipe.policy:
        await Servers(service, lambda name: True).check(recipe.policy, ours=True)
    shown = display(recipe, Show.NOTHING if json else Show.AUTO)
    if not json:
        note(f"prorl demo {name}: {_about(recipe)}")
    try:
        spent_s = await _learn(recipe, name, model, service, shown)
    finally:
        shown.close()
    if spent_s is None:
        again = f"prorl demo --resume{root_option(root)}"
        note(f"interrupted: what was done is kept in {root / name}; `{again}` continues")
        return 130
    tidy(root / name)
    found = report(root, name, service.run.slots) | {"recipe": recipe.model_dump()}
    _tell(found | {"elapsed_s": time.monotonic() - started, "cpu_s": spent_s}, json=json)
    return 0


def _about(recipe: Recipe) -> str:
    groups = f"{recipe.steps} steps of {recipe.groups_per_step} groups x {recipe.n}"
    most = f"at most {recipe.minutes:g} minutes"
    return f"a toy policy learns arith and shop with real tools · {groups} · {most}"


def _tell(found: dict[str, Json], *, json: bool) -> None:
    """Draw the curve, then the report as one JSON value or for people."""
    curve = Path(found["directory"]) / "reward.png"
    found["curve_png"] = str(curve) if draw(found, curve) else ""
    if json:
        say_json(found)
    else:
        present(found, elapsed_s=found["elapsed_s"], cpu=found["cpu_s"])


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


async def _learn(
    recipe: Recipe, name: str, model: Path, config: ServiceConfig, shown: StoryDisplay
) -> float | None:
    """The three runs over one service; CPU seconds of all of it.

    None when somebody asked to stop.
    """
    async with signals() as stop, service(config, stop) as running:
        assert isinstance(running, Supervisor)

        async def work() -> float:
            await Learning(recipe, name, model, running, shown).run()
            return cpu_seconds()

        return await first(stop, running, work())
