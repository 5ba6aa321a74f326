"""Where a task's image lies on this node.

A name, a folder, a .sif or a reference becomes the folders that launchers run. In sandboxd's loop.

What is not there is made by a child process, once however many ask (`child.py`); what is wrong with
a source is remembered until sandboxd ends. An image that is used is held by a shared lock until
then, so `prorl image rm` refuses.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from prorl.errors import NotFoundError, ProrlError, SandboxError, StorageError, UserError
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.layers import LayerRecipe
from prorl.sandbox.images.registry import Image, Registry, digest_of_sif, is_name, is_sif
from prorl.sandbox.images.remote import plain
from prorl.sandbox.images.tree import check_shell
from prorl.types import DOCKER, FailureCode, image_name

MAKE_S = 900.0
"""For one image: tens of gigabytes on a slow disk."""


class ImageCache:
    """One node's images as one sandboxd uses them.

    `mirrors`: of hosts of container registries; None: nothing is pulled.

    Not bounded: an open lock for each image that was used, and what is wrong with each bad one.
    """

    def __init__(self, root: Path, mirrors: Mapping[str, str] | None = None) -> None:
        self._registry, self._mirrors = Registry(root), mirrors
        self._making: dict[str, asyncio.Task[Image]] = {}
        self._held: set[str] = set()
        self._locks = ExitStack()

    async def locate(self, image: str) -> tuple[str, ...]:
        """The folders, topmost first.

        Raises SandboxError: `bad_task` when the task's image is at fault, else `sandbox_start`.
        """
        with _blamed(f"image {image!r}"):
            if image.startswith(DOCKER):
                return await self._pulled(image)
            if is_name(image):
                return self._hold(self._registry.digest_of_name(image))
            if not os.path.isabs(image):
                expected = "a name of this node's registry, an absolute path or docker://REFERENCE"
                raise UserError(f"image {image!r}", expected)
            if os.path.isdir(image):
                check_shell(image, f"image {image!r}")
                return (image,)
            return await self._kept(_sif(image), {"do": "unpack", "source": image})

    async def layer(self, recipe: LayerRecipe) -> str:
        """The folder of a layer of packages. Raises SandboxError as `locate`."""
        with _blamed(recipe.about):
            job = await asyncio.to_thread(recipe.job)
            return (await self._kept(job["digest"], job))[0]

    async def _pulled(self, reference: str) -> tuple[str, ...]:
        """The folders of an image in a container registry, pulled by the first who asks."""
        name = image_name(reference)
        try:
            found = self._registry.find(name)
        except NotFoundError:
            if self._mirrors is None:
                mend = "`prorl image pull --rows TASKS`, or `sandbox.pull: true`"
                raise UserError(f"image {reference} is not on this node", mend) from None
            words = {"source": reference, "name": name, "mirrors": json.dumps(dict(self._mirrors))}
            found = await self._made(reference, {"do": "pull", **words})
        if found.source.startswith(DOCKER) and plain(found.source) != plain(reference):
            hint = f"`prorl image rm {name}`, or another tag for one of them"
            raise UserError(
                f"image {reference}: {name} is {found.source} here", "one of both", hint
            )
        return self._hold(found.digest)

    async def _kept(self, digest: str, job: dict[str, str]) -> tuple[str, ...]:
        if not self._registry.has(digest):
            await self._made(digest, job)
        return self._hold(digest)

    async def _made(self, key: str, job: dict[str, str]) -> Image:
        """What a child makes once, however many ask.

        One who gives up does not stop it for the others.
        """
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(
                make_image(self._registry.root, job, MAKE_S)
            )
        try:
            made = await asyncio.shield(task)
        except StorageError:  # no mistake of the source's: who asks next has it tried again
            self._making.pop(key, None)
            raise
        self._making.pop(key, None)
        return made

    def _hold(self, digest: str) -> tuple[str, ...]:
        """Keep others from removing it; its folders. Raises StorageError when they are at it."""
        if digest not in self._held:
            with ExitStack() as stack:
                try:
                    stack.enter_context(self._registry.lock(digest, shared=True, wait=False))
                except BlockingIOError:
                    raise StorageError(f"image {digest[:12]} is being removed") from None
                if not self._registry.has(digest):
                    raise StorageError(f"image {digest[:12]} was removed")
                self._locks.push(stack.pop_all())
            self._held.add(digest)
        return tuple(self._registry.stack(digest))

    async def close(self) -> None:
        """Stop what is being made, let the images go; idempotent."""
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        self._making.clear()
        self._locks.close()
        self._held.clear()


@contextmanager
def _blamed(what: str) -> Iterator[None]:
    try:
        yield
    except (UserError, NotFoundError) as error:
        raise SandboxError(FailureCode.BAD_TASK, str(error)) from None
    except (ProrlError, OSError) as error:
        raise SandboxError(FailureCode.SANDBOX_START, f"{what}: {error}") from error


def _sif(path: str) -> str:
    """The digest of a .sif. Raises UserError for what is none."""
    expected = "a name, a folder or a .sif of this node"
    try:
        if is_sif(path):
            return digest_of_sif(path)
    except OSError as error:
        raise UserError(f"image {path!r}: {error.strerror}", expected) from None
    raise UserError(f"image {path!r} is neither a folder nor a SIF file", expected)
