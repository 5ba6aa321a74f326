"""The recipe of `prorl demo`: what is trained, for how long, with which numbers.

Everything here follows from (recipe, seed): a resumed demo reads RUN/demo.json and makes the same
runs, tasks and trainer again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from pydantic import BaseModel, ConfigDict, Field

from prorl.config import Limits, RunConfig, Sampling, ServiceConfig, StageConfig, StoreConfig
from prorl.envs import get_env
from prorl.renderer.template import tool_values
from prorl.tasks.generated import generate
from prorl.types import Json, Task

SETS: Mapping[str, tuple[str, ...]] = {
    "native": ("arith", "shop", "repair"),
    "openai": ("arith", "shop"),  # it computes by itself: a guest's process has no sandbox
}
"""The envs that each agent plays."""
POOL = 4
"""Different tasks for each group that will be trained on; DAPO drops some."""
DEMO_FILE = "demo.json"
GUEST = "demo"
"""The guest for whom the tasks of another agent are."""


class Recipe(BaseModel):
    """The options of `prorl demo`, the keys of its files; configs/demo.yaml shows them."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    seed: int = Field(default=0, ge=0, description="seed of tasks, sampling and training")
    model: str = Field(
        default="",
        description="checkpoint to start from; empty = the toy that ships with the package",
    )
    policy: str = Field(
        default="",
        description=(
            "address of a model server that serves `model` and takes weights, as"
            " http://127.0.0.1:8000; default: the service's own"
        ),
    )
    agent: Literal["native", "openai"] = Field(
        default="native",
        description="native, or openai: an agent loop written with the OpenAI SDK, in a process of"
        " its own, which leases rollouts as a guest does",
    )
    trainer: Literal["own", "trl"] = Field(
        default="own",
        description="own, or trl: TRL's GRPOTrainer, unmodified, on the same stream, with one"
        " optimizer step for each training step",
    )
    device: str = Field(default="cpu", description="device of the trainer `own`: cpu or cuda")
    minutes: float = Field(
        default=5.0,
        gt=0,
        description="limit of the wall time; training ends early to keep it",
    )
    steps: int = Field(default=12, ge=1, description="training steps")
    groups_per_step: int = Field(default=16, ge=1, description="groups of a training step")
    n: Annotated[int, Parameter(name=["--n", "-n"])] = Field(
        default=8, ge=2, description="rollouts a group"
    )
    learning_rate: float = Field(default=6e-4, gt=0, description="learning rate of AdamW")
    minibatches: int = Field(default=2, ge=1, description="optimizer steps of a training step")
    steps_ahead: int = Field(
        default=1, ge=0, le=1, description="1: sample the next step while this one trains"
    )
    heldout: int = Field(
        default=48, ge=1, description="held-out tasks of each set, sampled at temperature 1"
    )
    greedy: int = Field(default=48, ge=0, description="how many of them are also answered greedily")
    heldout_seed: int = Field(
        default=7,
        ge=0,
        description="seed of the held-out tasks, which do not depend on `seed`",
    )
    max_tokens: int = Field(default=64, ge=8, description="limit of one model call")
    control: Literal["", "shuffled-rewards"] = Field(
        default="", description="`shuffled-rewards`: a control run that must not learn"
    )


LIMITS = Limits(max_turns=6, max_tokens=448, tool_s=10.0, run_s=120.0)


def service_config(
    root: Path, model: Path, kind: str, policy: str = "", guests: int = 0
) -> ServiceConfig:
    """A service of this machine with the model as its backend."""
    return ServiceConfig(
        root=root.absolute(),
        guests=guests,
        backends=(policy or f"embedded:{model}",),
        tokenizer=str(model),
        init=StageConfig(slots=4),
        run=StageConfig(slots=64),
        eval=StageConfig(slots=16),
        sandbox={"kind": kind, "max_sandboxes": 96},  # type: ignore[arg-type]
        store=StoreConfig(flush_s=1.0),
    )


