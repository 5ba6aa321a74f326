"""Images from a folder with a Dockerfile, built by buildah, else podman, once for each digest.

The digest is that of the folder's files and of the build settings, and names the image in the
registry: `dockerfile-DIGEST`. So a task whose folder or settings change is built anew, and tasks
with equal folders share an image. Layers are cached by the program that builds, in its own storage.

Settings are for machines that reach no public registry: base images by another name, files and
variables that `RUN` sees while it builds and that stay out of the image, build arguments, secrets.
`store` is where nodes share what they build (`store.py`), and has no part in the digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prorl.errors import StorageError
from prorl.sandbox.images.layers import ToolFailed
from prorl.sandbox.images.registry import BUILT
from prorl.sandbox.images.tree import digest_of

DOCKERFILES = ("environment/Dockerfile", "Dockerfile")
"""Where a task's or a build's folder has it."""
STORE_VARIABLES = ("AWS_", "FSSPEC_", "GOOGLE_", "AZURE_")
"""How variables begin by which a store is reached: no build sees them."""
_FROM = re.compile(r"(?im)^([^\S\n]*FROM[^\S\n]+(?:--\S+[^\S\n]+)*)(\S+)(.*)$")
_COPY_FROM = re.compile(r"(?im)^([^\S\n]*COPY[^\S\n]+(?:--\S+[^\S\n]+)*?--from=)(\S+)")


def program() -> str:
    """The path of what builds a Dockerfile here, or an empty string."""
    return shutil.which("buildah") or shutil.which("podman") or ""


def name_of(folder: Path, settings: Mapping[str, Any]) -> str:
    """The registry's name for the image of a folder. Reads every file of it; raises OSError."""
    whole = hashlib.sha256(digest_of(str(folder)).encode())
    own = {key: value for key, value in settings.items() if key != "store"}
    whole.update(json.dumps(own, sort_keys=True).encode())
    return f"{BUILT}{whole.hexdigest()[:32]}"


def recipe_of(folder: Path) -> Path | None:
    return next((path for name in DOCKERFILES if (path := folder / name).is_file()), None)


def build_job(folder: Path, name: str, settings: Mapping[str, Any]) -> dict[str, str]:
    """The job of `maker.py` that builds a folder's image under a name."""
    words = {"do": "dockerfile", "source": str(folder), "name": name}
    return {**words, "settings": json.dumps(dict(settings))}


def build(recipe: Path, work: Path, settings: Mapping[str, Any]) -> Path:
    """Build what a Dockerfile says. Returns the docker-archive that holds the one image: its layers
    are not compressed, which would take most of the CPU time of an image whose layers are cached.

    Raises StorageError where nothing can build here, ToolFailed where the Dockerfile is at fault.
    """
    builder = program()
    if not builder:
        raise StorageError(
            f"{recipe} needs buildah or podman, and neither is installed: apt-get install buildah,"
            " or set `service.sandbox.build.store` to where another node puts what it builds"
        )
    # its storage is the user's own: base images are pulled once, and layers are shared
    try:
        os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a uid without a name, as OpenShift gives
        os.environ["HOME"] = str(work)
    # a build that is killed leaves gigabytes of layers in it
    os.environ["TMPDIR"] = str(work)
    number, archive, adapted = work / "image-id", work / "image.tar", work / "Dockerfile"
    text = adapt(recipe.read_bytes().decode("utf-8", "surrogateescape"), settings)
    adapted.write_bytes(text.encode("utf-8", "surrogateescape"))
    words = [builder, "build", "--isolation", "chroot", "--layers", "--iidfile", str(number)]
    for name, value in {**settings.get("env", {}), **settings.get("args", {})}.items():
        words += ["--build-arg", f"{name}={value}"]
    for source, target in settings.get("files", {}).items():
        words += ["--volume", f"{source}:{target}:ro"]
    for name, source in settings.get("secrets", {}).items():
        words += ["--secret", f"id={name},src={source}"]
    _run(str(recipe), [*words, "--file", str(adapted), str(recipe.parent)], mistake=True)
    image = number.read_text()
    _run(str(recipe), [builder, "push", "--quiet", image, f"docker-archive:{archive}"])
    return archive


def adapt(text: str, settings: Mapping[str, Any]) -> str:
    """A Dockerfile with other base images, and the build's variables known to each stage.

    >>> adapt("FROM python:3 AS a\\nRUN x", {"bases": {"python:3": "base"}, "env": {"CA": "/c"}})
    'FROM base AS a\\nARG CA\\nRUN x'
    """
    bases: Mapping[str, str] = settings.get("bases", {})
    arguments = "".join(f"\nARG {name}" for name in settings.get("env", {}))

    def other(reference: str) -> str:
        return bases.get(reference) or bases.get(f"docker.io/library/{reference}") or reference

    text = _FROM.sub(lambda match: f"{match[1]}{other(match[2])}{match[3]}{arguments}", text)
    return _COPY_FROM.sub(lambda match: f"{match[1]}{other(match[2])}", text)


def _run(source: str, argv: list[str], *, mistake: bool = False) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(STORE_VARIABLES)}
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, env=environment, check=False)
    if done.returncode != 0:
        raise ToolFailed(f"{source}: {os.path.basename(argv[0])} failed", mistake=mistake)
