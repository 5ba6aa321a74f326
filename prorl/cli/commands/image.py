"""`prorl image build | ls | rm`: images of this node, made without any container registry."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from cyclopts import App, Parameter

from prorl.cli.options import Flag, JsonList
from prorl.cli.output import note, say, say_json, table
from prorl.cli.settings import service_environment
from prorl.errors import UserError
from prorl.sandbox.images.child import adopting_orphans, make_image
from prorl.sandbox.images.registry import Image, Registry, default_root

image = App(
    name="image",
    help="Images for sandboxes, made without any container registry: build, ls, rm.",
    help_format="plaintext",
)

Where = Annotated[
    Path | None,
    Parameter(name="--images", help="Folder of the registry; default: `service.sandbox.images`."),
]


@image.command
def build(
    name: str,
    /,
    *,
    source: Annotated[str, Parameter(name="--from")],
    include: str = "",
    mirror: str = "",
    replace: Flag = False,
    timeout_s: float = 3600.0,
    images: Where = None,
) -> int:
    """Make an image that tasks can name.

    Example: prorl image build deb12 --from debian:bookworm --include python3,git

    Parameters
    ----------
    name
        What tasks call it.
    source
        A folder (a root file system, or one with a Dockerfile, which buildah or podman builds),
        FILE.sif, FILE.def (its `From:` may name another image) or debian:SUITE.
    include
        Debian packages to add to debian:SUITE, separated by commas.
    mirror
        Package mirror of debian:SUITE; default: the one that this machine uses.
    replace
        Let an existing name stand for the new image.
    timeout_s
        Give up after so long.
    """
    path = str(Path(source).absolute()) if Path(source).exists() else source
    job = {
        "do": "build",
        "name": name,
        "source": path,
        "include": include,
        "mirror": mirror,
        "replace": "1" if replace else "",
    }
    with adopting_orphans():
        made = asyncio.run(make_image(registry_root(images), job, timeout_s, _echo))
    say(
        f"{name}: {made.bytes / 1e6:.0f} MB in {made.files} files, {made.digest[:12]}, at"
        f" {made.path}"
    )
    return 0


def _echo(said: bytes) -> None:
    note(said.decode("utf-8", "replace").rstrip("\n"))


@image.command
def ls(*, images: Where = None, json: JsonList = False) -> int:
    """The images of this node; one without a name was unpacked from a .sif that a task gave."""
    registry = Registry(registry_root(images))
    found = registry.list()
    if json:
        say_json([asdict(each) for each in found])
    elif not found:
        say(f"no images in {registry.root}; `prorl image build` makes one")
    else:
        table(("name", "digest", "MB", "files", "made", "from"), map(_row, found))
    return 0


def _row(one: Image) -> tuple[object, ...]:
    size, made = f"{one.bytes / 1e6:.0f}", _day(one.made_at)
    return (",".join(one.names), one.digest[:12], size, one.files, made, one.source)


@image.command
def rm(*names: str, unused: Flag = False, images: Where = None) -> int:
    """Remove images; one that a running service uses stays.

    Parameters
    ----------
    names
        Their names.
    unused
        Also remove every image without a name.
    """
    if not names and not unused:
        raise UserError("prorl image rm without a name", "NAME... or --unused")
    registry = Registry(registry_root(images))
    registry.open()
    for name in names:
        say(f"removed {name} ({registry.forget(name).digest[:12]})")
    for each in registry.list() if unused else []:
        if not each.names:
            registry.remove(each.digest)
            say(f"removed {each.digest[:12]} ({each.source})")
    return 0


def registry_root(given: Path | None) -> Path:
    """The flag, else the service's key `sandbox.images`, else its default.

    The environment can set the key.
    """
    section = service_environment().get("sandbox")
    configured = section.get("images") if isinstance(section, dict) else None
    return (given or (Path(str(configured)) if configured else default_root())).absolute()


def _day(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