def train_run(recipe: Recipe, name: str) -> RunConfig:
    """The run that is trained on: DAPO decides, groups are streamed.

    No more is open than the trainer's next step takes.
    """
    ahead = recipe.groups_per_step * (1 + recipe.steps_ahead)
    return RunConfig(
        run_id=name,
        filter="dapo",
        delivery="stream",
        seed=recipe.seed,
        sampling=Sampling(max_tokens=recipe.max_tokens),
        limits=LIMITS,
        target_groups=recipe.steps * recipe.groups_per_step,
        epochs=1000,  # the target, or the time, ends it
        groups_per_step=recipe.groups_per_step,
        max_open_groups=ahead,
        max_uncommitted_groups=ahead,
        max_staleness=2,
    )


def eval_run(recipe: Recipe, name: str) -> RunConfig:
    """An evaluation of held-out tasks."""
    sampling = Sampling(max_tokens=recipe.max_tokens)
    return RunConfig(run_id=name, seed=recipe.seed + 1, sampling=sampling, limits=LIMITS)


def train_tasks(recipe: Recipe) -> list[Task]:
    count = recipe.steps * recipe.groups_per_step * POOL // len(SETS[recipe.agent]) + 1
    return _in_turn(recipe, "train", 1000 + recipe.seed, count)


def heldout_tasks(recipe: Recipe) -> list[Task]:
    return _in_turn(recipe, "heldout", recipe.heldout_seed, max(recipe.heldout, recipe.greedy))


def _in_turn(recipe: Recipe, split: str, seed: int, count: int) -> list[Task]:
    sets = [generate(name, split=split, seed=seed, n=count) for name in SETS[recipe.agent]]
    tasks = [task for tasks in zip(*sets, strict=True) for task in tasks]
    return tasks if recipe.agent == "native" else list(map(_of_guest, tasks))


def _of_guest(task: Task) -> Task:
    """Returns the task for a guest, with the env's messages, tools and answer."""
    env = get_env(task.env)
    data: dict[str, Json] = {
        "guest": GUEST,
        "messages": [
            {"role": message.role, "content": message.content} for message in env.messages(task)
        ],
        "functions": tool_values(env.tools(task)),
        "prices": task.data.get("prices", {}),
        "answer": task.data["answer"],
    }
    return replace(task, env="guest", data=data)


def trainer_config(recipe: Recipe, root: Path, name: str, model: Path) -> dict[str, Json]:
    """Returns the configuration that `python -m prorl.trainer` reads."""
    return {
        "service": str(root.absolute()),
        "run": name,
        "model": str(model),
        "output": str(training_dir(root, name)),
        "steps": recipe.steps,
        "groups_per_step": recipe.groups_per_step,
        "minibatches": recipe.minibatches,
        "learning_rate": recipe.learning_rate,
        "warmup_steps": 3,
        "seed": recipe.seed,
        "device": recipe.device,
        "advantages": "prorl.cli.demo.shuffled:shuffled" if recipe.control else "group",
    }


def trainer_command(recipe: Recipe, root: Path, name: str, model: Path) -> tuple[str, ...]:
    """Module and arguments of the trainer's process."""
    if recipe.trainer == "own":
        file = root / name / "trainer.json"
        file.write_text(json.dumps(trainer_config(recipe, root, name, model), indent=1))
        return ("prorl.trainer", "--config", str(file), "--die-with-parent")
    places = (str(model), str(root.absolute()), name, str(checkpoints_dir(root, name)))
    numbers = {
        "--steps": recipe.steps,
        "--groups": recipe.groups_per_step,
        "-n": recipe.n,
        "--rows": recipe.n,
        "--learning-rate": recipe.learning_rate,
        "--beta": 0,
        "--seed": recipe.seed,
    }
    words = [word for key, value in numbers.items() for word in (key, str(value))]
    return ("prorl.trainer.adapters.train_trl", *places, *words, "--cpu", "--die-with-parent")


def training_dir(root: Path, name: str) -> Path:
    """Checkpoints and metrics of a demo's trainer."""
    return root.absolute() / name / "training"


def checkpoints_dir(root: Path, name: str) -> Path:
    """Returns the folder in which each trainer puts a folder a step, by number: step-00000012,
    checkpoint-12.
    """
    return training_dir(root, name) / "checkpoints"


def newest_checkpoint(root: Path, name: str) -> Path | None:
    return max(checkpoints_dir(root, name).glob("[a-z]*-*"), key=number_of, default=None)


def number_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])
