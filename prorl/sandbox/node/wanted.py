"""Resolves a spec on this node: image, layer of packages, users' tools."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from prorl.errors import SandboxError
from prorl.sandbox import kinds
from prorl.sandbox.images.cache import ImageCache
from prorl.sandbox.images.layers import LayerRecipe
from prorl.sandbox.images.registry import default_root
from prorl.sandbox.node.settings import Settings
from prorl.tools.bundle import UserBundle, build_user
from prorl.tools.catalogue import CATALOGUE
from prorl.types import FailureCode, SandboxSpec


class Images:
    """The images and layers that sandboxes of one kind run on; belongs to sandboxd's loop."""

    def __init__(self, name: str, settings: Settings) -> None:
        self._name, self._kind = name, kinds.load(name)
        self._default = settings.image
        root = Path(settings.images) if settings.images else default_root()
        self._cache = ImageCache(root, settings.mirrors, build=settings.build)

    async def image(self, spec: SandboxSpec) -> tuple[str, ...]:
        """The folders, topmost first; none for none. Raises SandboxError for what cannot run."""
        image = spec.image or self._default
        if image and not self._kind.images:
            capable = kinds.capable(lambda kind: kind.images)
            raise SandboxError(
                FailureCode.BAD_TASK, f"image {image!r}: kind {self._name} runs none; use {capable}"
            )
        if (spec.overlay_bytes or spec.fakeroot) and not (image and self._kind.overlays):
            capable = kinds.capable(lambda kind: kind.overlays)
            problem = (
                f"overlay_bytes or fakeroot with kind {self._name} and"
                f" {f'image {image!r}' if image else 'no image'}"
            )
            raise SandboxError(
                FailureCode.BAD_TASK, f"{problem}; expected kind {capable} and an image"
            )
        return await self._cache.locate(image) if image else ()

    async def layer(self, spec: SandboxSpec, has_image: bool) -> str:
        """The folder of the packages that a spec requires; empty for none. Raises SandboxError."""
        if not spec.requirements:
            return ""
        if has_image:
            raise SandboxError(
                FailureCode.BAD_TASK,
                f"requirements {', '.join(spec.requirements)} beside image"
                f" {spec.image or self._default!r}; expected one of them: an image brings its own"
                " packages",
            )
        return await self._cache.layer(LayerRecipe(spec.requirements, spec.wheels))

    async def close(self) -> None:
        await self._cache.close()


class UserTools:
    """Packs users' tools into `<folder>/tools.zip`, once, and says who is not in it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "tools.zip"
        self._bundle: UserBundle | None = None

    def path_for(self, names: Iterable[str]) -> str:
        """The zip's path if one of these tools is a user's, else an empty string.

        Raises SandboxError (`bad_task`).
        """
        users = sorted(set(names) - set(CATALOGUE))
        if not users:
            return ""
        if self._bundle is None:
            self._bundle = build_user()
            self._path.parent.mkdir(mode=0o755, exist_ok=True)
            self._path.write_bytes(self._bundle.content)
            self._path.chmod(0o644)  # each sandbox's own uid opens it again by its descriptor
        bundle = self._bundle
        for name in users:
            if name not in bundle.names:
                tools = ", ".join(sorted({*CATALOGUE, *bundle.names}))
                raise SandboxError(
                    FailureCode.BAD_TASK,
                    bundle.problems.get(name, f"no tool {name!r} on this node; there are {tools}"),
                )
        return str(self._path)
