"""`prorl image pull | build | ls | du | sif | rm | gc`: this node's images, without a daemon."""

from __future__ import annotations

import asyncio
import json as json_text
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from prorl.cli.built import Built, build_images, missing, recipes_of
from prorl.cli.options import Flag, JsonList
from prorl.cli.output import note, say, say_json, table
from prorl.cli.settings import registry_root, sandbox_environment
from prorl.errors import ProrlError, StorageError, UserError
from prorl.pluralize import pluralize
from prorl.sandbox.images.child import make_image
from prorl.sandbox.images.maker import write_sif
from prorl.sandbox.images.pull import Pull
from prorl.sandbox.images.registry import Image, Registry, plain
from prorl.tasks.files import load_tasks
from prorl.types import DOCKER, image_name

BUILD_S = 3600.0
SIDE_BY_SIDE = 4
"""Images that are pulled at a time."""

image = App(
    name="image",
    help="Images for sandboxes, without a daemon: pull, build, ls, du, sif, rm, gc.",
    help_format="plaintext",
)

Where = Annotated[
    Path | None,
    Parameter(name="--images", help="Folder of the registry; default: `service.sandbox.images`."),
]


@image.command
def build(
    name: str = "",
    /,
    *,
    source: Annotated[str, Parameter(name="--from")] = "",
    tasks: str = "",
    jobs: Annotated[int, Parameter(name=["--jobs", "-j"])] = 2,
    replace: Flag = False,
    images: Where = None,
) -> int:
    """Make an image that tasks can name, or all that the Harbor tasks of a folder are built from.

    Example: prorl image build task7 --from task7.def

    Example: prorl image build --tasks tasks/ -j 4

    Parameters
    ----------
    name
        What tasks call it.
    source
        A folder (a root file system, or one with a Dockerfile, which buildah or podman builds),
        FILE.sif or FILE.def (its `From:` may name another image).
    tasks
        Folder of Harbor tasks; what was built with the same files and settings is not built again.
    jobs
        Images that are built at a time.
    replace
        Let an existing name stand for the new image.
    """
    if tasks and not (name or source):
        return asyncio.run(_build_tasks(tasks, jobs, registry_root(images)))
    if tasks or not (name and source):
        raise UserError(
            "prorl image build without a source", "NAME --from SOURCE, or --tasks FOLDER"
        )
    path = str(Path(source).absolute()) if Path(source).exists() else source
    job = {
        "do": "build",
        "name": name,
        "source": path,
        "replace": "1" if replace else "",
        "settings": json_text.dumps(sandbox_environment().build.model_dump(exclude_defaults=True)),
    }
    image = asyncio.run(make_image(registry_root(images), job, BUILD_S, _echo))
    place = f", at {image.path}" if image.path else f", {pluralize(len(image.layers), 'layer')}"
    size = _sizes(Registry(registry_root(images)).list())[image.digest]
    say(f"{name}: {size / 1e6:.0f} MB, {image.digest[:12]}{place}")
    return 0


async def _build_tasks(folder: str, jobs: int, root: Path) -> int:
    """Build each image once; a failure is a line with the end of what the build printed."""
    recipes = recipes_of(load_tasks(folder, skip_invalid=True))
    if not recipes:
        raise UserError(f"{folder}: no task has a Dockerfile", "Harbor tasks with environment/")
    build = sandbox_environment().build
    lacking, number = missing(recipes, root, build), count(1)
    here = len(recipes) - len(lacking)
    note(f"{here:,} of {pluralize(len(recipes), 'image')} here")

    def ended(built: Built) -> None:
        note(f"{next(number)} of {len(lacking)}: {built.about}")

    done = await build_images(lacking, root, build, jobs, ended)
    num_failed = sum(bool(built.failure) for built in done)
    num_here = len(recipes) - num_failed
    say(f"{num_here:,} of {pluralize(len(recipes), 'image')} here, {num_failed:,} failed")
    return 1 if num_failed else 0


def _echo(output: bytes) -> None:
    note(output.decode("utf-8", "replace").rstrip("\n"))


@image.command
def pull(
    name: str = "",
    /,
    *,
    source: Annotated[str, Parameter(name="--from")] = "",
    rows: str = "",
    images: Where = None,
) -> int:
    """Pull an image by its name in a container registry, or all that the tasks of a file name.

    Example: prorl image pull --rows SWE-bench_Verified.parquet

    Parameters
    ----------
    name
        What tasks call it; default: the last part of its reference.
    source
        docker://REFERENCE, oci:FOLDER[:TAG], docker-archive:FILE[:TAG], or tarball:FILE, a root
        file system as `mmdebstrap` and `docker export` write it.
    rows
        File of tasks; images that are there already are not asked for again.
    """
    if bool(source) == bool(rows) or (rows and name):
        raise UserError(
            "prorl image pull without a source", "[NAME] --from SOURCE, or --rows TASKS"
        )
    registry = Registry(registry_root(images))
    pulls = Pull(registry, sandbox_environment().mirrors)
    if source:
        if not name and not source.startswith(DOCKER):
            raise UserError(f"--from {source} without a name", "prorl image pull NAME --from ...")
        references, there = {name or image_name(source): source}, 0
    else:
        references = _named_in(rows)
        local_names = set(registry.names())
        there = len(references.keys() & local_names)
        references = {name: ref for name, ref in references.items() if name not in local_names}
    failed: dict[str, str] = {}
    layers: dict[str, int] = {}

    def look(item: tuple[str, str]) -> None:
        try:
            layers.update((layer.digest, layer.size) for layer in pulls.look(item[1])[2])
        except ProrlError as error:
            failed[item[0]] = str(error)

    with ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        list(threads.map(look, references.items()))
    total = sum(layers.values())
    note(
        f"{pluralize(len(references) + there, 'image')}, {there} here;"
        f" {pluralize(len(layers), 'layer')} of"
        f" {total / 1e6:.1f} MB to come"
    )
    available = {name: ref for name, ref in references.items() if name not in failed}
    _pull_all(pulls, available, total, failed)
    for lacking, why in sorted(failed.items()):
        note(f"missing: {lacking}: {why}")
    say(f"{len(references) - len(failed)} pulled, {there} were here, {len(failed)} missing")
    return 1 if failed else 0


