"""Images from a folder with a Dockerfile, built by buildah, else podman, once for each digest.

The digest is that of the folder's files and of the build settings, and names the image in the
registry: `dockerfile-DIGEST`. So a task whose folder or settings change is built anew, and tasks
with equal folders share an image. Layers are cached by the program that builds, in its own storage.

Settings are for machines that reach no public registry: base images by another name, files and
variables that `RUN` sees while it builds and that stay out of the image, build arguments, secrets.
`store` is where nodes share what they build (`store.py`), and has no part in the digest.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prorl.errors import StorageError
from prorl.sandbox.images.layers import ToolFailed
from prorl.sandbox.images.registry import BUILT
from prorl.sandbox.images.tree import digest_of

DOCKERFILES = ("environment/Dockerfile", "Dockerfile")
"""The places of a Dockerfile in a task's folder and in a build's."""
HEREDOCS_SINCE = (1, 33)
"""The first version of buildah that reads them; older ones take each line for an instruction."""
STORE_VARIABLES = ("AWS_", "FSSPEC_", "GOOGLE_", "AZURE_")
"""The beginnings of the variables by which a store is reached: no build sees them."""
_FROM = re.compile(r"(?i)(\s*FROM\s+(?:--\S+\s+)*)(\S+)(?:\s+AS\s+(\S+))?")
_COPY_FROM = re.compile(r"(?i)(\s*COPY\s+(?:--\S+\s+)*?--from=)(\S+)")
_ARG = re.compile(r"(?i)\s*ARG\s")
_ARGUMENT = re.compile(r"\b(\w+)=(\"[^\"]*\"|'[^']*'|\S*)")
_REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)(?::?-([^}${]*))?\})")
_ESCAPE = re.compile(r"(?i)(?:#[^\n]*\n)*?#\s*escape\s*=\s*(\S)")
_HEREDOC = re.compile(r"<<-?([\"']?)(\w+)\1")
_TAKES_TEXTS = re.compile(r"(?i)(?:RUN|COPY|ADD)\s")


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
    content = recipe.read_bytes().removeprefix(codecs.BOM_UTF8)
    text = content.decode("utf-8", "surrogateescape")
    _check_heredocs(recipe, text, builder)
    # its storage is the user's own: base images are pulled once, and layers are shared
    try:
        os.environ["HOME"] = pwd.getpwuid(os.getuid()).pw_dir
    except KeyError:  # a uid without a name, as OpenShift gives
        os.environ["HOME"] = str(work)
    # a build that is killed leaves gigabytes of layers in it
    os.environ["TMPDIR"] = str(work)
    number, archive, adapted = work / "image-id", work / "image.tar", work / "Dockerfile"
    adapted.write_bytes(adapt(text, settings).encode("utf-8", "surrogateescape"))
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


def _check_heredocs(recipe: Path, text: str, builder: str) -> None:
    """Raise StorageError for a Dockerfile that this node's buildah would take for another one."""
    has_heredoc = any(
        _TAKES_TEXTS.match(each) and _HEREDOC.search(each) for each in _instructions(text)
    )
    if not has_heredoc or os.path.basename(builder) != "buildah":
        return
    done = subprocess.run([builder, "--version"], capture_output=True, text=True, check=False)
    version = re.search(r"\b(\d+)\.(\d+)", done.stdout)
    if version and (int(version[1]), int(version[2])) < HEREDOCS_SINCE:
        raise StorageError(
            f"{recipe} has a heredoc (<<), which buildah {version[0]} does not know; expected"
            f" buildah {'.'.join(map(str, HEREDOCS_SINCE))} or later on this node"
        )


def adapt(text: str, settings: Mapping[str, Any]) -> str:
    """A Dockerfile with other base images, and the build's variables known to each stage.

    >>> adapt("FROM python:3 AS a\\nRUN x", {"bases": {"python:3": "base"}, "env": {"CA": "/c"}})
    'FROM base AS a\\nARG CA\\nRUN x'
    >>> adapt("ARG V=3\\nFROM python:$V\\nRUN echo \\\\\\n FROM b", {"bases": {"python:3": "base"}})
    'ARG V=3\\nFROM base\\nRUN echo \\\\\\n FROM b'
    """
    bases: Mapping[str, str] = settings.get("bases", {})
    declared = "".join(f"\nARG {name}" for name in settings.get("env", {}))
    values: dict[str, str] = {}
    """Values of the arguments before the first FROM, which base images may name."""
    stages: set[str] = set()
    adapted = []

    def other(reference: str) -> str:
        name = _REFERENCE.sub(
            lambda match: values.get(match[1] or match[2], "") or match[3] or "", reference
        )
        if name.lower() in stages:
            return reference
        return bases.get(name) or bases.get(f"docker.io/library/{name}") or reference

    for instruction in _instructions(text):
        if match := _FROM.match(instruction):
            line, end = f"{match[1]}{other(match[2])}{instruction[match.end(2) :]}", ""
            if line.endswith("\n"):
                line, end = line[:-1], "\n"
            instruction = f"{line}{declared}{end}"
            stages.add((match[3] or "").lower())
        elif match := _COPY_FROM.match(instruction):
            instruction = f"{match[1]}{other(match[2])}{instruction[match.end() :]}"
        elif _ARG.match(instruction) and not stages:
            arguments: Mapping[str, str] = {**settings.get("env", {}), **settings.get("args", {})}
            for name, value in _ARGUMENT.findall(instruction):
                values[name] = arguments.get(name, value.strip("\"'"))
        adapted.append(instruction)
    return "".join(adapted)


def _instructions(text: str) -> Iterator[str]:
    """Each instruction of a Dockerfile with all of its lines; comments and empty lines apart."""
    match = _ESCAPE.match(text)
    escape = match[1] if match else "\\"
    lines: list[str] = []
    ends: list[str] = []
    for line in re.findall(r"[^\n]*\n|[^\n]+", text):
        bare = line.strip()
        is_empty = not ends and (not bare or bare.startswith("#"))
        if is_empty and not lines:
            yield line
            continue
        lines.append(line)
        if ends:
            ends = ends[1:] if bare == ends[0] else ends
            is_continued = bool(ends)
        else:
            if _TAKES_TEXTS.match(lines[0].lstrip()):
                ends = [word for _, word in _HEREDOC.findall(line)]
            is_continued = is_empty or bare.endswith(escape) or bool(ends)
        if not is_continued:
            yield "".join(lines)
            lines = []
    yield "".join(lines)


def _run(source: str, argv: list[str], *, mistake: bool = False) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(STORE_VARIABLES)}
    done = subprocess.run(argv, stdin=subprocess.DEVNULL, env=environment, check=False)
    if done.returncode != 0:
        raise ToolFailed(f"{source}: {os.path.basename(argv[0])} failed", mistake=mistake)
