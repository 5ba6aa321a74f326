"""Does a curator save rollouts? `python -m tests.trainer.curators FOLDER SEED [SEED ...]`

An arm whose folder is there is left out.

The demo's toy is trained on one set of tasks, epoch after epoch, half of which nobody solves (their
answers are wrong), by three arms: without a curator, with one that has a task rest that taught
nothing, and with one that has any task rest, as often and as long. Asked is how many rollouts each
began until its policy had the same held-out reward, whatever that took in time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from prorl.backends.embedded import TOY
from prorl.cli.demo.recipe import Recipe, train_run, trainer_config, training_dir
from prorl.client import Client
from prorl.storage.read.catalog import StoredRun
from prorl.tasks.generated import generate
from prorl.types import Json, Task
from tests.trainer.toy_service import evaluate_heldout, toy_service

SETS = ("arith", "shop")
STEPS, GROUPS, EVERY = 12, 8, 3
TASKS = 12
"""Of each set that can be solved, and as many that cannot."""
HELDOUT = 96
"""Of each set, looked at `EVERY` steps."""

KEPT = (
    "select r.group_id, min(reward) <> max(reward) as kept,"
    " if(kept, 'informative', 'all_equal') as reason"
)
CURATOR = (
    f"{KEPT}, if(kept, 0, least(32, 4 * 2 ** coalesce(any_value(h.streak), 0)))::int as rest"
    " from rollouts r left join history h using (task_id) group by r.group_id"
)


def at_random(rests: Sequence[int], seed: int) -> str:
    """A curator that has a task rest as long as the other had some task, whatever it did."""
    drawn = f"1 + (hash(r.group_id, {seed}) % {len(rests)})::int"
    return f"{KEPT}, ({list(rests)})[{drawn}]::int as rest from rollouts r group by r.group_id"


def tasks(seed: int) -> list[Task]:
    train_tasks = []
    for name in SETS:
        for i, task in enumerate(generate(name, split="train", seed=1000 + seed, n=2 * TASKS)):
            wrong = {**task.data, "answer": f"-{task.data['answer']}"}
            train_tasks.append(replace(task, data=wrong) if i % 2 else task)
    return train_tasks


def arm(client: Client, root: Path, name: str, seed: int, filter_: str) -> dict[str, Json]:
    """Train; what its rollouts, held-out rewards and rests were."""
    recipe = Recipe(seed=seed, steps=STEPS, groups_per_step=GROUPS, minibatches=2)
    values = train_run(recipe, name).model_dump(mode="json")
    client.create_run(**{**values, "filter": filter_})
    client.submit(name, tasks(seed), recipe.n, key="tasks", last=True)
    file = root / f"{name}.json"
    config = trainer_config(recipe, root, name, TOY) | {"keep_checkpoints": STEPS + 2}
    file.write_text(json.dumps(config))
    subprocess.run([sys.executable, "-m", "prorl.trainer", "--config", str(file)], check=True)
    client.cancel(name)
    status = client.run(name)
    heldout_tasks = [
        task for env_name in SETS for task in generate(env_name, split="heldout", seed=7, n=HELDOUT)
    ]
    stored, points = StoredRun(root / name), []
    for step in range(2 * EVERY, STEPS + 1, EVERY):
        (totals,) = stored.sql(
            f"select count(*) as n from rollouts where num_sampled > 0 and min_version < {step}"
        ).to_pylist()
        weights = training_dir(root, name) / "checkpoints" / f"step-{step:08d}" if step else TOY
        reward = evaluate_heldout(client, f"{name}-at-{step}", heldout_tasks, weights, seed=seed)
        points.append({"step": step, "rollouts": totals["n"], "reward": reward})
        print(name, points[-1], flush=True)
    return {"arm": name, "points": points, "skipped": status["skipped"], "groups": status["groups"]}


def rests(root: Path, name: str) -> list[int]:
    """Returns how long `CURATOR` had tasks rest, of each of its decisions."""
    group_rows = StoredRun(root / name).sql(
        "select group_id, any_value(task_id) as task, min(reward) <> max(reward) as kept"
        " from rollouts where valid group by 1 order by 1"
    )
    rest_steps, streaks = [], Counter[str]()
    for row in group_rows.to_pylist():
        rest_steps.append(0 if row["kept"] else min(32, 4 * 2 ** streaks[row["task"]]))
        streaks[row["task"]] = 0 if row["kept"] else streaks[row["task"]] + 1
    return rest_steps


def main(folder: Path, seed: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("none", "curator", "random"):
        root = folder / f"{name}-{seed}"
        if root.exists():
            continue
        filter_ = {"none": "dapo", "curator": CURATOR}.get(name, "")
        if not filter_:
            filter_ = at_random(rests(folder / f"curator-{seed}", "curator"), seed)
        with toy_service(root) as client:
            arm_result = arm(client, root, name, seed, filter_)
        with (folder / "found.jsonl").open("a") as file:
            file.write(json.dumps({"seed": seed, **arm_result}) + "\n")


if __name__ == "__main__":
    for seed_text in sys.argv[2:]:
        main(Path(sys.argv[1]), int(seed_text))
