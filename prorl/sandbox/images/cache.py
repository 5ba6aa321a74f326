"""Locates a task's image on this node.

A name, a folder, a .sif or a reference becomes the folders that launchers run. In sandboxd's loop.

What is not there is made by a child process, once however many ask (`child.py`); what is wrong with
a source is remembered for a minute. An image that is used is held by a shared lock until sandboxd
ends, so `prorl image rm` refuses and `gc` leaves it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from prorl.errors import NotFoundError, ProrlError, SandboxError, StorageError, UserError
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.dockerfile import build_job, name_of, recipe_of
from prorl.sandbox.images.layers import LayerRecipe
from prorl.sandbox.images.registry import (
    Image,
    Registry,
    digest_of_sif,
    is_name,
    is_sif,
    plain,
)
from prorl.sandbox.images.tree import check_shell
from prorl.types import DOCKER, DOCKERFILE, FailureCode, image_name
from prorl.waits import wait_limit_s

MAKE_S = wait_limit_s("image.make")
REMEMBER_S = 60.0
"""The seconds for which the fault of a source counts: an image that is pushed a minute later is
found. With less a registry is asked, or a broken file unpacked, for each rollout of a bad task.
"""


class ImageCache:
    """One node's images as one sandboxd uses them.

    `mirrors`: of hosts of container registries; None: nothing is pulled. `build`: settings of
    builds from Dockerfiles (`dockerfile.py`).

    Not bounded: an open lock for each image that was used, and what was wrong with each bad one in
    the last minute.
    """

    def __init__(
        self,
        root: Path,
        mirrors: Mapping[str, str] | None = None,
        clock: Callable[[], float] = time.monotonic,
        build: Mapping[str, Any] | None = None,
    ) -> None:
        self._registry, self._mirrors, self._clock = Registry(root), mirrors, clock
        self._build = build or {}
        self._making: dict[str, asyncio.Task[Image]] = {}
        self._refused: dict[str, tuple[float, UserError]] = {}
        """The refusals by key, oldest first: until when what is wrong with a source counts."""
        self._locked: set[str] = set()
        self._locks = ExitStack()

    async def locate(self, image: str) -> tuple[str, ...]:
        """The folders, topmost first.

        Raises SandboxError: `bad_task` when the task's image is at fault, else `sandbox_start`.
        """
        with _blamed(f"image {image!r}"):
            if image.startswith(DOCKER):
                return await self._pulled(image)
            if image.startswith(DOCKERFILE):
                return await self._from_dockerfile(Path(image.removeprefix(DOCKERFILE)))
            if is_name(image):
                return self._hold(self._registry.digest_of_name(image))
            if not os.path.isabs(image):
                expected = "a name of this node's registry, an absolute path or docker://REFERENCE"
                raise UserError(f"image {image!r}", expected)
            if os.path.isdir(image):
                check_shell(image, f"image {image!r}")
                return (image,)
            return await self._image_of(_sif(image), {"do": "unpack", "source": image})

    async def _from_dockerfile(self, folder: Path) -> tuple[str, ...]:
        """The folders of a Dockerfile's image, built by the first who asks."""
        if recipe_of(folder) is None:
            raise StorageError(f"image {folder}: no Dockerfile on this node")
        name = await asyncio.to_thread(name_of, folder, self._build)
        if name not in self._registry.names():
            if reason := self._registry.failure_of(name):
                raise UserError(f"image {folder}: {reason}", "a Dockerfile that builds")
            await self._make_once(name, build_job(folder, name, self._build))
        return self._hold(self._registry.digest_of_name(name))

    async def layer(self, recipe: LayerRecipe) -> str:
        """The folder of a layer of packages. Raises SandboxError as `locate`."""
        with _blamed(recipe.about):
            job = await asyncio.to_thread(recipe.job)
            return (await self._image_of(job["digest"], job))[0]

    async def _pulled(self, reference: str) -> tuple[str, ...]:
        """The folders of an image in a container registry, pulled by the first who asks."""
        name = image_name(reference)
        try:
            pulled = self._registry.find(name)
        except NotFoundError:
            if self._mirrors is None:
                mend = "`prorl image pull --rows TASKS`, or `sandbox.pull: true`"
                raise UserError(f"image {reference} is not on this node", mend) from None
            words = {"source": reference, "name": name, "mirrors": json.dumps(dict(self._mirrors))}
            pulled = await self._make_once(reference, {"do": "pull", **words})
        if pulled.source.startswith(DOCKER) and plain(pulled.source) != plain(reference):
            hint = f"`prorl image rm {name}`, or another tag for one of them"
            raise UserError(
                f"image {reference}: {name} is {pulled.source} here", "one of both", hint
            )
        return self._hold(pulled.digest)

    async def _image_of(self, digest: str, job: dict[str, str]) -> tuple[str, ...]:
        if not self._registry.has(digest):
            await self._make_once(digest, job)
        return self._hold(digest)

    async def _make_once(self, key: str, job: dict[str, str]) -> Image:
        """Has a child make an image once, however many ask.

        One who gives up does not stop it for the others.
        """
        while self._refused and next(iter(self._refused.values()))[0] <= self._clock():
            self._refused.pop(next(iter(self._refused)))
        if key in self._refused:
            raise self._refused[key][1]
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(
                make_image(self._registry.root, job, MAKE_S)
            )
            task.add_done_callback(lambda task: self._note(key, task))
        return await asyncio.shield(task)

    def _note(self, key: str, task: asyncio.Task[Image]) -> None:
        """Other errors than a mistake of the source's are not remembered: the next try counts."""
        self._making.pop(key, None)
        if not task.cancelled() and isinstance(error := task.exception(), UserError):
            self._refused[key] = (self._clock() + REMEMBER_S, error)

    def _hold(self, digest: str) -> tuple[str, ...]:
        """Keep others from removing it; its folders. Raises StorageError when they are at it."""
        if digest not in self._locked:
            with ExitStack() as stack:
                try:
                    stack.enter_context(self._registry.lock(digest, shared=True, wait=False))
                except BlockingIOError:
                    raise StorageError(f"image {digest[:12]} is being removed") from None
                if not self._registry.has(digest):
                    raise StorageError(f"image {digest[:12]} was removed")
                self._locks.push(stack.pop_all())
            self._locked.add(digest)
            self._registry.note_use(digest)
        return tuple(self._registry.stack(digest))

    async def close(self) -> None:
        """Stop what is being made, let the images go; idempotent."""
        making = list(self._making.values())
        for task in making:
            task.cancel()
        await asyncio.gather(*making, return_exceptions=True)
        self._locks.close()
        self._locked.clear()


@contextmanager
def _blamed(label: str) -> Iterator[None]:
    try:
        yield
    except (UserError, NotFoundError) as error:
        raise SandboxError(FailureCode.BAD_TASK, str(error)) from None
    except (ProrlError, OSError) as error:
        text = str(error)
        named = text if text.startswith(label) else f"{label}: {text}"
        raise SandboxError(FailureCode.SANDBOX_START, named) from error


def _sif(path: str) -> str:
    """The digest of a .sif. Raises UserError for what is none."""
    expected = "a name, a folder or a .sif of this node"
    try:
        if is_sif(path):
            return digest_of_sif(path)
    except OSError as error:
        raise UserError(f"image {path!r}: {error.strerror}", expected) from None
    raise UserError(f"image {path!r} is neither a folder nor a SIF file", expected)