def _pull_all(pulls: Pull, references: dict[str, str], total: int, failed: dict[str, str]) -> None:
    """Pull images side by side under a bar of bytes; what fails is told in `failed`."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    stopped = threading.Event()
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    bar = Progress(*columns, TransferSpeedColumn(), console=Console(stderr=True))
    line = bar.add_task("pulling", total=total)

    def count_bytes(num_bytes: int) -> None:
        if stopped.is_set():
            raise StorageError("stopped; the next pull goes on from here")
        bar.advance(line, num_bytes)

    def pull_image(item: tuple[str, str]) -> None:
        try:
            if not stopped.is_set():
                pulls.pull(*item, count_bytes)
        except (ProrlError, OSError) as error:
            failed[item[0]] = str(error)

    with bar, ThreadPoolExecutor(SIDE_BY_SIDE) as threads:
        try:
            list(threads.map(pull_image, references.items()))
        except BaseException:
            stopped.set()
            raise


def _named_in(rows: str) -> dict[str, str]:
    """References by name of the images that tasks are to be pulled for."""
    references: dict[str, str] = {}
    for task in load_tasks(rows):
        reference = task.data.get("image")
        if isinstance(reference, str) and reference.startswith(DOCKER):
            name = image_name(reference)
            if plain(references.setdefault(name, reference)) != plain(reference):
                raise UserError(
                    f"{reference} and {references[name]}: both are {name!r}", "only one of them"
                )
    if not references:
        raise UserError(f"{rows}: no task names an image", "data.image as docker://REFERENCE")
    return references


@image.command
def ls(*, images: Where = None, json: JsonList = False) -> int:
    """List the images of this node; those without a name were unpacked from .sif files of tasks."""
    registry = Registry(registry_root(images))
    there = registry.list()
    whole_images, sizes = [each for each in there if not each.is_layer], _sizes(there)
    if json:
        say_json([asdict(each) for each in whole_images])
    elif not whole_images:
        say(f"no images in {registry.root}; `prorl image pull` and `build` make them")
    else:
        columns = ("name", "digest", "MB", "files", "made", "from")
        table(columns, (_row(each, sizes[each.digest]) for each in whole_images))
    return 0


def _sizes(there: list[Image]) -> dict[str, int]:
    own = {each.digest: each.bytes for each in there}
    return {each.digest: each.bytes + sum(own[d] for d in each.layers) for each in there}


def _row(image: Image, num_bytes: int) -> tuple[object, ...]:
    made_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(image.made_at))
    size = f"{num_bytes / 1e6:.0f}"
    return (",".join(image.names), image.digest[:12], size, image.files, made_at, image.source)


@image.command
def du(*, images: Where = None) -> int:
    """Print the disk space that images take: in all, and what `rm` and `gc` would free."""
    there = Registry(registry_root(images)).list()
    users = Counter(digest for each in there for digest in each.layers)
    own, sizes = {each.digest: each.bytes for each in there}, _sizes(there)
    rows = []
    for each in (each for each in there if not each.is_layer):
        alone = each.bytes + sum(own[digest] for digest in each.layers if users[digest] == 1)
        rows.append((",".join(each.names), f"{sizes[each.digest] / 1e6:.1f}", f"{alone / 1e6:.1f}"))
    table(("name", "MB", "MB alone"), rows)
    say(f"{sum(own.values()) / 1e6:.1f} MB on disk in {pluralize(len(rows), 'image')}")
    return 0


@image.command
def sif(name: str, path: Path, /, *, images: Where = None) -> int:
    """Write an image as a .sif, which Apptainer runs on machines without this registry.

    Example: prorl image sif task7 /shared/task7.sif
    """
    registry = Registry(registry_root(images))
    registry.open()
    write_sif(registry, name, path.absolute())
    say(f"{path}: {path.stat().st_size / 1e6:.0f} MB")
    return 0


@image.command
def rm(*names: str, images: Where = None) -> int:
    """Remove images; one that a running service uses stays. `gc` removes layers left over."""
    if not names:
        raise UserError("prorl image rm without a name", "NAME...")
    registry = Registry(registry_root(images))
    registry.open()
    for name in names:
        say(f"removed {name} ({registry.forget(name).digest[:12]})")
    return 0


@image.command
def gc(
    *,
    older_than: float | None = None,
    keep_gb: float | None = None,
    images: Where = None,
) -> int:
    """Remove every image without a name, layers that no image needs, and halves of blobs.

    Example: prorl image gc --older-than 7 --keep-gb 200

    Parameters
    ----------
    older_than
        Also images, pulled or built for tasks, that no service has begun to use for so many days.
    keep_gb
        Also such images, least recently used first, until the others take that much at most.
    """
    registry = Registry(registry_root(images))
    registry.open()
    if min(older_than or 0.0, keep_gb or 0.0) < 0:
        raise UserError("prorl image gc with a number below 0", "days, and gigabytes, from 0 on")
    age_s = None if older_than is None else older_than * 86400
    for each in registry.collect(age_s, None if keep_gb is None else int(keep_gb * 1e9)):
        say(f"removed {each.digest[:12]} ({each.source})")
    return 0
