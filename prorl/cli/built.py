"""Images that a job's tasks are built from: built once, before a task that needs one runs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from prorl.config import BuildConfig
from prorl.errors import ProrlError, UserError
from prorl.pluralize import pluralize
from prorl.sandbox.images import dockerfile
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.registry import Registry
from prorl.types import DOCKERFILE, Json, Task

Recipes = Mapping[Path, float]
"""Seconds that a build may take, by the folder that has the Dockerfile."""


class Built(NamedTuple):
    """The outcome of the build of one image."""

    folder: Path
    failure: str
    """One line; empty: it was built."""
    elapsed_s: float

    @property
    def about(self) -> str:
        return f"{self.folder}: {self.failure or f'built in {self.elapsed_s:.0f} s'}"


def recipes_of(tasks: Iterable[Task]) -> dict[Path, float]:
    """Returns the build recipes of tasks, their verifiers included."""
    return {
        folder: float(task.data["build_timeout_s"]) for task in tasks for folder in folders_of(task)
    }


def folders_of(task: Task) -> list[Path]:
    verifier: Json = task.data.get("verifier")
    named = (task.data.get("image"), verifier.get("image") if isinstance(verifier, dict) else "")
    return [
        Path(image.removeprefix(DOCKERFILE))
        for image in named
        if isinstance(image, str) and image.startswith(DOCKERFILE)
    ]


def missing(recipes: Recipes, root: Path, build: BuildConfig) -> dict[Path, float]:
    """The recipes whose images are not in the registry. Raises UserError where none can be built,
    OSError for a folder that cannot be read.
    """
    settings, names = build.model_dump(exclude_defaults=True), set(Registry(root).names())
    lacking = {
        folder: limit_s
        for folder, limit_s in recipes.items()
        if dockerfile.name_of(folder, settings) not in names
    }
    if lacking and not (dockerfile.program() or build.store):
        raise UserError(
            f"{pluralize(len(lacking), 'image')} to build from Dockerfiles, without buildah or"
            " podman",
            "one of them",
            "apt-get install buildah, or `prorl image pull` what another machine has built",
        )
    return lacking


async def build_images(
    recipes: Recipes,
    root: Path,
    build: BuildConfig,
    num_jobs: int,
    ended: Callable[[Built], object],
) -> list[Built]:
    """Build recipes, `num_jobs` at a time; `ended` is called for each, a failed one too."""
    settings, room = build.model_dump(exclude_defaults=True), asyncio.Semaphore(max(1, num_jobs))
    Registry(root).open()

    async def build_recipe(folder: Path, limit_s: float) -> Built:
        async with room:
            began, failure = time.monotonic(), ""
            try:
                name = await asyncio.to_thread(dockerfile.name_of, folder, settings)
                await make_image(root, dockerfile.build_job(folder, name, settings), limit_s)
            except (ProrlError, OSError) as error:
                failure = " ".join(str(error).split())
            built = Built(folder, failure, time.monotonic() - began)
            ended(built)
            return built

    return await asyncio.gather(*(build_recipe(*recipe) for recipe in recipes.items()))
