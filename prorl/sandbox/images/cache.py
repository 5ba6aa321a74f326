"""Where a task's image lies on this node.

A name, a folder or a .sif becomes the folder that launchers run. In sandboxd's loop.

A .sif is unpacked by a child process, once a node however many ask (`images.py` has the lock); an
answer, good or bad, is remembered until the file changes or sandboxd ends. An image that is used is
held by a shared lock until sandboxd ends, so `prorl image rm` refuses. Where unpacking is
impossible (spython, space, time), kinds that can run the .sif itself do; each start is slower then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NamedTuple

from prorl.errors import NotFoundError, ProrlError, SandboxError, StorageError, UserError
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.layers import LayerRecipe
from prorl.sandbox.images.registry import Image, Registry, is_name, is_sif
from prorl.sandbox.images.remote import plain
from prorl.sandbox.images.tree import has_shell
from prorl.types import DOCKER, FailureCode, image_name

log = logging.getLogger(__name__)

UNPACK_S = 900.0
"""For one .sif: tens of gigabytes on a slow disk."""


class Sif(NamedTuple):
    """A .sif as it was when it was hashed: another file under its path has other numbers."""

    path: str
    size: int
    mtime_ns: int
    inode: int


class ImageCache:
    """One node's images as one sandboxd uses them.

    `runs_sif`: whether its kind can run a .sif without unpacking it. `mirrors`: of hosts of
    container registries; None: nothing is pulled.

    Not bounded: an open lock for each image that was used.
    """

    def __init__(
        self, root: Path, runs_sif: bool, mirrors: Mapping[str, str] | None = None
    ) -> None:
        self._mirrors = mirrors
        self._registry, self._runs_sif = Registry(root), runs_sif
        self._making: dict[Sif | str, asyncio.Task[Image]] = {}
        self._held: set[str] = set()
        self._locks = ExitStack()

    async def locate(self, image: str) -> tuple[str, ...]:
        """The folders, topmost first, or the .sif to run.

        Raises SandboxError: `bad_task` when the task's image is at fault, else `sandbox_start`.
        """
        try:
            if image.startswith(DOCKER):
                return await self._pulled(image)
            if is_name(image):
                return self._hold(self._registry.digest_of_name(image))
            if not os.path.isabs(image):
                expected = "a name of this node's registry, an absolute path or docker://REFERENCE"
                raise UserError(f"image {image!r}", expected)
            if os.path.isdir(image):
                return _with_shell(image)
            return await self._folder_of(self._sif(image))
        except (UserError, NotFoundError) as error:
            raise SandboxError(FailureCode.BAD_TASK, str(error)) from None
        except (ProrlError, OSError) as error:
            raise SandboxError(FailureCode.SANDBOX_START, f"image {image!r}: {error}") from error

    async def _pulled(self, reference: str) -> tuple[str, ...]:
        """The folders of an image in a container registry, pulled by the first who asks."""
        name = image_name(reference)
        try:
            found = self._registry.find(name)
        except NotFoundError:
            if self._mirrors is None:
                mend = "`prorl image pull --rows TASKS`, or `sandbox.pull: true`"
                raise UserError(f"image {reference} is not on this node", mend) from None
            words = {"source": reference, "name": name, "mirrors": json.dumps(self._mirrors)}
            try:
                found = await self._made(reference, {"do": "pull", **words})
            except StorageError:  # a registry that is away may come back
                self._making.pop(reference, None)
                raise
        if found.source.startswith(DOCKER) and plain(found.source) != plain(reference):
            hint = f"`prorl image rm {name}`, or another tag for one of them"
            raise UserError(
                f"image {reference}: {name} is {found.source} here", "one of both", hint
            )
        try:
            return self._hold(found.digest)
        except NotFoundError:  # removed since it was pulled
            self._making.pop(reference, None)
            raise

    async def layer(self, recipe: LayerRecipe) -> str:
        """The folder of a layer of packages. Raises SandboxError as `locate`."""
        try:
            job = await asyncio.to_thread(recipe.job)
            with suppress(NotFoundError):
                if self._registry.has(job["digest"]):
                    return self._hold(job["digest"])[0]
            try:
                made = await self._made(job["digest"], job)
            except StorageError:  # no mistake of the recipe's: who asks next has it tried again
                self._making.pop(job["digest"], None)
                raise
            return self._hold(made.digest)[0]
        except UserError as error:
            raise SandboxError(FailureCode.BAD_TASK, str(error)) from None
        except (ProrlError, OSError) as error:
            raise SandboxError(FailureCode.SANDBOX_START, f"{recipe.about}: {error}") from error

    async def _made(self, key: Sif | str, job: dict[str, str]) -> Image:
        """What a child makes once, however many ask.

        One who gives up does not stop it for the others.
        """
        task = self._making.get(key)
        if task is None:
            task = self._making[key] = asyncio.create_task(
                make_image(self._registry.root, job, UNPACK_S)
            )
        return await asyncio.shield(task)

    def _sif(self, path: str) -> Sif:
        try:
            about = os.stat(path)
        except OSError as error:
            raise UserError(
                f"image {path!r}: {error.strerror}", "a name, a folder or a .sif of this node"
            ) from None
        if not is_sif(path):
            raise UserError(
                f"image {path!r} is neither a folder nor a SIF file",
                "a name, a folder or a .sif of this node",
            )
        return Sif(os.path.realpath(path), about.st_size, about.st_mtime_ns, about.st_ino)

    async def _folder_of(self, sif: Sif) -> tuple[str, ...]:
        try:
            made = self._made(sif, {"do": "unpack", "source": sif.path})
            return self._hold((await made).digest)
        except StorageError as error:
            if not self._runs_sif:
                raise
            log.warning(
                "%s runs as it is, which is slower, because it cannot be unpacked: %s",
                sif.path,
                error,
            )
            return (sif.path,)
        except NotFoundError:  # removed since it was unpacked
            self._making.pop(sif, None)
            return await self._folder_of(sif)

    def _hold(self, digest: str) -> tuple[str, ...]:
        """Keep others from removing it; its folders. Raises NotFoundError when they are at it."""
        if digest not in self._held:
            with ExitStack() as stack:
                try:
                    stack.enter_context(self._registry.lock(digest, shared=True, wait=False))
                except BlockingIOError:
                    raise NotFoundError(f"image {digest[:12]} is being removed") from None
                if not self._registry.has(digest):
                    raise NotFoundError(f"image {digest[:12]} was removed")
                self._locks.push(stack.pop_all())
            self._held.add(digest)
        return tuple(self._registry.stack(digest))

    async def close(self) -> None:
        """Stop what is being unpacked, let the images go; idempotent."""
        for task in self._making.values():
            task.cancel()
        await asyncio.gather(*self._making.values(), return_exceptions=True)
        self._making.clear()
        self._locks.close()
        self._held.clear()


def _with_shell(folder: str) -> tuple[str, ...]:
    """The folder, if it can be an image. Raises UserError."""
    if not has_shell(folder):
        raise UserError(
            f"image {folder!r} is no root file system: it has no bash",
            "bin/bash or usr/bin/bash in it",
        )
    return (folder,)
