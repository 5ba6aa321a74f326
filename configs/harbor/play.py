"""Builds and plays a random choice of Harbor tasks: what builds, how long it takes, what it scores.

    python configs/harbor/play.py --count 15 --seed 45 --out played.jsonl FOLDER [FOLDER ...]

Each folder gives an equal share of the tasks. A task is built, then its no-op and its reference (if
it has one) are played twice. The settings are those of the service: `PRORL_SANDBOX__BUILD` (base
images by another name, CA files) and `PRORL_SANDBOX__IMAGES`. One JSON row a task is appended to
`--out`; a task that has a row there is not played again. The table is printed at the end.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import time
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any

from prorl.cli.commands.check import boxes_of, sandbox_settings
from prorl.cli.settings import registry_root, sandbox_environment
from prorl.envs import get_env
from prorl.errors import NoReferenceError, ProrlError
from prorl.sandbox.images import dockerfile
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.dockerfile import build_job, name_of
from prorl.sandbox.images.registry import Registry
from prorl.sandbox.spawn import spawned
from prorl.tasks import read_tasks
from prorl.testing import Boxes, Replies, play, scripted, verify
from prorl.types import DOCKERFILE, RolloutLimits, Task

Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", metavar="FOLDER")
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--seed", type=int, default=45)
    parser.add_argument("--jobs", type=int, default=1, help="tasks that are played at a time")
    parser.add_argument("--kind", default="pyns")
    parser.add_argument("--out", type=Path, default=Path("played.jsonl"))
    parser.add_argument("--build-s", type=float, default=0.0, help="at least so long for a build")
    parser.add_argument("--build-only", action="store_true")
    arguments = parser.parse_args()
    if reason := why_not(arguments.folders):
        print(f"skipped: {reason}")
        return
    rows = asyncio.run(_play_all(arguments))
    print_table(rows)


def why_not(folders: list[str]) -> str:
    """Why nothing can be played here; empty: it can."""
    if not folders:
        return "no folder of tasks (HARBOR_TASKS)"
    if not (builder := dockerfile.program()):
        return "neither buildah nor podman builds the images"
    for base in sorted(set(sandbox_environment().build.bases.values())):
        if subprocess.run([builder, "inspect", base], capture_output=True, check=False).returncode:
            return f"the base image {base} is not here (docs/harbor.md says how one is made)"
    return ""


async def _play_all(arguments: argparse.Namespace) -> list[Row]:
    async with spawned(arguments.kind, **sandbox_settings()) as (host, _):
        return await _play_with(arguments, boxes_of(host))


async def _play_with(arguments: argparse.Namespace, boxes: Boxes) -> list[Row]:
    rows, room = dict(_rows(arguments.out)), asyncio.Semaphore(arguments.jobs)

    async def play_new(task: Task) -> None:
        async with room:
            row = await play_task(task, arguments, boxes)
        rows[row["folder"]] = row
        print(summary(row), flush=True)
        if not arguments.build_only:
            with arguments.out.open("a") as file:
                file.write(json.dumps(row) + "\n")

    tasks = choose(arguments.folders, arguments.count, arguments.seed)
    tasks.sort(key=lambda task: bool(task.data["solution"]))  # those with a reference take longest
    await asyncio.gather(*(play_new(task) for task in tasks if task.data["folder"] not in rows))
    return list(rows.values())


def choose(folders: list[str], count: int, seed: int) -> list[Task]:
    """An equal share of each folder, in an order that alternates between them."""
    rng = random.Random(seed)
    shares = []
    for folder in folders:
        tasks = sorted(read_tasks(folder, skip_invalid=True).tasks, key=lambda task: task.task_id)
        rng.shuffle(tasks)
        shares.append(tasks)
    chosen: list[Task] = []
    while len(chosen) < count and any(shares):
        chosen += [share.pop() for share in shares if share]
    return chosen[:count]


async def play_task(task: Task, arguments: argparse.Namespace, boxes: Boxes) -> Row:
    row: Row = {"folder": task.data["folder"], "task": task.task_id}
    for image in {task.data["image"], task.data["verifier"]["image"]} - {""}:
        if not await _build(
            row, image, max(arguments.build_s, float(task.data["build_timeout_s"]))
        ):
            return row
    if arguments.build_only:
        return row
    limits = RolloutLimits(eval_s=float(task.data["verifier"]["timeout_s"]) + 60, run_s=1800)
    limits = RolloutLimits(**{**vars_of(limits), "tool_s": 900.0})
    env = get_env(task.env)
    began = time.monotonic()
    problem = await _try(verify(env, task, boxes=boxes, limit_s=limits.eval_s))
    row["untouched"] = problem or "reward"
    noop = [
        await _reward(play(env, task, Replies("done"), boxes=boxes, limits=limits)) for _ in "12"
    ]
    row["noop"] = noop
    try:
        env.reference(task)
    except NoReferenceError:
        row["reference"] = []
    else:
        row["reference"] = [
            await _reward(play(env, task, scripted("oracle", env), boxes=boxes, limits=limits))
            for _ in "12"
        ]
    row["play_s"] = round(time.monotonic() - began, 1)
    return row


def vars_of(limits: RolloutLimits) -> Row:
    return {name: getattr(limits, name) for name in limits.__dataclass_fields__}


async def _build(row: Row, image: str, timeout_s: float) -> bool:
    if not image.startswith(DOCKERFILE):
        row["failure"] = f"image {image} is named, not built"
        return image.startswith("/")
    folder = Path(image.removeprefix(DOCKERFILE))
    settings = sandbox_environment().build.model_dump(exclude_defaults=True)
    root = registry_root(None)
    registry = Registry(root)
    registry.open()
    name, began = name_of(folder, settings), time.monotonic()
    there = name in registry.names()
    try:
        built_image = await make_image(root, build_job(folder, name, settings), timeout_s)
    except (ProrlError, OSError) as error:
        row["failure"] = " ".join(str(error).split())[:400]
        row["build_s"] = round(time.monotonic() - began, 1)
        return False
    own = {each.digest: each.bytes for each in registry.list()}
    row["build_s"] = 0.0 if there else round(time.monotonic() - began, 1)
    layers = sum(own[digest] for digest in built_image.layers)
    row["bytes"] = row.get("bytes", 0) + built_image.bytes + layers
    return True


async def _try(awaited: Awaitable[Any]) -> str:
    try:
        await awaited
    except ProrlError as error:
        return f"{type(error).__name__}: {error}"[:300]
    return ""


async def _reward(played: Awaitable[Any]) -> float | str:
    try:
        return round(float((await played).reward), 4)
    except ProrlError as error:
        return f"{type(error).__name__}: {error}"[:300]


def _rows(path: Path) -> Iterator[tuple[str, Row]]:
    if path.exists():
        for line in path.read_text().splitlines():
            row = json.loads(line)
            yield row["folder"], row


def summary(row: Row) -> str:
    built = f"{row.get('build_s', 0):.0f} s, {row.get('bytes', 0) / 1e6:.0f} MB"
    scores = f"no-op {row.get('noop')}, reference {row.get('reference')}"
    return f"{row['task']}: {built}; {row.get('failure') or scores}"


def print_table(rows: list[Row]) -> None:
    built = [row for row in rows if not row.get("failure")]
    print(f"{len(built)} of {len(rows)} built")
    for row in rows:
        print(summary(row))


if __name__ == "__main__":
    main()
