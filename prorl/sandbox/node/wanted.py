"""Which image and which layer of packages a spec gets on this node."""

from __future__ import annotations

from pathlib import Path

from prorl.errors import SandboxError
from prorl.sandbox import kinds
from prorl.sandbox.images.cache import ImageCache
from prorl.sandbox.images.layers import LayerRecipe
from prorl.sandbox.images.registry import default_root
from prorl.sandbox.node.settings import Settings
from prorl.types import FailureCode, SandboxSpec


class Images:
    """The images and layers that sandboxes of one kind run on; belongs to sandboxd's loop."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._kind = name, kinds.load(name)
        self._default = settings.image
        root = Path(settings.images) if settings.images else default_root()
        self._cache = ImageCache(root, self._kind.sif)

    async def image(self, spec: SandboxSpec) -> str:
        """The folder or .sif to run; empty for none. Raises SandboxError for what cannot run."""
        image = spec.image or self._default
        if image and not self._kind.images:
            capable = kinds.capable(lambda kind: kind.images)
            raise SandboxError(
                FailureCode.BAD_TASK, f"image {image!r}: kind {self._name} runs none; use {capable}"
            )
        if (spec.overlay_bytes or spec.fakeroot) and not (image and self._kind.overlays):
            capable = kinds.capable(lambda kind: kind.overlays)
            given = (
                f"overlay_bytes or fakeroot with kind {self._name} and"
                f" {f'image {image!r}' if image else 'no image'}"
            )
            raise SandboxError(
                FailureCode.BAD_TASK, f"{given}; expected kind {capable} and an image"
            )
        return await self._cache.locate(image) if image else ""

    async def layer(self, spec: SandboxSpec, image: str) -> str:
        """The folder of the packages that a spec requires; empty for none. Raises SandboxError."""
        if not spec.requirements:
            return ""
        if image:
            raise SandboxError(
                FailureCode.BAD_TASK,
                f"requirements {', '.join(spec.requirements)} beside image {image!r}; expected one"
                " of them: an image brings its own packages",
            )
        return await self._cache.layer(LayerRecipe(spec.requirements, spec.wheels))

    async def close(self) -> None:
        """Stop what is being made, let the images go; idempotent."""
        await self._cache.close()
