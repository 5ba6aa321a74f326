"""Pulls one image into the registry: what is there already is not fetched, nor unpacked, again.

All hold one lock, which `prorl image gc` wants for itself: layers that no image has yet stay. Each
layer, and then the image, is made by one, for whom others wait. So images and nodes that share a
registry fetch a layer once; whoever dies leaves its part of a blob, and the next one goes on from
there.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

from prorl.errors import StorageError, UserError
from prorl.sandbox.images.registry import PULLING, Image, Registry
from prorl.sandbox.images.remote import ImageSource, Layer, Manifest, Tell, source_of
from prorl.sandbox.images.stack import can_stack, make_top, merge, stack_has_shell
from prorl.sandbox.images.tree import digest_of, has_shell
from prorl.sandbox.images.unpack import free_bytes, unpack


class Pull:
    """Pulls of one process: whether its images are stacked is found out once."""

    def __init__(self, registry: Registry, mirrors: Mapping[str, str]) -> None:
        self._registry, self._mirrors = registry, mirrors
        registry.open()
        with registry.workplace() as work:
            self.stacks = can_stack(work)

    def look(self, source: str | ImageSource) -> tuple[ImageSource, Manifest, list[Layer]]:
        """An image's source, what it says, and the layers that are missing here."""
        origin = source_of(source, self._mirrors) if isinstance(source, str) else source
        manifest = origin.manifest()
        has = self._registry.has
        return (
            origin,
            manifest,
            [layer for layer in manifest.layers if not has(self._key(layer.diff_id))],
        )

    def pull(self, name: str, source: str, tell: Tell = lambda _: None) -> Image:
        """Pulls an image as `image` does, and lets a name stand for it."""
        with self._registry.lock(PULLING, shared=True):  # until it has its name
            return self._registry.name(name, self.image(source, source, tell).digest)

    def image(self, source: str | ImageSource, about: str, tell: Tell = lambda _: None) -> Image:
        """Pull an image; `about` tells people, and tasks that name it, what it is.

        `tell` gets bytes as they come. Raises UserError where the image is at fault, StorageError.
        """
        registry = self._registry
        origin, manifest, missing = self.look(source)
        coming = sum(layer.size for layer in missing)
        if coming > free_bytes(registry.root):
            raise StorageError(f"{about}: {coming / 1e6:.0f} MB to come; {registry.full()}")
        made_from = f"{manifest.digest} {about}".encode()
        key = self._key(hashlib.sha256(made_from).hexdigest())
        with registry.lock(PULLING, shared=True):
            for layer in dict.fromkeys(manifest.layers):
                self._layer(origin, layer, about, tell)
            return registry.make(key, about, lambda work: self._stack(work, manifest, about))

    def _key(self, digest: str) -> str:
        return digest.removeprefix("sha256:") + ("" if self.stacks else "-plain")

    def _layer(self, origin: ImageSource, layer: Layer, about: str, tell: Tell) -> None:
        registry, key = self._registry, self._key(layer.diff_id)
        blob = registry.root / "blobs" / f"{key}.new"

        def fill(work: Path) -> None:
            origin.blob(layer, blob, tell)
            try:
                room = free_bytes(registry.root)
                unpack(blob, work / "tree", layer.diff_id, room, marks=self.stacks)
            finally:
                blob.unlink(missing_ok=True)

        registry.make(key, about, fill, is_layer=True)

    def _stack(self, work: Path, manifest: Manifest, about: str) -> list[str]:
        """The layers of an image, its own on top; none where it is a folder of its own."""
        registry, top = self._registry, work / "top"
        keys = [self._key(layer.diff_id) for layer in manifest.layers]
        below = [str(registry.folder(key)) for key in keys]
        if not self.stacks:
            merge(below, work / "tree")
            below = [str(work / "tree")]
        if not (stack_has_shell(below) if self.stacks else has_shell(below[0])):
            raise UserError(f"{about} has no bash", "bin/bash or usr/bin/bash in it")
        make_top(top, below, manifest.config)
        if not self.stacks:
            merge([str(top)], work / "tree")
            return []
        shared = digest_of(str(top))  # images of one family have equal tops

        def fill(place: Path) -> None:
            top.rename(place / "tree")

        registry.make(shared, "mount points, environment", fill, is_layer=True)
        return [*keys, shared]
